"""From the compute stream to the state store: host copies on a side stream, a writer thread, few calls.

Decision: the worker's main thread only copies and queues; splitting rows by sample and writing them
happens in one thread. A decode step has one row a request, and a store call a row would cost a
thousand Python calls a step, so the rows of some steps are held and handed over together. The queue
is short and `put` waits when it is full: a slow disk slows the engine down instead of filling memory.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from jobs.errors import JobError
from jobs.storage.states import StateGap, StateWriter
from jobs.verifier.logprob_gate import Check, LogprobGate

# Steps between the compute stream and the disk. When the disk is slower the worker waits here, so
# memory stays bounded: at most this many steps of max_num_batched_tokens rows each.
STEPS_IN_FLIGHT = 4
# Steps, or rows, gathered before they are handed to the store: one call a sample instead of one a token.
STEPS_TOGETHER, ROWS_TOGETHER = 32, 8192


class Span(NamedTuple):
    """Rows `first_row .. first_row+rows-1` of a step: positions `position ..` of one sample.

    A tuple, because a thousand of them are made at every step, in the thread that also schedules.
    """

    sample: str
    first_row: int
    rows: int
    position: int
    request: int  # index in the batch
    drafts: int  # drafted tokens among the rows, the last ones
    sampled: bool  # the token sampled after these rows is kept
    last_token: int | None  # a prefill: the token after the last one fed

    @property
    def may_know_next(self) -> bool:
        """Whether rows before the sampled ones can have a next token that is known already."""
        return self.last_token is not None or not self.sampled or self.rows > 1 + self.drafts


class Ended(NamedTuple):
    """A sample whose last token is there: all its tokens, and rows to check as (position, next token)."""

    sample: str
    tokens: int
    checks: Sequence[tuple[int, int]] = ()


@dataclass
class Step:
    """What one forward pass leaves, on its way to the writer."""

    spans: list[Span]
    taps: torch.Tensor  # [R, T, H]
    final: torch.Tensor  # [R, H]
    logprob: torch.Tensor  # [R] fp32, NaN where not known from a prefill
    sampled_logprob: torch.Tensor | None  # [B, 1 + drafts] fp32
    sampled_ids: torch.Tensor | None  # [B, 1 + drafts], -1 after a rejection; None without drafts
    ready: torch.cuda.Event | None = None

    def to_host(self, stream: "torch.cuda.Stream | None") -> "Step":
        """The step in host memory; on a GPU by a copy on `stream`, complete when `ready` is."""
        if stream is None:
            return self
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for name in ("taps", "final", "logprob", "sampled_logprob", "sampled_ids"):
                tensor = getattr(self, name)
                if tensor is not None:
                    # PyTorch's pinned allocator recycles these blocks, which makes the ring.
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    host.copy_(tensor, non_blocking=True)
                    tensor.record_stream(stream)
                    setattr(self, name, host)
            self.ready = torch.cuda.Event(blocking=True)  # the writer sleeps until then
            self.ready.record(stream)
        return self

    def settle(self) -> list[tuple[Span, int]]:
        """Each span with its rows up to the last accepted draft; what comes after a rejection is not the sequence's.

        Also puts the sampled tokens' log-probabilities into `logprob`, at the rows they were sampled from.
        """
        accepted = None if self.sampled_ids is None else ((self.sampled_ids >= 0).sum(dim=1) - 1).clamp(min=0).tolist()
        settled, rows_of, requests, places = [], [], [], []
        for span in self.spans:
            rows = span.rows - span.drafts + accepted[span.request] if span.drafts and accepted else span.rows
            settled.append((span, rows))
            if span.sampled and span.last_token is None and self.sampled_logprob is not None:
                first = span.rows - 1 - span.drafts
                for place in range(rows - first):
                    rows_of.append(span.first_row + first + place)
                    requests.append(span.request)
                    places.append(place)
        if rows_of:
            self.logprob[rows_of] = self.sampled_logprob[requests, places]
        return settled


class StoreThread:
    """A thread that writes one state store; `put`, `finish` and `discard` are handled in their order."""

    def __init__(self, writer: StateWriter):
        self.writer = writer
        self.gate: LogprobGate | None = None  # see `check_with`
        self.failure: BaseException | None = None
        self._done: dict[str, str | None] = {}
        self._closed: set[str] = set()
        self._held: dict[str, list[tuple[Step, Span, int]]] = {}  # sample -> its rows of the last steps
        self._held_steps = self._held_rows = 0
        self._lock = threading.Lock()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(STEPS_IN_FLIGHT)
        self._thread = threading.Thread(target=self._loop, name="state-writer", daemon=True)
        self._thread.start()

    def check_with(self, model: Path, lm_head: str, tolerance: float) -> None:
        """Check the rows named in `finish` against the output head in the checkpoint; such a sample is done when it passed."""
        self.gate = LogprobGate(model, lm_head, tolerance, self._checked)

    def put(self, step: Step) -> None:
        self._queue.put(lambda: self._write(step))

    def finish(self, samples: Sequence[Ended], wait: bool) -> dict[str, str | None]:
        """Ask for `samples` to be made durable; returns {id: None or why it is dropped}.

        Of this and earlier calls those are returned that are done by now; with `wait`, all of them.
        """
        if samples:
            self._queue.put(lambda: self._finish(samples))
        if wait:
            self._queue.join()
            if self.gate:
                self.gate.join()
        if self.gate and self.gate.failure:
            self.failure = self.failure or self.gate.failure
        with self._lock:
            done, self._done = self._done, {}
        return done

    def discard(self, samples: Sequence[str]) -> None:
        self._queue.put(lambda: self._discard(samples))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        if self.gate:
            self.gate.close()
        # What already failed is reported once; closing lets go of the folder even so.
        with contextlib.suppress(JobError if self.failure else ()):
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
        for span, rows in step.settle():
            if span.sample not in self._closed:  # else the step was in flight when the request stopped
                self._held.setdefault(span.sample, []).append((step, span, rows))
        self._held_steps += 1
        self._held_rows += len(step.logprob)
        if self._held_steps >= STEPS_TOGETHER or self._held_rows >= ROWS_TOGETHER:
            self._hand_over(list(self._held))
            self._held_steps = self._held_rows = 0

    def _hand_over(self, samples: Sequence[str]) -> None:
        """Give the held rows of `samples` to the store, those that follow each other in one call.

        The rows of a sample lie one in each step; they are put side by side by a few operations a step
        instead of several a row, which would hold up the thread that schedules (one interpreter lock).
        """
        runs: list[list] = []  # [sample, first position, first row in the gathered tensors, rows]
        moves: dict[int, tuple[Step, list[int], list[int]]] = {}  # rows of a step -> rows of the gathered tensors
        total = 0
        for sample in samples:
            expected = None
            for step, span, rows in self._held.pop(sample, ()):
                if span.position != expected:
                    runs.append([sample, span.position, total, 0])
                runs[-1][3] += rows
                expected = span.position + rows
                _, of_step, gathered = moves.setdefault(id(step), (step, [], []))
                of_step.extend(range(span.first_row, span.first_row + rows))
                gathered.extend(range(total, total + rows))
                total += rows
        if not total:
            return
        taps, final, logprob = _gather(list(moves.values()), total)
        for sample, position, first, rows in runs:
            at = slice(first, first + rows)
            self.writer.append(sample, position, taps[at], final[at], logprob[at])

    def _finish(self, samples: Sequence[Ended]) -> None:
        done: dict[str, str | None] = {}
        for ended in samples:
            self._closed.add(ended.sample)
        self._hand_over([ended.sample for ended in samples])
        for ended in samples:
            try:
                self.writer.finish(ended.sample, ended.tokens)
                done[ended.sample] = None
            except StateGap as gap:
                self.writer.discard(ended.sample)
                done[ended.sample] = gap.sentence()
        self.writer.sync()
        for ended in samples:
            if self.gate and ended.checks and done[ended.sample] is None:
                del done[ended.sample]  # `_checked` says it
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
            self._held.pop(sample, None)
            self.writer.discard(sample)


def _gather(moves: list[tuple[Step, list[int], list[int]]], total: int) -> list[torch.Tensor]:
    """taps [total, T, H], final [total, H], logprob [total], each row from its step."""
    (first, of_step, gathered), *more = moves
    if not more and of_step == gathered:  # one step in its own order: a prefill
        return [first.taps, first.final, first.logprob]
    indexes = [(step, torch.tensor(of_step), torch.tensor(gathered)) for step, of_step, gathered in moves]
    result = []
    for name in ("taps", "final", "logprob"):
        like = getattr(first, name)
        whole = torch.empty((total, *like.shape[1:]), dtype=like.dtype)
        for step, of_step, gathered in indexes:
            whole.index_copy_(0, gathered, getattr(step, name).index_select(0, of_step))
        result.append(whole)
    return result
