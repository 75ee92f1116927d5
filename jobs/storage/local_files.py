"""The files of a publication as they stand on this disk, compared with their manifest while they are sent.

Decision: every byte is read once, in order: what is about to be sent is hashed where it was just read (a hash of
2 GB before its first part is seconds in which the link stands still, one beside it reads everything twice), and
no file appears at the destination before its sha256 agreed. Small ones are hashed at once: what is damaged there
is known before anything is sent.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from jobs.errors import Interrupted, MustFix
from jobs.storage.manifest import FileEntry

_SMALL = 8 << 20  # bytes
_BLOCK = 1 << 18  # bytes: read and hashed while they are in a core's cache


class LocalFiles:
    """Files of one folder; one that is missing or of another size or content is a MustFix.

    Each is used by one thread at a time.
    """

    def __init__(self, folder: Path, files: tuple[FileEntry, ...], should_stop: Callable[[], bool]):
        self.folder, self._should_stop = Path(folder), should_stop
        self.damage: MustFix | None = None  # known damage: what is being sent need not be sent to its end
        self._right: set[str] = set()  # names of those whose content was compared
        self._written = {entry.name: self._look(entry) for entry in files}

    def written_ns(self, entry: FileEntry) -> int:
        """Its modification time [ns] when it was first looked at."""
        return self._written[entry.name]

    def content(self, entry: FileEntry) -> bytes:
        """All of a file; for small ones."""
        return (self.folder / entry.name).read_bytes()

    @contextlib.contextmanager
    def reading(self, entry: FileEntry) -> Iterator["Reading"]:
        """The file from its beginning; once all of it went by, its content is known."""
        descriptor = os.open(self.folder / entry.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield Reading(self, entry, descriptor, hash_it=entry.name not in self._right)
        finally:
            os.close(descriptor)

    def confirm(self, entry: FileEntry) -> None:
        """Return once the file is known to be what the manifest says, and not written since; reads it where nobody has."""
        if entry.name not in self._right:
            with self.reading(entry) as reading:
                reading.skip(entry.bytes)
                reading.compare()
        if (self.folder / entry.name).stat().st_mtime_ns != self._written[entry.name]:
            raise self.damaged(entry, "was changed while it was being sent")

    def require_going_on(self) -> None:
        if self._should_stop():
            raise Interrupted("The upload was stopped", where=str(self.folder), remedy="run the same command to go on")

    def damaged(self, entry: FileEntry, what: str) -> MustFix:
        """The error to raise; from now on `damage` tells the others."""
        self.damage = MustFix(f"{entry.name} {what}", where=str(self.folder), remedy="run the package stage again")
        return self.damage

    def compared(self, entry: FileEntry, sha256: str) -> None:
        """What came of reading all of it."""
        if sha256 != entry.sha256:
            raise self.damaged(entry, "has another sha256 than its manifest says")
        self._right.add(entry.name)

    def _look(self, entry: FileEntry) -> int:
        """Its modification time [ns], which stands for its content from now on."""
        path = self.folder / entry.name
        if not path.is_file():
            raise self.damaged(entry, "is named in its manifest but missing")
        stat = path.stat()
        if stat.st_size != entry.bytes:
            raise self.damaged(entry, f"has {stat.st_size:,} bytes instead of the {entry.bytes:,} of its manifest")
        if entry.bytes <= _SMALL:
            self.compared(entry, hashlib.sha256(self.content(entry)).hexdigest())
        return stat.st_mtime_ns


class Reading:
    """One pass through a file, hashed on the way (see LocalFiles.reading)."""

    def __init__(self, files: LocalFiles, entry: FileEntry, descriptor: int, *, hash_it: bool):
        self._files, self._entry, self._descriptor = files, entry, descriptor
        self._digest = hashlib.sha256() if hash_it else None
        self._position = 0

    def into(self, buffer: bytearray | memoryview) -> None:
        """Fill `buffer` with the next bytes."""
        view = memoryview(buffer)
        for start in range(0, len(view), _BLOCK):
            self._files.require_going_on()
            block = view[start : start + _BLOCK]
            if read_into(self._descriptor, block, self._position) != len(block):
                raise self._files.damaged(self._entry, "became shorter while it was being sent")
            if self._digest:
                self._digest.update(block)
            self._position += len(block)

    def skip(self, size: int) -> None:
        """Go on by `size` bytes that nobody wants; they are read only where they are not hashed yet."""
        if self._digest is None:
            self._position += size
            return
        buffer = memoryview(bytearray(min(_BLOCK, size)))
        for start in range(0, size, _BLOCK):
            self.into(buffer[: size - start])

    def compare(self) -> None:
        """Call it at the end: MustFix where the content is not the manifest's."""
        if self._digest:
            self._files.compared(self._entry, self._digest.hexdigest())


def read_into(descriptor: int, buffer: bytearray | memoryview, start: int) -> int:
    """Fill `buffer` with the file's bytes from `start` on; returns how many there were."""
    view, have = memoryview(buffer), 0
    while have < len(view) and (count := os.preadv(descriptor, [view[have:]], start + have)):
        have += count
    return have
