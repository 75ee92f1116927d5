"""Writing a state store: buffers rows a sample, places them in shards, names them in the index.

Decision: rows are written while answers are being decoded, in runs of at least `extent_rows`, so memory holds at most that
many rows of each running request; where all of them are more than the memory set aside (row_pages.py), the longest are
written earlier. A run lies in one shard. Free rows are reused first-fit, and only rows that no committed sample needs are
ever free, so nothing that a reader may read is written twice.

Writes happen at once, or behind the caller's back in their order (`write_behind`). The order is what makes
the second as safe as the first: rows given back and taken again are written by the later owner last, the
index line of an extent follows its rows, and a sync follows both.
"""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from jobs.errors import JobError
from jobs.storage.disk_thread import DiskThread
from jobs.storage.extents import INDEX, Extent, first_gap, resolve
from jobs.storage.free_rows import FreeRows, FreeRun
from jobs.storage.recovery import committed_extents, settle_layout
from jobs.storage.row_pages import LIMIT_BYTES, RowPages
from jobs.storage.shards import (
    RawRows,
    Rows,
    ShardFile,
    ShardPlan,
    StateLayout,
    checksum,
    concatenated,
    count_rows,
    create_shard,
    dequantize,
    encode,
    raw,
    shard_name,
    shard_numbers,
)
from jobs.storage.tails import Run, Runs, Tails
from jobs.storage.writer_group import ALONE, Member

# Bytes of long runs that are written behind from the caller's own memory, at most at once.
UNBUFFERED_BYTES = 1 << 30


class StateGap(JobError):
    """A sample lacks a row: the capture lost it, and no training may see a shifted sequence."""


@dataclass
class _Pending:
    """A sample being decoded: what is written of it, and its rows in `pages` from position `start` on (up to where, its tail knows)."""

    extents: list[Extent] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    start: int = 0
    finished_rows: int | None = None


class StateWriter:
    """Writes one store; one process at a time (flock) or those of one group (writer_group.py). One thread appends, any may ask the rest.

    Opening an existing folder continues it. Another layout, a held lock or a committed sample whose rows
    are gone is a MustFix; so is a full disk at any later call, and the store stays consistent then.
    memory_bytes: the most that buffered rows take. member: which of the writers of a group this is; it knows its own samples only.
    """

    def __init__(
        self, folder: Path, layout: StateLayout, *, shard_bytes: int = 1 << 30, extent_rows: int = 256, memory_bytes: int = LIMIT_BYTES,
        member: Member = ALONE,
    ):  # fmt: skip
        self.folder, self.layout, self._member, self._capacity = Path(folder), layout, member, layout.capacity(shard_bytes)
        self.extent_rows = max(1, min(extent_rows, self._capacity))  # an extent lies in one shard
        self._lock, self._closed = threading.RLock(), False
        self._written = threading.Condition(self._lock)  # told when memory is free again
        self._pending: dict[str, _Pending] = {}
        self._pages = RowPages(layout.strides(), self.extent_rows, memory_bytes)
        self._buffering: dict[str, _Pending] = {}  # those of the pending that have pages
        self._tails = Tails()  # of the buffering
        self._pages_behind = self._bytes_behind = 0  # given to the disk thread, not yet written
        self.waited = 0.0  # seconds that rows had to wait for the disk
        self._disk: DiskThread | None = None
        self._shards: dict[int, ShardFile] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(member.hold(self.folder / "writer.lock", what="this state store"))
            settle_layout(self.folder, layout, clean=member.number == 0)
            self._index = member.index(self.folder / INDEX)
            stack.callback(self._index.close)
            stack.callback(self._close_shards)
            self._committed, live = committed_extents(self.folder)
            self._free = self._open_shards(live)
            self._open = stack.pop_all()

    def write_behind(self) -> None:
        """Write in a thread from now on. What fails there is raised by later calls, and nothing is written after it."""
        self._disk = self._disk or DiskThread(self._sync)

    @property
    def failure(self) -> BaseException | None:
        """What a write behind failed with."""
        return self._disk and self._disk.failure

    def append(self, sample_id: str, first_position: int, taps: Tensor, final: Tensor, logprob: Tensor) -> None:
        """Take rows of positions first_position, first_position + 1, …

        taps [r, T, H], final [r, H] (after the verifier's last norm), logprob [r] fp32; CPU tensors. Rows are
        buffered until `extent_rows` of them follow each other; positions that come again replace earlier ones.
        The caller's memory is free again, unless it is written behind.
        """
        rows = count_rows(self.layout, f"{self.folder}: sample {sample_id}", first_position, taps, final, logprob)
        self.append_stored(encode(self.layout, taps, final, logprob), [Runs.of(Run(sample_id, first_position, 0, rows))])

    def append_stored(self, rows: Rows, steps: Sequence[Runs]) -> None:
        """`append` for many samples at once: `rows` as `encode` makes them, of which each run takes its own; one step after the other."""
        if not len(rows["logprob"]):
            return
        source = raw(rows)
        with self._lock:
            self._raise_failure()
            with self._pages.copying(source):
                for runs in steps:
                    for index in self._continue(runs):
                        self._take_in(source, runs.run(index))
            self._write_early(len(rows["logprob"]))

    def _continue(self, runs: Runs) -> Iterable[int]:
        """Buffer, all together, the runs of one row that only follow what is buffered of their sample; returns the others."""
        if len(runs.samples) == 1 or len(set(runs.samples)) < len(runs.samples):
            return range(len(runs.samples))
        follow, places = self._tails.continued(runs)
        self._pages.copy_rows_later(runs.first[follow], places)
        return np.flatnonzero(~follow).tolist()

    def finish(self, sample_id: str, tokens: int) -> None:
        """The sample has `tokens` tokens in all: write what is buffered; rows from position tokens - 1 on are dropped.

        Not yet durable: call `sync`, then `ResponseLog.append`. A gap in 0..tokens-2 raises StateGap.
        """
        length = max(tokens - 1, 0)
        with self._lock:
            self._raise_failure()
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
            self._free.release(extent for extent in sample.extents if extent not in kept)
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
        rows = concatenated(found)
        final = dequantize(rows["final"], rows["final_scale"]) if self.layout.is_fp8 else rows["final"]
        return final, rows["logprob"]

    def discard(self, sample_id: str) -> None:
        """Forget a sample that is not committed; its rows may be used again.

        Of a sample that was finished the rows stay taken until the store is opened again: its response line
        may already stand in the driver's log, which this process does not watch.
        """
        with self._lock:
            self._refuse_committed(sample_id)
            sample = self._pending.pop(sample_id, None)
            if sample and sample.finished_rows is None:
                self._pages.copy_now()  # into what is given back: another thread may be waiting in the middle of a step
                self._pages.give_back(sample.pages)
                self._buffering.pop(sample_id, None)
                self._tails.forget(sample_id)
                self._free.release(sample.extents)

    def sync(self) -> None:
        """Make everything written durable: the rows first, then the index lines that speak of them."""
        if self._disk is None:
            self._sync()
            return
        self._disk.join()
        self._raise_failure()

    def sync_then(self, then: Callable[[], None]) -> None:
        """Call `then` once everything given so far is durable: in the disk thread, or before this returns."""
        if self._disk is not None:
            self._disk.sync_then(then)
            return
        self._sync()
        then()

    def close(self) -> None:
        """Sync and let go of the folder. Samples that were not finished are forgotten."""
        if self._disk is not None:
            self._disk.close()  # without the lock: what is still to be written needs it
        with self._lock, self._open:
            if not self._closed:
                self._closed = True
                self._raise_failure()
                self._sync()

    def __enter__(self) -> "StateWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- shards ----------------------------------------------------------------------------------------

    def _open_shards(self, live: list[Extent]) -> FreeRows:
        """Open the existing shards that are this writer's; returns their rows that no committed sample needs."""
        numbers = sorted({*shard_numbers(self.folder), *(extent.shard for extent in live)})
        return FreeRows.between(live, {number: self._open_shard(number).capacity for number in numbers if self._member.owns(number)})

    def _open_shard(self, number: int) -> ShardPlan:
        plan = ShardPlan.read(self.folder / shard_name(number), self.layout)
        self._shards[number] = ShardFile(plan, self.layout)
        return plan

    def _close_shards(self) -> None:
        for shard in self._shards.values():
            shard.close()
        self._shards.clear()

    # -- writing ---------------------------------------------------------------------------------------

    def _sample(self, sample_id: str, first_position: int, rows: int) -> _Pending | None:
        """The sample's state; None where the rows lie behind the end of a finished sample, which is allowed."""
        sample = self._pending.get(sample_id)
        if sample is None:
            self._refuse_committed(sample_id)
            sample = self._pending[sample_id] = _Pending()
        if sample.finished_rows is None:
            return sample
        if first_position >= sample.finished_rows or rows == 0:
            return None
        raise JobError(f"Sample {sample_id} got rows at position {first_position} after its end", where=str(self.folder))

    def _refuse_committed(self, sample_id: str) -> None:
        if sample_id in self._committed:
            raise JobError(f"Sample {sample_id} is already committed", where=str(self.folder))

    def _take_in(self, source: dict[str, np.ndarray], run: Run) -> None:
        """Buffer a run; what fills an extent is written, a run as long as one from the caller's memory."""
        sample_id, position, first, rows = run
        sample = self._sample(sample_id, position, rows)
        if sample is None:
            return
        if sample.pages and position != self._tails.position(sample_id):
            self._flush(sample_id, sample)  # computed again after a preemption, or a gap `finish` will name
        while rows:
            if not sample.pages:
                sample.start = position
                if rows >= self.extent_rows:
                    return self._write_unbuffered(sample_id, sample, Run(sample_id, position, first, rows), source)
            taken = self._buffer(sample_id, sample, first, rows)
            position, first, rows = position + taken, first + taken, rows - taken
            if self._buffered(sample_id, sample) >= self.extent_rows:
                self._flush(sample_id, sample)

    def _buffered(self, sample_id: str, sample: _Pending) -> int:
        """How many rows of the sample wait in its pages."""
        return self._tails.position(sample_id) - sample.start if sample.pages else 0

    def _buffer(self, sample_id: str, sample: _Pending, first: int, rows: int) -> int:
        """Give up to `rows` rows their place in the sample's last page; returns how many."""
        size, buffered = self._pages.page_rows, self._buffered(sample_id, sample)
        if buffered == len(sample.pages) * size:
            page = self._take_page()
            buffered = self._buffered(sample_id, sample)  # none, if that wrote this very sample
            sample.pages.append(page)
            self._buffering[sample_id] = sample
        taken = self._pages.copy_later(sample.pages, buffered, first, min(rows, self.extent_rows - buffered))
        buffered += taken
        # The row that fills the extent is not among those that may follow: with it the extent is written.
        room = min(-buffered % size, self.extent_rows - 1 - buffered)
        self._tails.put(sample_id, sample.start + buffered, sample.pages[-1] * size + buffered % size, room)
        return taken

    def _take_page(self) -> int:
        """A page; where there is none, one that is being written, else one of the longest buffered run."""
        while (page := self._pages.take()) is None:
            if self._pages_behind:
                self._wait_for_disk()
            else:
                self._flush(*max(self._buffering.items(), key=lambda item: self._buffered(*item)))
        return page

    def _write_early(self, rows: int) -> None:
        """With more than half of the memory in use write as much as came, the longest runs first, so that it never stops."""
        pages = -(-rows // self._pages.page_rows)
        if self._pages.used * 2 <= self._pages.count or self._pages_behind >= pages:
            return
        for sample_id, sample in sorted(self._buffering.items(), key=lambda item: -self._buffered(*item)):
            if self._pages.used * 2 <= self._pages.count or self._pages_behind >= pages:
                break
            self._flush(sample_id, sample)

    def _flush(self, sample_id: str, sample: _Pending, *, end: int | None = None) -> None:
        """Write the buffered rows before position `end`; the buffer is emptied only once all of it is written."""
        self._pages.copy_now()
        buffered, pages = self._buffered(sample_id, sample), sample.pages
        rows = buffered if end is None else min(buffered, max(end - sample.start, 0))
        if rows:
            self._write(sample_id, sample, sample.start, rows, functools.partial(self._pages.rows, pages))
        if not pages:
            return
        sample.start, sample.pages = sample.start + buffered, []
        del self._buffering[sample_id]
        self._tails.forget(sample_id)
        self._pages_behind += len(pages)
        self._run(functools.partial(self._have_written, pages, 0), always=True)

    def _write_unbuffered(self, sample_id: str, sample: _Pending, run: Run, source: dict[str, np.ndarray]) -> None:
        size = run.rows * self.layout.row_bytes
        while self._bytes_behind and self._bytes_behind + size > UNBUFFERED_BYTES:
            self._wait_for_disk()

        def rows(first: int, count: int) -> RawRows:
            begin = run.first + first
            return {name: [piece[begin : begin + count]] for name, piece in source.items()}

        self._write(sample_id, sample, run.position, run.rows, rows)
        self._bytes_behind += size
        self._run(functools.partial(self._have_written, [], size), always=True)

    def _wait_for_disk(self) -> None:
        began = time.monotonic()
        self._written.wait()  # lets go of the lock
        self.waited += time.monotonic() - began
        self._raise_failure()

    def _have_written(self, pages: list[int], size: int) -> None:
        with self._lock:
            self._pages.give_back(pages)
            self._pages_behind -= len(pages)
            self._bytes_behind -= size
            self._written.notify_all()

    def _write(self, sample_id: str, sample: _Pending, position: int, rows: int, found: Callable[[int, int], RawRows]) -> None:
        """Place `rows` rows and have them written; `found(first, count)` are some of them."""
        written: list[Extent] = []
        try:
            done = 0
            while done < rows:
                place = self._take_rows(rows - done)
                written.append(Extent(sample_id, place.shard, place.row, position + done, place.rows, xxh3=""))  # known when written
                self._run(functools.partial(self._write_extent, self._shards[place.shard], written[-1], found(done, place.rows)))
                done += place.rows
        except BaseException:
            self._free.release(written)  # their index lines stay: replaced as soon as the rows are written again
            raise
        sample.extents += written

    def _write_extent(self, shard: ShardFile, extent: Extent, rows: RawRows) -> None:
        shard.write(extent.row, rows)
        self._index.append(dataclasses.replace(extent, xxh3=checksum(rows)).line())

    def _run(self, job: Callable[[], None], always: bool = False) -> None:
        """Now, or in its turn in the disk thread."""
        job() if self._disk is None else self._disk.run(job, always)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _sync(self) -> None:
        for shard in list(self._shards.values()):
            shard.sync()
        self._index.sync()

    def _take_rows(self, rows: int) -> FreeRun:
        """Up to `rows` rows in one shard, of a new one where the others are full."""
        run = self._free.take(rows, self.extent_rows)
        if run is None:
            number = self._member.next_shard(max(self._shards, default=-1) + 1)
            create_shard(self.folder, number, self.layout, self._capacity)
            self._free.give_back([FreeRun(number, 0, self._open_shard(number).capacity)])
            run = self._free.take(rows, self.extent_rows)
        return run
