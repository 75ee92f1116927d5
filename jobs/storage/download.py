"""One file of a publication onto this disk: several streams, continued where an earlier call stopped, verified.

Decision: each stream writes its piece in place as it arrives, in blocks that stay in a core's cache, and a
second file names the pieces that are whole; so memory does not grow with the number of streams, and a piece
behind a slow one is kept after a kill. One thread hashes behind the first gap while the others receive.
"""

import contextlib
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
from jobs.storage.pieces import LEAST_PIECE, Piece, Pieces

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

    def fetch(self, entry: FileEntry, descriptor: int, pieces: Pieces, piece: Piece) -> None:
        """Write a piece in its place, picked up again where its connection broke.

        Shorter where the object ends too early: that is left for the sha256 to find.
        """
        failures = 0
        while piece.position < piece.end and not pieces.given_up:
            before = piece.position
            try:
                self._require_going_on()
                with contextlib.closing(self.place.read(entry.name, piece.position, piece.end - piece.position)) as blocks:
                    for block in blocks:
                        self._require_going_on()
                        size = pieces.hold(piece, len(block))
                        write_all(descriptor, block[:size], piece.position)
                        pieces.written(piece)
                        if size < len(block) or pieces.given_up:  # another stream took the rest
                            return
                return
            except Interrupted:
                raise
            except TryAgain:
                failures = 0 if piece.position > before else failures + 1
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

    def gaps(self, size: int) -> Iterator[tuple[int, int]]:
        """[start, end) of what is not there, in order."""
        position = 0
        for start, end in [*self.pieces, (size, size)]:
            if position < start:
                yield position, start
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
        arrived.unlink(missing_ok=True)  # a kill may have come between the two
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
        if _Fetching(streams, entry, partial, arrived, tell).sha256() == entry.sha256:
            os.replace(partial, final)
            arrived.unlink()
            return
        partial.unlink()
    raise MustFix(f"{entry.name} has another sha256 than its manifest says", where=streams.place.uri, remedy="publish it again")


class _Fetching:
    """What `record` does not name of one file, on its way into `partial`."""

    def __init__(self, streams: Streams, entry: FileEntry, partial: Path, record: Path, tell: Callable[[int], None]):
        self._streams, self._entry, self._tell, self._lock = streams, entry, tell, threading.Lock()
        self._descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._arrived = _Arrived(record)
        self._pieces = Pieces(self._arrived.gaps(entry.bytes), entry.bytes, streams.settings.threads, streams.piece_bytes)
        self._done = entry.bytes - self._pieces.missing

    def sha256(self) -> str:
        """Fetches it; of all that is there then."""
        self._tell(self._done)
        needed = min(self._streams.settings.threads, -(-self._pieces.missing // LEAST_PIECE))
        futures = [self._streams.pool.submit(self._stream) for _ in range(needed)] if needed > 1 else []
        try:
            if needed == 1:
                self._stream()
            digest = self._hash_what_comes()
            for future in futures:
                if not future.cancel():  # one that has not begun waits for a thread that another file has
                    future.result()
            os.fsync(self._descriptor)
        finally:
            self._pieces.give_up()
            for future in futures:
                future.cancel()
            wait(futures)  # before the descriptors they write to are closed
            self._arrived.close()
            os.close(self._descriptor)
        return digest

    def _stream(self) -> None:
        """One stream, piece after piece; one that fails ends the others."""
        try:
            piece = self._pieces.take(0.0)
            while piece:
                self._streams.fetch(self._entry, self._descriptor, self._pieces, piece)
                if self._pieces.given_up:
                    return
                rate = piece.rate(time.monotonic())
                self._arrive(piece)
                piece = self._pieces.take(rate)
        except BaseException:
            self._pieces.give_up()
            raise

    def _arrive(self, piece: Piece) -> None:
        size = piece.end - piece.start
        if size:
            # The disk begins now: a kernel with memory to spare keeps all of it back for the fsync at the end.
            os.posix_fadvise(self._descriptor, piece.start, size, os.POSIX_FADV_DONTNEED)
            self._arrived.add(piece.start, piece.end)
        self._pieces.end(piece)
        with self._lock:
            self._done += size
            self._tell(self._done)

    def _hash_what_comes(self) -> str:
        digest, buffer, hashed = hashlib.sha256(), memoryview(bytearray(_BLOCK)), 0
        reached = 0
        while hashed < self._entry.bytes and not self._pieces.given_up:
            if reached == hashed:
                reached = self._pieces.wait_beyond(hashed)
            count = read_into(self._descriptor, buffer[: reached - hashed], hashed)
            if count == 0:
                break  # the object ended early
            digest.update(buffer[:count])
            hashed += count
        return digest.hexdigest()
