"""Rows that wait in memory until enough of a sample follow each other: pages of a few rows in one area.

Decision: one area for all samples, so that the rows of a decoding step (one of each of a thousand samples) are put
into place by one copy a tensor, and an extent is written from where its rows lie: between the step's own memory and
the file every byte is copied once. Pages and not whole extents, so that memory follows what is there and not what
may come. The area is reserved at once and costs nothing until it is used; the page given back last is used first.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jobs.storage.shards import RawRows

# Rows of a page, and the most bytes of all pages: at 57 KB a row 75,000 rows, of 1,024 samples at once 73 each.
PAGE_ROWS, LIMIT_BYTES = 32, 4 << 30


class RowPages:
    """Memory for rows of the tensors in `strides` (name -> bytes of a row). Not for several threads at once."""

    def __init__(self, strides: Mapping[str, int], extent_rows: int, limit_bytes: int):
        self.page_rows = min(PAGE_ROWS, extent_rows)
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        page = self.page_rows * sum(strides.values())
        # Two extents at least, else a sample could never fill one.
        self.count = max(2 * -(-extent_rows // self.page_rows), min(limit_bytes, machine // 4) // page)
        self.used = 0
        self._area = {name: np.empty((self.count * self.page_rows, stride), np.uint8) for name, stride in strides.items()}
        self._given_back: list[int] = []
        self._next = 0  # pages from here on were never used
        self._source: Mapping[str, np.ndarray] = {}
        self._from: list[np.ndarray] = []  # rows of the source, and where they go in the area
        self._to: list[np.ndarray] = []

    def take(self) -> int | None:
        """A page, or None while all are in use."""
        if self._given_back:
            page = self._given_back.pop()
        elif self._next < self.count:
            page, self._next = self._next, self._next + 1
        else:
            return None
        self.used += 1
        return page

    def give_back(self, pages: Sequence[int]) -> None:
        self._given_back.extend(pages)
        self.used -= len(pages)

    @contextlib.contextmanager
    def copying(self, source: Mapping[str, np.ndarray]) -> Iterator[None]:
        """Within, `copy_later` is about rows of `source` (name -> bytes [R, stride]); all are copied at its end."""
        self._source, self._from, self._to = source, [], []
        try:
            yield
        finally:
            self.copy_now()
            self._source = {}  # lets go of the step's memory

    def copy_later(self, pages: Sequence[int], row: int, first: int, count: int) -> int:
        """Note that source rows first .. become rows `row` .. of `pages`: `count`, or what the page holds; returns how many."""
        offset = row % self.page_rows
        taken, place = min(count, self.page_rows - offset), pages[row // self.page_rows] * self.page_rows + offset
        self.copy_rows_later(np.arange(first, first + taken), np.arange(place, place + taken))
        return taken

    def copy_rows_later(self, first: np.ndarray, places: np.ndarray) -> None:
        """Note that source rows `first` go to these places, rows of the whole area; both [n]."""
        if len(first):
            self._from.append(first)
            self._to.append(places)

    def copy_now(self) -> None:
        """Copy what was noted."""
        if not self._from:
            return
        taken, to = np.concatenate(self._from), np.concatenate(self._to)
        order = taken.argsort(kind="stable")  # they were not noted in the order in which they lie
        taken, to = taken[order], to[order]
        if (np.diff(taken) == 1).all():  # no rejected drafts or long runs between them: then nothing is copied twice
            taken = slice(taken[0], taken[-1] + 1)
        self._from, self._to = [], []
        for name, rows in self._source.items():
            self._area[name][to] = rows[taken]  # numpy lets go of the interpreter lock meanwhile

    def rows(self, pages: Sequence[int], first: int, count: int) -> RawRows:
        """Rows first .. first+count-1 of those that lie in `pages`, in pieces and without a copy."""
        pieces: RawRows = {name: [] for name in self._area}
        for row in range(first - first % self.page_rows, first + count, self.page_rows):
            base = pages[row // self.page_rows] * self.page_rows
            begin, end = max(first - row, 0), min(first + count - row, self.page_rows)
            for name, area in self._area.items():
                pieces[name].append(area[base + begin : base + end])
        return pieces
