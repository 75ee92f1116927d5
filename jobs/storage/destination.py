"""What publishing and saving need of a place, and which place a URI names."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from jobs.errors import MustFix
from jobs.settings import PushSettings
from jobs.storage.folder import FolderDestination
from jobs.storage.local_files import LocalFiles
from jobs.storage.manifest import FileEntry, UploadState
from jobs.storage.s3 import S3Destination

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
ShouldStop = Callable[[], bool]


class Destination(Protocol):
    """What a publication needs of a place. Names are relative, with "/"."""

    uri: str
    exclusive: bool  # while `hold` lasts nobody else publishes here

    def hold(self) -> contextlib.AbstractContextManager[None]: ...
    def found(self, name: str) -> tuple[int, str | None] | None: ...  # (bytes, sha256 where known)
    def look(self, entries: tuple[FileEntry, ...]) -> None: ...  # at all of them, so that `holds` need not ask for what is not there
    def proven(self, entries: tuple[FileEntry, ...]) -> set[str]: ...  # names of those that stand there now as this call sent them
    def holds(self, entry: FileEntry, believed: bool) -> bool: ...  # this content is there; `believed`: a record says so
    def read(self, name: str, start: int = 0, size: int | None = None) -> Iterator[bytes]: ...
    def read_small(self, name: str) -> bytes | None: ...
    def write_small(self, name: str, data: bytes, *, only_if_absent: bool = False, should_stop: ShouldStop = lambda: False) -> bool: ...
    def keeps_writers_apart(self, name: str, data: bytes) -> bool: ...  # of an object that stands there, with `data`
    def delete(self, name: str) -> None: ...
    def names(self, prefix: str) -> list[str]: ...  # of everything below the folder `prefix`, which ends in "/"
    def upload(
        self,
        entry: FileEntry,
        local: LocalFiles,
        state: UploadState,
        sent: Callable[[int], None],  # (bytes more)
        should_stop: ShouldStop,
        before_it_appears: Callable[[], None],  # raises where the file must not appear
    ) -> None: ...
    def clean_up(self, entries: tuple[FileEntry, ...]) -> None: ...


def destination(uri: str, settings: PushSettings) -> Destination:
    """The place a URI names; a URI of another form is a MustFix."""
    parts = urlsplit(uri)
    if parts.scheme == "s3" and parts.netloc:
        return S3Destination(uri.rstrip("/"), parts.netloc, uri.partition("://")[2].partition("/")[2], settings)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and len(parts.path) > 1:
        return FolderDestination(uri, Path(unquote(parts.path)))
    named = next((f"push.{name}" for name in ("uri", "backup_uri") if getattr(settings, name) == uri), "the address that was given")
    raise MustFix(f"The destination {uri!r} is no address", where=named, remedy="use s3://bucket/prefix or file:///folder")
