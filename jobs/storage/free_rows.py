"""Rows of the shards that no sample needs, taken first-fit and given back."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jobs.storage.extents import Extent


class FreeRun(NamedTuple):
    shard: int
    row: int
    rows: int


class FreeRows:
    """Runs of free rows, in order of shard and row, none of them touching another."""

    def __init__(self, runs: Iterable[FreeRun] = ()):
        self._runs = list(runs)

    @classmethod
    def between(cls, live: Iterable[Extent], capacities: Mapping[int, int]) -> "FreeRows":
        """What the extents in `live` leave of these shards (number -> rows)."""
        by_shard: dict[int, list[Extent]] = {}
        for extent in live:
            by_shard.setdefault(extent.shard, []).append(extent)
        free: list[FreeRun] = []
        for number, capacity in capacities.items():
            row = 0
            for extent in sorted(by_shard.get(number, []), key=lambda extent: extent.row):
                if extent.row > row:
                    free.append(FreeRun(number, row, extent.row - row))
                row = max(row, extent.row + extent.rows)
            if row < capacity:
                free.append(FreeRun(number, row, capacity - row))
        return cls(free)

    def take(self, rows: int, least: int) -> FreeRun | None:
        """Up to `rows` rows: of the first run that holds all, else of the first with `least`; None without one."""
        place = next((place for place, run in enumerate(self._runs) if run.rows >= rows), None)
        if place is None:
            place = next((place for place, run in enumerate(self._runs) if run.rows >= least), None)
        if place is None:
            return None
        run = self._runs[place]
        taken = min(rows, run.rows)
        self._runs[place : place + 1] = [FreeRun(run.shard, run.row + taken, run.rows - taken)] if taken < run.rows else []
        return FreeRun(run.shard, run.row, taken)

    def release(self, extents: Iterable[Extent]) -> None:
        self.give_back(FreeRun(extent.shard, extent.row, extent.rows) for extent in extents)

    def give_back(self, runs: Iterable[FreeRun]) -> None:
        """Rows are free again, joined with their free neighbours."""
        joined: list[FreeRun] = []
        for run in sorted([*self._runs, *runs]):
            last = joined[-1] if joined else None
            if last and last.shard == run.shard and last.row + last.rows == run.row:
                joined[-1] = FreeRun(last.shard, last.row, last.rows + run.rows)
            else:
                joined.append(run)
        self._runs = joined
