"""A `file://` destination: a folder on this machine or on a mounted disk.

Decision: the same promises as a bucket, from what a file system has. One publisher at a time by
flock; every file under a hidden temporary name until it is complete, then renamed; the manifest last.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from jobs.errors import Interrupted, MustFix, TryAgain
from jobs.storage.files import disk_full_named, fsync_folder, held, sha256_file, write_all, write_atomically
from jobs.storage.local_files import LocalFiles
from jobs.storage.manifest import LOCK, FileEntry, UploadState

_BLOCK = 1 << 22  # bytes copied at once, and between two looks at should_stop


_UNUSABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
}


@contextlib.contextmanager
def _refusal_named(path: Path) -> Iterator[None]:
    """Turn what a file system refuses for ever (permission, read-only, a file in the way) into a MustFix."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNUSABLE:
            raise
        raise MustFix(
            f"The folder cannot be used: {error.strerror}", where=str(path), remedy="check the address and the permissions there"
        ) from None


class FolderDestination:
    """Files below `root`; see bucket.Destination for what the methods promise."""

    exclusive = True  # whoever holds the flock is alone: a dead publisher's claim may be taken over

    def __init__(self, uri: str, root: Path):
        self.uri, self.root = uri, root

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            with _refusal_named(self.root):
                self.root.mkdir(parents=True, exist_ok=True)
                stack.enter_context(held(self.root / LOCK, what="this destination", remove=True))
            yield

    def found(self, name: str) -> tuple[int, str | None] | None:
        path = self.root / name
        with _refusal_named(path):
            try:
                return path.stat().st_size, None
            except FileNotFoundError:
                return None

    def look(self, entries: tuple[FileEntry, ...]) -> None:
        """Each file is looked at by itself: that costs nothing here."""

    def proven(self, entries: tuple[FileEntry, ...]) -> set[str]:
        return set()

    def holds(self, entry: FileEntry, believed: bool) -> bool:
        """Reading a local file again is cheap, so its content decides."""
        found = self.found(entry.name)
        return found is not None and found[0] == entry.bytes and sha256_file(self.root / entry.name) == entry.sha256

    def read(self, name: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        """The file's bytes from `start` on, at most `size`."""
        path = self.root / name
        with _refusal_named(path):
            try:
                file = open(path, "rb")  # noqa: SIM115 (closed below; the generator may be left half-way)
            except FileNotFoundError:
                raise MustFix(f"{name} is named in the manifest but missing", where=self.uri, remedy="publish again") from None
        with file:
            file.seek(start)
            left = size if size is not None else os.fstat(file.fileno()).st_size - start
            while left > 0 and (block := file.read(min(_BLOCK, left))):
                left -= len(block)
                yield block

    def read_small(self, name: str) -> bytes | None:
        path = self.root / name
        with _refusal_named(path):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def write_small(self, name: str, data: bytes, *, only_if_absent: bool = False, should_stop: Callable[[], bool] = lambda: False) -> bool:
        path = self.root / name
        if only_if_absent and path.exists():
            return False
        with _refusal_named(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
        return True

    def keeps_writers_apart(self, name: str, data: bytes) -> bool:
        """The lock that `hold` takes does."""
        return True

    def delete(self, name: str) -> None:
        path = self.root / name
        with _refusal_named(path):
            path.unlink(missing_ok=True)

    def names(self, prefix: str) -> list[str]:
        """Every file below the folder `prefix`."""
        return [str(path.relative_to(self.root)) for path in (self.root / prefix).rglob("*") if path.is_file()]

    def upload(
        self,
        entry: FileEntry,
        local: LocalFiles,
        state: UploadState,
        sent: Callable[[int], None],
        should_stop: Callable[[], bool],
        before_it_appears: Callable[[], None],
    ) -> None:
        """Copy under a hidden name (a killed copy goes on where it stopped), check its sha256, rename."""
        final = self.root / entry.name
        temporary = final.with_name(f".{final.name}.{entry.sha256[:16]}.partial")
        with _refusal_named(final), disk_full_named(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(2):  # the second time without the part an earlier process left
                self._copy(entry, local, temporary, sent, should_stop)
                before_it_appears()
                if sha256_file(temporary) == entry.sha256:
                    os.replace(temporary, final)
                    fsync_folder(final.parent)
                    return
                temporary.unlink()
        raise TryAgain(f"{entry.name} arrived damaged twice", where=str(final), remedy="check the disk")

    def _copy(
        self, entry: FileEntry, local: LocalFiles, temporary: Path, sent: Callable[[int], None], should_stop: Callable[[], bool]
    ) -> None:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        buffer = memoryview(bytearray(_BLOCK))
        try:
            with local.reading(entry) as reading:
                there = min(os.fstat(descriptor).st_size, entry.bytes)
                reading.skip(there)
                for start in range(there, entry.bytes, _BLOCK):
                    if should_stop():
                        raise Interrupted("The upload was stopped", where=self.uri, remedy="run the same command to go on")
                    block = buffer[: entry.bytes - start]
                    reading.into(block)
                    write_all(descriptor, block)
                    sent(len(block))
                reading.compare()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def clean_up(self, entries: tuple[FileEntry, ...]) -> None:
        """Remove copies that were begun for other contents of the same names."""
        for entry in entries:
            final = self.root / entry.name
            for leftover in final.parent.glob(f".{final.name}.*.partial"):
                leftover.unlink(missing_ok=True)
