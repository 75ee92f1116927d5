"""Writing a state store: buffers rows a sample, places them in shards, names them in the index.

Decision: rows are written while answers are being decoded, in runs of at least `extent_rows`, so memory
holds at most that many rows of each running request. A run lies in one shard. Free rows are reused
first-fit, and only rows that no committed sample needs are ever free, so nothing that a reader may
read is written twice.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from jobs.errors import JobError, MustFix
from jobs.storage.extents import INDEX, Extent, first_gap, read_index, resolve
from jobs.storage.files import LineLog, held
from jobs.storage.responses import RESPONSES, scan_responses
from jobs.storage.shards import (
    STORE,
    Rows,
    ShardFile,
    ShardPlan,
    StateLayout,
    checksum,
    create_shard,
    dequantize,
    encode,
    shard_name,
)


class StateGap(JobError):
    """A sample lacks a row: the capture lost it, and no training may see a shifted sequence."""


@dataclass
class _Pending:
    """A sample being decoded: what is written of it, and its buffered rows from position `start` on."""

    extents: list[Extent] = field(default_factory=list)
    chunks: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    start: int = 0
    buffered: int = 0
    finished_rows: int | None = None


@dataclass(frozen=True)
class _FreeRows:
    shard: int
    row: int
    rows: int


class StateWriter:
    """Writes one store; one process at a time (flock), any thread of it.

    Opening an existing folder continues it. Another layout, a held lock or a committed sample whose rows
    are gone is a MustFix; so is a full disk at any later call, and the store stays consistent then.
    """

    def __init__(self, folder: Path, layout: StateLayout, *, shard_bytes: int = 1 << 30, extent_rows: int = 256):
        self.folder, self.layout, self.extent_rows = Path(folder), layout, max(1, extent_rows)
        self._capacity = layout.capacity(shard_bytes)
        self._lock, self._closed = threading.RLock(), False
        self._pending: dict[str, _Pending] = {}
        self._shards: dict[int, ShardFile] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(held(self.folder / "writer.lock", what="this state store"))
            self._settle_layout()
            self._index = LineLog(self.folder / INDEX)
            stack.callback(self._index.close)
            stack.callback(self._close_shards)
            self._committed, live = self._recover()
            self._free = self._free_rows(live)
            self._open = stack.pop_all()

    def append(self, sample_id: str, first_position: int, taps: Tensor, final: Tensor, logprob: Tensor) -> None:
        """Take rows of positions first_position, first_position + 1, …; copied, so the caller's memory is free again.

        taps [r, T, H], final [r, H] (after the verifier's last norm), logprob [r] fp32; CPU tensors. Rows are
        buffered until `extent_rows` of them follow each other; positions that come again replace earlier ones.
        """
        rows = self._check_shapes(sample_id, first_position, taps, final, logprob)
        with self._lock:
            sample = self._sample(sample_id, first_position, rows)
            if sample is None or rows == 0:
                return
            if sample.buffered and first_position != sample.start + sample.buffered:
                self._flush(sample_id, sample)  # computed again after a preemption, or a gap `finish` will name
            if not sample.buffered:
                sample.start = first_position
            store_as = taps.dtype if self.layout.is_fp8 else self.layout.torch_dtype  # FP8 is made per extent
            sample.chunks.append(
                (
                    taps.detach().to(store_as, copy=True),  # [r, T, H]
                    final.detach().to(store_as, copy=True),  # [r, H]
                    logprob.detach().to(torch.float32, copy=True),  # [r]
                )
            )
            sample.buffered += rows
            if sample.buffered >= self.extent_rows:
                self._flush(sample_id, sample)

    def finish(self, sample_id: str, tokens: int) -> None:
        """The sample has `tokens` tokens in all: write what is buffered; rows from position tokens - 1 on are dropped.

        Not yet durable: call `sync`, then `ResponseLog.append`. A gap in 0..tokens-2 raises StateGap.
        """
        length = max(tokens - 1, 0)
        with self._lock:
            self._refuse_committed(sample_id)
            sample = self._pending.setdefault(sample_id, _Pending())
            self._flush(sample_id, sample, end=length)
            gap = first_gap(sample.extents, length)
            if gap is not None:
                raise StateGap(
                    f"Sample {sample_id} has no hidden state at position {gap} of {length}",
                    where=str(self.folder),
                    remedy="this is a fault of the capture; discard the sample and generate it again",
                )
            kept = [extent for extent, _, _ in resolve(sample.extents, length)]
            self._release(extent for extent in sample.extents if extent not in kept)
            sample.extents, sample.finished_rows = kept, length

    def stored(self, sample_id: str, positions: Iterable[int]) -> tuple[Tensor, Tensor]:
        """final [k, H] and logprob [k] of a finished sample at `positions`, read back from the shards."""
        found: list[Rows] = []
        with self._lock:
            sample = self._pending[sample_id]
            spans = resolve(sample.extents, sample.finished_rows or 0)
            for position in positions:
                extent = next(extent for extent, start, end in spans if start <= position < end)
                found.append(self._shards[extent.shard].read(extent.row + position - extent.position))
        rows = {name: torch.cat([row[name] for row in found]) for name in ("final", "logprob")}
        if self.layout.is_fp8:
            rows["final"] = dequantize(rows["final"], torch.cat([row["final_scale"] for row in found]))
        return rows["final"], rows["logprob"]

    def discard(self, sample_id: str) -> None:
        """Forget a sample that is not committed; its rows may be used again.

        Of a sample that was finished the rows stay taken until the store is opened again: its response line
        may already stand in the driver's log, which this process does not watch.
        """
        with self._lock:
            self._refuse_committed(sample_id)
            sample = self._pending.pop(sample_id, None)
            if sample and sample.finished_rows is None:
                self._release(sample.extents)

    def sync(self) -> None:
        """Make everything written durable: the rows first, then the index lines that speak of them."""
        with self._lock:
            for shard in self._shards.values():
                shard.sync()
            self._index.sync()

    def close(self) -> None:
        """Sync and let go of the folder. Samples that were not finished are forgotten."""
        with self._lock, self._open:
            if not self._closed:
                self.sync()
            self._closed = True

    def __enter__(self) -> "StateWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- opening ---------------------------------------------------------------------------------------

    def _settle_layout(self) -> None:
        for leftover in self.folder.glob("shard-*.safetensors.partial"):
            leftover.unlink()
        if not (self.folder / STORE).exists():
            if (self.folder / INDEX).exists():
                raise MustFix("The store's description is missing", where=str(self.folder), remedy=f"restore {STORE}")
            self.layout.save(self.folder)
            return
        there = StateLayout.load(self.folder)
        ours, theirs = dataclasses.asdict(self.layout), dataclasses.asdict(there)
        differing = [f"{key} {theirs[key]!r} instead of {ours[key]!r}" for key in ours if ours[key] != theirs[key]]
        if differing:
            raise MustFix(
                f"The store was written with {', '.join(differing)}",
                where=str(self.folder),
                remedy="use the settings it was written with, or another run directory",
            )

    def _recover(self) -> tuple[dict[str, int], list[Extent]]:
        """(rows of each committed sample, the extents committed samples consist of)."""
        committed = {response.id: response.rows for _, _, response in scan_responses(self.folder / RESPONSES)}
        extents: dict[str, list[Extent]] = {sample_id: [] for sample_id in committed}
        for extent in read_index(self.folder / INDEX):
            if extent.sample in extents:
                extents[extent.sample].append(extent)
        live: list[Extent] = []
        for sample_id, rows in committed.items():
            gap = first_gap(extents[sample_id], rows)
            if gap is not None:
                raise MustFix(
                    f"Sample {sample_id} is committed, but has no hidden state at position {gap} of {rows}",
                    where=str(self.folder),
                    remedy="restore the store from a copy, or generate the split again in an empty folder",
                )
            live += [extent for extent, _, _ in resolve(extents[sample_id], rows)]
        return committed, live

    def _free_rows(self, live: list[Extent]) -> list[_FreeRows]:
        """Rows of the existing shards that no committed sample needs, in order; opens the shards."""
        free: list[_FreeRows] = []
        by_shard: dict[int, list[Extent]] = {}
        for extent in live:
            by_shard.setdefault(extent.shard, []).append(extent)
        count = len(list(self.folder.glob("shard-*.safetensors")))
        for number in range(max([count, *(shard + 1 for shard in by_shard)])):
            plan = self._open_shard(number)
            row = 0
            for extent in sorted(by_shard.get(number, []), key=lambda extent: extent.row):
                if extent.row > row:
                    free.append(_FreeRows(number, row, extent.row - row))
                row = max(row, extent.row + extent.rows)
            if row < plan.capacity:
                free.append(_FreeRows(number, row, plan.capacity - row))
        return free

    def _open_shard(self, number: int) -> ShardPlan:
        plan = ShardPlan.read(self.folder / shard_name(number), self.layout)
        self._shards[number] = ShardFile(plan, self.layout)
        return plan

    def _close_shards(self) -> None:
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()

    # -- writing ---------------------------------------------------------------------------------------

    def _check_shapes(self, sample_id: str, first_position: int, taps: Tensor, final: Tensor, logprob: Tensor) -> int:
        rows, width, count = len(logprob), self.layout.hidden_size, len(self.layout.taps)
        got = tuple(taps.shape), tuple(final.shape), tuple(logprob.shape)
        if got != ((rows, count, width), (rows, width), (rows,)) or first_position < 0:
            raise JobError(
                f"Sample {sample_id}: rows of shapes {got} at position {first_position} do not fit "
                f"{count} taps of width {width}",
                where=str(self.folder),
            )
        return rows

    def _sample(self, sample_id: str, first_position: int, rows: int) -> _Pending | None:
        """The sample's state; None where the rows lie behind the end of a finished sample, which is allowed."""
        self._refuse_committed(sample_id)
        sample = self._pending.setdefault(sample_id, _Pending())
        if sample.finished_rows is None:
            return sample
        if first_position >= sample.finished_rows or rows == 0:
            return None
        raise JobError(
            f"Sample {sample_id} got rows at position {first_position} after its end", where=str(self.folder)
        )

    def _refuse_committed(self, sample_id: str) -> None:
        if sample_id in self._committed:
            raise JobError(f"Sample {sample_id} is already committed", where=str(self.folder))

    def _flush(self, sample_id: str, sample: _Pending, *, end: int | None = None) -> None:
        """Write the buffered rows before position `end`; the buffer is emptied only once all of it is written."""
        rows = sample.buffered if end is None else min(sample.buffered, max(end - sample.start, 0))
        if rows:
            taps, final, logprob = (torch.cat(parts)[:rows] for parts in zip(*sample.chunks, strict=True))
            encoded = encode(self.layout, taps, final, logprob)
            written: list[Extent] = []
            try:
                done = 0
                while done < rows:
                    place = self._take_rows(rows - done)
                    part = {name: tensor[done : done + place.rows] for name, tensor in encoded.items()}
                    written.append(self._write_extent(sample_id, sample.start + done, place, part))
                    done += place.rows
            except BaseException:
                self._release(written)  # their index lines stay: replaced as soon as the rows are written again
                raise
            sample.extents += written
        sample.chunks, sample.buffered = [], 0

    def _write_extent(self, sample_id: str, position: int, place: _FreeRows, rows: Rows) -> Extent:
        extent = Extent(sample_id, place.shard, place.row, position, place.rows, checksum(rows))
        try:
            self._shards[place.shard].write(place.row, rows)
            self._index.append(extent.line())
        except BaseException:
            self._release([extent])
            raise
        return extent

    def _take_rows(self, rows: int) -> _FreeRows:
        """Up to `rows` rows in one shard: the first free run that holds all, else one of at least `extent_rows`."""
        fitting = next((run for run in self._free if run.rows >= rows), None)
        run = fitting or next((run for run in self._free if run.rows >= self.extent_rows), None)
        if run is None:
            number = len(self._shards)
            create_shard(self.folder, number, self.layout, self._capacity)
            run = _FreeRows(number, 0, self._open_shard(number).capacity)
            self._free.append(run)
        taken = min(rows, run.rows)
        at = self._free.index(run)
        left = [_FreeRows(run.shard, run.row + taken, run.rows - taken)] if taken < run.rows else []
        self._free[at : at + 1] = left
        return _FreeRows(run.shard, run.row, taken)

    def _release(self, extents: Iterable[Extent]) -> None:
        """Give rows back, joined with their free neighbours."""
        runs = sorted(
            [*self._free, *(_FreeRows(extent.shard, extent.row, extent.rows) for extent in extents)],
            key=lambda run: (run.shard, run.row),
        )
        joined: list[_FreeRows] = []
        for run in runs:
            last = joined[-1] if joined else None
            if last and last.shard == run.shard and last.row + last.rows == run.row:
                joined[-1] = _FreeRows(last.shard, last.row, last.rows + run.rows)
            else:
                joined.append(run)
        self._free = joined
