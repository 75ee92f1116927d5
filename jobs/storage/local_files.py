"""The files of a publication as they stand on this disk, compared with their manifest while they are sent.

Decision: large files are hashed on one thread beside the upload (a hash of 2 GB before its first part is
seconds in which the link stands still), and none appears at the destination before its sha256 agreed.
Small ones are hashed at once: what is damaged there is known before anything is sent.
"""

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from jobs.errors import Interrupted, MustFix
from jobs.storage.manifest import FileEntry, Manifest

_SMALL, _BLOCK = 8 << 20, 1 << 20  # bytes


class LocalFiles:
    """The folder of a manifest; a file that is missing or of another size or content is a MustFix."""

    def __init__(self, folder: Path, manifest: Manifest, should_stop: Callable[[], bool]):
        self.folder, self.manifest, self._should_stop = Path(folder), manifest, should_stop
        self.damage: MustFix | None = None  # known damage: what is being sent need not be sent to its end
        self._ended = threading.Event()
        self._written = {entry.name: self._look(entry) for entry in manifest.files}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._checks: dict[str, Future[None]] = {}

    def __enter__(self) -> "LocalFiles":
        for entry in self.manifest.files:
            if entry.bytes > _SMALL:
                self._checks[entry.name] = self._pool.submit(self._check, entry)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def path(self, entry: FileEntry) -> Path:
        return self.folder / entry.name

    def confirm(self, entry: FileEntry) -> None:
        """Return once the file is known to be what the manifest says, and not written since."""
        if entry.name in self._checks:
            self._checks[entry.name].result()
        if self.path(entry).stat().st_mtime_ns != self._written[entry.name]:
            raise self._damaged(entry, "was changed while it was being sent")

    def _look(self, entry: FileEntry) -> int:
        """Its modification time [ns], which stands for its content until it is hashed."""
        path = self.path(entry)
        if not path.is_file():
            raise self._damaged(entry, "is named in its manifest but missing")
        stat = path.stat()
        if stat.st_size != entry.bytes:
            raise self._damaged(entry, f"has {stat.st_size:,} bytes instead of the {entry.bytes:,} of its manifest")
        if entry.bytes <= _SMALL:
            self._check(entry)
        return stat.st_mtime_ns

    def _check(self, entry: FileEntry) -> None:
        digest, buffer = hashlib.sha256(), bytearray(min(_BLOCK, entry.bytes))
        with open(self.path(entry), "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                if self._ended.is_set() or self._should_stop():
                    raise Interrupted(
                        "The upload was stopped", where=str(self.folder), remedy="run the same command to go on"
                    )
                digest.update(memoryview(buffer)[:count])
        if digest.hexdigest() != entry.sha256:
            raise self._damaged(entry, "has another sha256 than its manifest says")

    def _damaged(self, entry: FileEntry, what: str) -> MustFix:
        self.damage = MustFix(f"{entry.name} {what}", where=str(self.folder), remedy="run the package stage again")
        return self.damage


def read_into(descriptor: int, buffer: bytearray | memoryview, start: int) -> int:
    """Fill `buffer` with the file's bytes from `start` on; returns how many there were."""
    view, have = memoryview(buffer), 0
    while have < len(view) and (count := os.preadv(descriptor, [view[have:]], start + have)):
        have += count
    return have
