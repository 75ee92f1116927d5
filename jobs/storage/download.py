"""One file of a publication onto this disk: several streams, continued where an earlier call stopped, verified."""

import hashlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import Interrupted, MustFix, TryAgain
from jobs.settings import PushSettings
from jobs.storage.destination import Destination, ShouldStop
from jobs.storage.files import write_all
from jobs.storage.manifest import FileEntry

DOWNLOAD_ATTEMPTS = 5  # in a row without a single new byte
_BLOCK = 1 << 22
LARGEST_PIECE = 16 << 20  # bytes; so many times the threads are held in memory


@dataclass(frozen=True)
class Streams:
    """Several pieces of one object at once, in their order: one stream alone does not fill a link of 5 Gbps.

    In order, so that a partial file is a beginning of the whole, and its length says where to go on.
    """

    pool: ThreadPoolExecutor
    settings: PushSettings
    place: Destination
    should_stop: ShouldStop

    def read(self, entry: FileEntry, start: int) -> Iterator[bytes]:
        step = min(self.settings.part_mib << 20, LARGEST_PIECE)
        starts = iter(range(start, entry.bytes, step))
        ahead: deque[Future[bytes]] = deque()
        try:
            for first in itertools.islice(starts, self.settings.threads):
                ahead.append(self.pool.submit(self._piece, entry, first, min(step, entry.bytes - first)))
            while ahead:
                piece = ahead.popleft().result()
                for first in itertools.islice(starts, 1):
                    ahead.append(self.pool.submit(self._piece, entry, first, min(step, entry.bytes - first)))
                yield piece
        finally:
            for future in ahead:
                future.cancel()

    def _piece(self, entry: FileEntry, start: int, size: int) -> bytes:
        """A piece, picked up again where its connection broke; shorter only where the object ends."""
        data, failures = bytearray(), 0
        while len(data) < size:
            before = len(data)
            try:
                for block in self.place.read(entry.name, start + before, size - before):
                    if self.should_stop():
                        raise Interrupted(
                            "The download was stopped", where=self.place.uri, remedy="run the same command to go on"
                        )
                    data += block
                break
            except Interrupted:
                raise
            except TryAgain:
                failures = 0 if len(data) > before else failures + 1
                if failures >= DOWNLOAD_ATTEMPTS:
                    raise
                time.sleep(min(0.2 * 2**failures, 5.0))
        return bytes(data)


def download(streams: Streams, entry: FileEntry, staging: Path, report: Callable[[int], None]) -> None:
    """One file into the staging folder, continued where an earlier call stopped, under its name once verified."""
    final = staging / entry.name
    partial = final.with_name(final.name + ".partial")
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():  # verified before it got this name
        report(entry.bytes)
        return
    for _ in range(2):  # a second time from nothing: the part from an earlier call may have been damaged
        if _fetch_bytes(streams, entry, partial, report) == entry.sha256:
            os.replace(partial, final)
            return
        partial.unlink()
    raise MustFix(
        f"{entry.name} has another sha256 than its manifest says", where=streams.place.uri, remedy="publish it again"
    )


def _fetch_bytes(streams: Streams, entry: FileEntry, partial: Path, report: Callable[[int], None]) -> str:
    """Append to `partial` until it has the file's bytes or the object ends; returns the sha256 of all of it.

    What an earlier call left is read again for it, what comes now is hashed on its way: while one thread hashes
    and writes, the others wait for the network.
    """
    digest = hashlib.sha256()
    if partial.exists():
        with open(partial, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        have = os.fstat(descriptor).st_size
        for piece in streams.read(entry, have):
            write_all(descriptor, piece)
            digest.update(piece)
            have += len(piece)
            report(min(have, entry.bytes))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()
