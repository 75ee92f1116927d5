"""Where the next row of each sample goes: arrays over all samples with rows in memory.

Decision: a decoding step brings one row of each of a thousand samples, many times a second, to a thread that shares the
interpreter with the one that schedules. Nearly all of these rows follow the row before them into the same page: a few
array operations place them together (`continued`), and only what is left is looked at one by one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """Rows first .. first+rows-1 of what is given together: positions `position ..` of one sample."""

    sample: str
    position: int
    first: int
    rows: int


class Runs(NamedTuple):
    """Several of them: `n` samples, and int64 arrays `[n]`."""

    samples: Sequence[str]
    position: np.ndarray
    first: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, *runs: Run) -> "Runs":
        samples, *numbers = zip(*runs, strict=True)
        return cls(samples, *np.array(numbers, dtype=np.int64))

    def run(self, index: int) -> Run:
        return Run(self.samples[index], int(self.position[index]), int(self.first[index]), int(self.rows[index]))


class Tails:
    """Of each sample the position and the place of its next row, and how many rows may follow there. Not for several threads at once."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._position = np.full(64, -1)  # slot 0 is nobody's: no row follows there
        self._place, self._room = np.zeros_like(self._position), np.zeros_like(self._position)

    def put(self, sample: str, position: int, place: int, room: int) -> None:
        """The next row of `sample` is `position` and goes to `place` of the pages; `room` rows may follow each other there."""
        slot = self._slots.get(sample) or self._new_slot(sample)
        self._position[slot], self._place[slot], self._room[slot] = position, place, room

    def position(self, sample: str) -> int:
        """The position of the sample's next row; -1 if none was put."""
        return int(self._position[self._slots.get(sample, 0)])

    def forget(self, sample: str) -> None:
        slot = self._slots.pop(sample, None)
        if slot is not None:
            self._position[slot], self._room[slot] = -1, 0
            self._free.append(slot)

    def continued(self, runs: Runs) -> tuple[np.ndarray, np.ndarray]:
        """(which runs are one row that has its place now, [n] bool; their places). No sample may stand among `runs` twice."""
        slots = np.fromiter(map(self._slots.get, runs.samples, [0] * len(runs.samples)), np.int64, len(runs.samples))
        follows = (runs.rows == 1) & (self._room[slots] > 0) & (self._position[slots] == runs.position)
        slots = slots[follows]
        places = self._place[slots]
        self._position[slots] += 1
        self._place[slots] += 1
        self._room[slots] -= 1
        return follows, places

    def _new_slot(self, sample: str) -> int:
        slot = self._free.pop() if self._free else len(self._slots) + 1
        if slot == len(self._position):
            self._position = np.pad(self._position, (0, slot), constant_values=-1)
            self._place, self._room = np.pad(self._place, (0, slot)), np.pad(self._room, (0, slot))
        self._slots[sample] = slot
        return slot
