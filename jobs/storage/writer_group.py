"""Several processes that write one store together: the replicas of data-parallel decoding, each its own samples.

Decision: one folder, one index, and the same files as with one writer, so nothing that reads a store knows of replicas,
and a store begun by eight writers is continued by one. Writer w of n writes into the shards whose number is w modulo n:
which rows are free in them, nobody else decides. Index lines of all go to the one `index.jsonl`, each by one append
under a lock, because the order of lines decides which of two extents counts, also after a restart that gives a sample
to another replica. The store's lock is shared by the group and kept from everybody else: its first member takes it
alone, which proves that no process of an earlier run is left, before it lets the others in.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.storage.files import LineLog, disk_full_named, held, held_by_others_too

TAIL_BYTES = 1 << 16  # longer than any line of the index


@dataclass(frozen=True)
class Member:
    """Which of how many writers; the first opens the store before the others do."""

    number: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.number < self.of:
            raise ValueError(f"writer {self.number} of {self.of}")

    @property
    def alone(self) -> bool:
        return self.of == 1

    def owns(self, shard: int) -> bool:
        return shard % self.of == self.number

    def next_shard(self, taken: int) -> int:
        """The number of a new shard, where shards 0 .. taken - 1 may exist."""
        return taken + (self.number - taken) % self.of

    def hold(self, lock: Path, what: str) -> contextlib.AbstractContextManager[None]:
        """The store's lock, for as long as the context lasts; MustFix where somebody else has it."""
        return held(lock, what=what) if self.alone else held_by_others_too(lock, what=what, first=self.number == 0)

    def index(self, path: Path) -> LineLog:
        return LineLog(path) if self.alone else SharedLineLog(path)


ALONE = Member()


class SharedLineLog(LineLog):
    """A `LineLog` that several processes append to, each line whole and where it was appended.

    A process may die within its append, and others go on: what it left of a line is cut off by whoever appends next.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self._reader = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def append(self, line: bytes, *, sync: bool = False) -> None:
        with self._locked():
            self._size = os.fstat(self._descriptor).st_size
            self._cut_torn_tail()
            super().append(line, sync=sync)

    def close(self) -> None:
        super().close()
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # the kernel lets go of it when its holder dies
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _cut_torn_tail(self) -> None:
        if not self._size or os.pread(self._reader, 1, self._size - 1) == b"\n":
            return
        begin = max(0, self._size - TAIL_BYTES)
        self._size = begin + os.pread(self._reader, TAIL_BYTES, begin).rfind(b"\n") + 1
        with disk_full_named(self.path):
            os.ftruncate(self._descriptor, self._size)
