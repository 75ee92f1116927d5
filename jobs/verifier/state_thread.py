"""From the compute stream to the state store: host copies on a side stream, a thread that takes in, one that writes.

Decision: the worker's main thread only copies, joins the steps of a tenth of a second and queues them: the threads share
the interpreter, and each time one takes it from the other both wait. One thread gives the rows to the store,
which copies them once, all samples together, to where each sample's rows are gathered; the store's own thread
(disk_thread.py) writes what is gathered. The queue is short, the store's memory has a limit, and `put` waits
when both are full: a slow disk slows the engine down instead of filling memory.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from jobs.storage.shards import Rows, concatenated
from jobs.storage.states import StateGap, StateWriter
from jobs.storage.tails import Runs
from jobs.verifier.logprob_gate import Check, LogprobGate

# Steps are joined before they leave the device: up to so many bytes, and until the first is so old.
JOINED_BYTES, JOINED_SECONDS = 128 << 20, 0.1
# Joined steps that wait for the store; one more is being taken in, and one waits in `put` when the disk is slower. So host memory
# stays bounded: six times JOINED_BYTES or, where that is more, a step of max_num_batched_tokens rows; and once that on the device.
IN_FLIGHT = 4


class Span(NamedTuple):
    """Rows `first_row .. first_row+rows-1` of a step: positions `position ..` of one sample."""

    sample: str
    first_row: int
    rows: int
    position: int
    request: int  # index in the batch
    drafts: int  # drafted tokens among the rows, the last ones
    sampled: bool  # the token sampled after these rows is kept
    last_token: int  # a prefill: the token after the last one fed; else -1


class Spans(NamedTuple):
    """All of a step, column by column: arrays `[n]`, because there are a thousand at every step, in the thread that also schedules."""

    samples: Sequence[str]
    first_row: np.ndarray
    rows: np.ndarray
    position: np.ndarray
    request: np.ndarray
    drafts: np.ndarray
    sampled: np.ndarray
    last_token: np.ndarray

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "Spans":
        samples, *columns = zip(*spans, strict=True)
        return cls(samples, *map(np.array, columns))

    def only(self, kept: np.ndarray) -> "Spans":
        """Those of the mask `[n]`."""
        if kept.all():
            return self
        samples, *columns = self
        return Spans(list(itertools.compress(samples, kept)), *(column[kept] for column in columns))

    def span(self, index: int) -> Span:
        return Span(self.samples[index], *(column[index].item() for column in self[1:]))

    @classmethod
    def joined(cls, several: Sequence["Spans"], first_rows: Sequence[int], first_requests: Sequence[int]) -> "Spans":
        """Those of several steps in one, where each step's rows and requests begin at these."""
        samples, *columns = zip(*several, strict=True)
        whole = cls(list(itertools.chain(*samples)), *map(np.concatenate, columns))
        each = [len(spans.samples) for spans in several]
        return whole._replace(
            first_row=whole.first_row + np.repeat(first_rows, each), request=whole.request + np.repeat(first_requests, each)
        )

    def may_know_next(self) -> np.ndarray:
        """[n] bool: whether rows before the sampled ones can have a next token that is known already."""
        return (self.last_token >= 0) | ~self.sampled | (self.rows > 1 + self.drafts)


class Ended(NamedTuple):
    """A sample whose last token is there: all its tokens, and rows to check as (position, next token)."""

    sample: str
    tokens: int
    checks: Sequence[tuple[int, int]] = ()


@dataclass
class Step:
    """What one forward pass leaves, on its way to the writer; or several, one after the other."""

    spans: Spans  # by first_row
    rows: Rows  # as the store keeps them, [R, ...]; logprob [R] is NaN where not known from a prefill
    sampled_logprob: torch.Tensor | None  # [B, 1 + drafts] fp32
    sampled_ids: torch.Tensor | None  # [B, 1 + drafts], -1 after a rejection; None without drafts
    ready: torch.cuda.Event | None = None
    begins: Sequence[int] = (0,)  # the first row of each pass

    @classmethod
    def joined(cls, steps: Sequence["Step"]) -> "Step":
        """One of several single ones, in their order, which are of one `form`."""
        if len(steps) == 1:
            return steps[0]
        begins = [0, *itertools.accumulate(len(step.rows["logprob"]) for step in steps[:-1])]
        requests = [0, *itertools.accumulate(step.requests for step in steps[:-1])]
        logprobs, ids = [step.sampled_logprob for step in steps], [step.sampled_ids for step in steps]
        return cls(
            Spans.joined([step.spans for step in steps], begins, requests), concatenated([step.rows for step in steps]),
            None if logprobs[0] is None else torch.cat(logprobs), None if ids[0] is None else torch.cat(ids), begins=begins,
        )  # fmt: skip

    @property
    def form(self) -> list[int | None]:
        """How many tokens were sampled after each request, as `sampled_logprob` and `sampled_ids` have it."""
        return [None if sampled is None else sampled.shape[1] for sampled in (self.sampled_logprob, self.sampled_ids)]

    @property
    def requests(self) -> int:
        """How many the batch has; 0 where nothing was sampled."""
        return next((len(sampled) for sampled in (self.sampled_logprob, self.sampled_ids) if sampled is not None), 0)

    def to_host(self, stream: "torch.cuda.Stream | None") -> "Step":
        """The step in host memory; on a GPU by a copy on `stream`, complete when `ready` is."""
        if stream is None:
            return self

        def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None:
                return None
            # PyTorch's pinned allocator recycles these blocks, which makes the ring: one is free again when the
            # store has let go of the tensor and the copy into it is done.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            return host

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.rows = {name: copied(tensor) for name, tensor in self.rows.items()}
            self.sampled_logprob, self.sampled_ids = copied(self.sampled_logprob), copied(self.sampled_ids)
            self.ready = torch.cuda.Event(blocking=True)  # the writer sleeps until then
            self.ready.record(stream)
        return self

    def settle(self) -> np.ndarray:
        """The rows of each span up to its last accepted draft, [n]; what comes after a rejection is not the sequence's.

        Also puts the sampled tokens' log-probabilities into the rows, at the rows they were sampled from.
        """
        spans, rows = self.spans, self.spans.rows
        if self.sampled_ids is not None:
            accepted = ((self.sampled_ids.numpy() >= 0).sum(axis=1) - 1).clip(min=0)[spans.request]
            rows = np.where(spans.drafts > 0, rows - spans.drafts + accepted, rows)
        if self.sampled_logprob is not None:
            first = spans.rows - 1 - spans.drafts  # the first row of each span after which a token was sampled
            drawn = np.where(spans.sampled & (spans.last_token < 0), rows - first, 0)  # [n]
            nth = np.arange(drawn.sum()) - np.repeat(drawn.cumsum() - drawn, drawn)
            to, request = np.repeat(spans.first_row + first, drawn) + nth, np.repeat(spans.request, drawn)
            # Through numpy: torch takes an index apart number by number, with the interpreter's lock in hand.
            self.rows["logprob"].numpy()[to] = self.sampled_logprob.numpy()[request, nth]
        return rows


class StoreThread:
    """A thread that writes one state store; `put`, `finish` and `discard` are handled in their order.

    stream: on which a GPU's steps are copied to the host, joined up to `join_bytes`.
    """

    def __init__(self, writer: StateWriter, stream: "torch.cuda.Stream | None" = None, *, join_bytes: int = JOINED_BYTES):
        self.writer, self._stream, self._join_bytes = writer, stream, join_bytes
        writer.write_behind()
        self.gate: LogprobGate | None = None  # see `check_with`
        self.failure: BaseException | None = None
        self.waited = 0.0  # seconds that the engine had to wait here, because what it gave before was not yet taken in
        self._done: dict[str, str | None] = {}
        self._closed: set[str] = set()
        self._lock = threading.Lock()
        self._steps: list[Step] = []  # given and not yet sent on, and what ended meanwhile
        self._ended: list[Ended] = []
        self._since = 0.0  # when the first of them was given
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(IN_FLIGHT)
        self._thread = threading.Thread(target=self._loop, name="state-writer", daemon=True)
        self._thread.start()

    def check_with(self, model: Path, lm_head: str, tolerance: float) -> None:
        """Check the rows named in `finish` against the output head in the checkpoint; such a sample is done when it passed."""
        self.gate = LogprobGate(model, lm_head, tolerance, self._checked)

    def put(self, step: Step) -> None:
        """A step on its device; it may not be written to any more."""
        # A long run is written from where it lies (`StateWriter`), and would keep the memory of all that was joined with it.
        alone = step.spans.rows.max() >= self.writer.extent_rows
        if self._steps and (alone or step.form != self._steps[0].form or self._bytes(*self._steps, step) > self._join_bytes):
            self._send()
        self._begin()
        self._steps.append(step)
        self._send() if alone else self._send_in_time()

    def finish(self, samples: Sequence[Ended], wait: bool) -> dict[str, str | None]:
        """Ask for `samples` to be made durable; returns {id: None or why it is dropped}.

        Of this and earlier calls those are returned that are done by now; with `wait`, all of them.
        """
        self._begin()
        self._ended += samples
        if not wait:
            self._send_in_time()
        else:
            self._send()
            self._queue.join()
            with contextlib.suppress(Exception):  # it is in `writer.failure`
                self.writer.sync()
            if self.gate:
                self.gate.join()
        self.failure = self.failure or self.writer.failure or (self.gate.failure if self.gate else None)
        with self._lock:
            done, self._done = self._done, {}
        return done

    def discard(self, samples: Sequence[str]) -> None:
        self._send()
        self._take_in(lambda: self._discard(samples))

    def _begin(self) -> None:
        """What comes now is the first to wait, if nothing does."""
        if not self._steps and not self._ended:
            self._since = time.monotonic()

    def _send_in_time(self) -> None:
        if self._bytes(*self._steps) >= self._join_bytes or time.monotonic() - self._since >= JOINED_SECONDS:
            self._send()

    def _bytes(self, *steps: Step) -> int:
        return sum(len(step.rows["logprob"]) for step in steps) * self.writer.layout.row_bytes

    def _send(self) -> None:
        steps, ended = self._steps, self._ended
        self._steps, self._ended = [], []
        if steps:
            step = Step.joined(steps).to_host(self._stream)
            del steps  # their memory is the device's
            self._take_in(lambda: self._write(step))
        if ended:
            self._take_in(lambda: self._finish(ended))

    def _take_in(self, work: Callable[[], None]) -> None:
        began = time.monotonic()
        self._queue.put(work)
        self.waited += time.monotonic() - began

    def close(self) -> None:
        try:
            self._send()
        finally:
            self._queue.put(None)
            self._thread.join()
            if self.gate:
                self.gate.close()
            # What already failed is reported once; closing lets go of the folder even so.
            with contextlib.suppress(Exception if self.failure else ()):
                self.writer.close()

    @torch.inference_mode()  # the rows are outputs of it, and log-probabilities are filled in here
    def _loop(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                if self.failure is None:
                    work()
            except BaseException as error:  # noqa: BLE001  it is raised in the driver, see `failure`
                self.failure = error
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, step: Step) -> None:
        if step.ready is not None:
            step.ready.synchronize()
        spans = step.spans._replace(rows=step.settle())
        # Their steps were in flight when the request stopped; of those that were joined with its end `finish` drops the rows.
        if not self._closed.isdisjoint(spans.samples):
            spans = spans.only(np.array([sample not in self._closed for sample in spans.samples]))
        columns = spans.samples, spans.position, spans.first_row, spans.rows
        bounds = [*np.searchsorted(spans.first_row, step.begins), len(spans.samples)]
        self.writer.append_stored(
            step.rows, [Runs(*(column[begin:end] for column in columns)) for begin, end in itertools.pairwise(bounds)]
        )

    def _finish(self, samples: Sequence[Ended]) -> None:
        dropped: dict[str, str] = {}
        for ended in samples:
            self._closed.add(ended.sample)
            try:
                self.writer.finish(ended.sample, ended.tokens)
            except StateGap as gap:
                self.writer.discard(ended.sample)
                dropped[ended.sample] = gap.sentence()
        self.writer.sync_then(lambda: self._durable(samples, dropped))

    @torch.inference_mode()
    def _durable(self, samples: Sequence[Ended], dropped: dict[str, str]) -> None:
        """The samples' rows are on the disk, but for the dropped ones; those with rows to check are done when `_checked` says it."""
        done: dict[str, str | None] = dict(dropped)
        for ended in samples:
            if ended.sample in dropped:
                continue
            if not self.gate or not ended.checks:
                done[ended.sample] = None
                continue
            positions, tokens = zip(*ended.checks, strict=True)
            self.gate.add(Check(ended.sample, positions, *self.writer.stored(ended.sample, positions), tokens))
        with self._lock:
            self._done.update(done)

    def _checked(self, sample: str, reason: str | None) -> None:
        if reason:
            self.writer.discard(sample)
        with self._lock:
            self._done[sample] = reason

    def _discard(self, samples: Sequence[str]) -> None:
        for sample in samples:
            self._closed.add(sample)
            self.writer.discard(sample)
