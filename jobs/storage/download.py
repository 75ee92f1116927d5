"""One file of a publication onto this disk: several streams, continued where an earlier call stopped, verified.

Decision: each stream writes its piece in place as it arrives, in blocks that stay in a core's cache, and a
second file names the pieces that are whole; so memory does not grow with the number of streams, and a piece
behind a slow one is kept after a kill. One thread hashes behind the first gap while the others receive.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import Interrupted, MustFix, TryAgain
from jobs.settings import PushSettings
from jobs.storage.destination import Destination, ShouldStop
from jobs.storage.files import write_all
from jobs.storage.local_files import read_into
from jobs.storage.manifest import FileEntry

DOWNLOAD_ATTEMPTS = 5  # in a row without a single new byte
LARGEST_PIECE = 16 << 20  # bytes; so many times the threads are fetched again after a kill
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Streams:
    """Several pieces of one object at once: one stream alone does not fill a link of 5 Gbps."""

    pool: ThreadPoolExecutor  # of all files together
    settings: PushSettings
    place: Destination
    should_stop: ShouldStop

    @property
    def piece_bytes(self) -> int:
        return min(self.settings.part_mib << 20, LARGEST_PIECE)

    def fetch(self, entry: FileEntry, descriptor: int, start: int, size: int) -> None:
        """Write a piece in its place, picked up again where its connection broke.

        Shorter where the object ends too early: that is left for the sha256 to find.
        """
        have, failures = 0, 0
        while have < size:
            before = have
            try:
                self._require_going_on()
                for block in self.place.read(entry.name, start + have, size - have):
                    self._require_going_on()
                    write_all(descriptor, block, start + have)
                    have += len(block)
                return
            except Interrupted:
                raise
            except TryAgain:
                failures = 0 if have > before else failures + 1
                if failures >= DOWNLOAD_ATTEMPTS:
                    raise
                time.sleep(min(0.2 * 2**failures, 5.0))

    def _require_going_on(self) -> None:
        if self.should_stop():
            raise Interrupted("The download was stopped", where=self.place.uri, remedy="run the same command to go on")


class _Arrived:
    """The pieces of a partial file that are whole: lines "start end" [bytes], appended one write each."""

    def __init__(self, path: Path):
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].split("\n")[:-1]  # the last may be torn
        self.pieces = sorted((int(line.split()[0]), int(line.split()[1])) for line in lines)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def add(self, start: int, end: int) -> None:
        os.write(self._descriptor, f"{start} {end}\n".encode())

    def close(self) -> None:
        os.close(self._descriptor)

    def missing(self, size: int, step: int) -> Iterator[tuple[int, int]]:
        """(start, bytes) of what is not there, in order, `step` at most each."""
        position = 0
        for start, end in [*self.pieces, (size, size)]:
            while position < start:
                taken = min(step, start - position)
                yield position, taken
                position += taken
            position = max(position, end)


def download(streams: Streams, entry: FileEntry, staging: Path, report: Callable[[int], None]) -> None:
    """One file into the staging folder, continued where an earlier call stopped, under its name once verified.

    `report` is told the bytes that are there more.
    """
    final = staging / entry.name
    partial = final.with_name(final.name + ".partial")
    arrived = final.with_name(final.name + ".partial.partial")  # no file of a manifest is called so
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():  # verified before it got this name
        report(entry.bytes)
        return
    told = 0

    def tell(done: int) -> None:
        nonlocal told
        if done > told:
            report(done - told)
            told = done

    for _ in range(2):  # a second time from nothing: a piece of an earlier call may have been damaged
        if not partial.exists():
            arrived.unlink(missing_ok=True)
        if _fetch(streams, entry, partial, arrived, tell) == entry.sha256:
            os.replace(partial, final)
            arrived.unlink()
            return
        partial.unlink()
    raise MustFix(f"{entry.name} has another sha256 than its manifest says", where=streams.place.uri, remedy="publish it again")


def _fetch(streams: Streams, entry: FileEntry, partial: Path, record: Path, tell: Callable[[int], None]) -> str:
    """Fetch into `partial` what `record` does not name; returns the sha256 of all that is there then."""
    digest, buffer, hashed = hashlib.sha256(), bytearray(_BLOCK), 0
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    arrived = _Arrived(record)
    missing = list(arrived.missing(entry.bytes, streams.piece_bytes))

    done, lock = entry.bytes - sum(size for _, size in missing), threading.Lock()
    tell(done)

    def piece(start: int, size: int) -> None:
        nonlocal done
        streams.fetch(entry, descriptor, start, size)
        # The disk begins now: a kernel with memory to spare keeps all of it back for the fsync at the end.
        os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)
        arrived.add(start, start + size)
        with lock:
            done += size
            tell(done)

    def hash_up_to(end: int) -> None:
        nonlocal hashed
        while hashed < end:
            view = memoryview(buffer)[: end - hashed]
            count = read_into(descriptor, view, hashed)
            if count == 0:
                return  # the object ended early
            digest.update(view[:count])
            hashed += count

    futures = [streams.pool.submit(piece, start, size) for start, size in missing]
    try:
        for (start, size), future in zip(missing, futures, strict=True):
            future.result()
            hash_up_to(start + size)
        hash_up_to(entry.bytes)
        os.fsync(descriptor)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)  # before the descriptors they write to are closed
        arrived.close()
        os.close(descriptor)
    return digest.hexdigest()
