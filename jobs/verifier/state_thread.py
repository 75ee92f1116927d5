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

import torch

from jobs.errors import JobError
from jobs.storage.states import StateGap, StateWriter

# Steps between the compute stream and the disk. When the disk is slower the worker waits here, so
# memory stays bounded: at most this many steps of max_num_batched_tokens rows each.
STEPS_IN_FLIGHT = 4
# Steps, or rows, gathered before they are handed to the store: one call a sample instead of one a token.
STEPS_TOGETHER, ROWS_TOGETHER = 32, 8192


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `first_row .. first_row+rows-1` of a step: positions `position ..` of one sample."""

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
            self.ready = torch.cuda.Event()
            self.ready.record(stream)
        return self

    def real_rows(self, span: Span) -> int:
        """Rows of a span up to the last accepted draft; what comes after a rejection is not the sequence's."""
        if not span.drafts or self.sampled_ids is None:
            return span.rows
        accepted = int((self.sampled_ids[span.request] >= 0).sum()) - 1
        return span.rows - span.drafts + max(accepted, 0)

    def rows_of(self, span: Span, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The first `rows` rows of a span: taps [rows, T, H], final [rows, H], logprob [rows]."""
        at = slice(span.first_row, span.first_row + rows)
        logprob = self.logprob[at]
        if span.sampled and self.sampled_logprob is not None and span.last_token is None:
            first = span.rows - 1 - span.drafts
            logprob = torch.cat([logprob[:first], self.sampled_logprob[span.request, : rows - first]])
        return self.taps[at], self.final[at], logprob


class StoreThread:
    """A thread that writes one state store; `put`, `finish` and `discard` are handled in their order."""

    def __init__(self, writer: StateWriter):
        self.writer = writer
        self.failure: BaseException | None = None
        self._done: dict[str, str | None] = {}
        self._closed: set[str] = set()
        self._held: dict[str, list[tuple[Step, Span, int]]] = {}  # sample -> its rows of the last steps
        self._held_steps = self._held_rows = 0
        self._lock = threading.Lock()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(STEPS_IN_FLIGHT)
        self._thread = threading.Thread(target=self._loop, name="state-writer", daemon=True)
        self._thread.start()

    def put(self, step: Step) -> None:
        self._queue.put(lambda: self._write(step))

    def finish(self, samples: Sequence[tuple[str, int]], wait: bool) -> dict[str, str | None]:
        """Ask for `samples` (id, tokens) to be made durable; returns {id: None or why it is dropped}.

        Of this and earlier calls those are returned that are done by now; with `wait`, all of them.
        """
        if samples:
            self._queue.put(lambda: self._finish(samples))
        if wait:
            self._queue.join()
        with self._lock:
            done, self._done = self._done, {}
        return done

    def discard(self, samples: Sequence[str]) -> None:
        self._queue.put(lambda: self._discard(samples))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        # What already failed is reported once; closing lets go of the folder even so.
        with contextlib.suppress(JobError if self.failure else ()):
            self.writer.close()

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
        for span in step.spans:
            if span.sample not in self._closed:  # else the step was in flight when the request stopped
                self._held.setdefault(span.sample, []).append((step, span, step.real_rows(span)))
        self._held_steps += 1
        self._held_rows += len(step.logprob)
        if self._held_steps >= STEPS_TOGETHER or self._held_rows >= ROWS_TOGETHER:
            for sample in list(self._held):
                self._hand_over(sample)
            self._held_steps = self._held_rows = 0

    def _hand_over(self, sample: str) -> None:
        """Give the held rows of a sample to the store, those that follow each other in one call."""
        runs: list[list[tuple[Step, Span, int]]] = []
        expected = None
        for step, span, rows in self._held.pop(sample, ()):
            if span.position != expected:
                runs.append([])
            runs[-1].append((step, span, rows))
            expected = span.position + rows
        for run in runs:
            parts = [step.rows_of(span, rows) for step, span, rows in run]
            taps, final, logprob = (torch.cat(tensors) for tensors in zip(*parts, strict=True))  # [r, T, H], [r, H], [r]
            self.writer.append(sample, run[0][1].position, taps, final, logprob)

    def _finish(self, samples: Sequence[tuple[str, int]]) -> None:
        done: dict[str, str | None] = {}
        for sample, tokens in samples:
            self._closed.add(sample)
            self._hand_over(sample)
            try:
                self.writer.finish(sample, tokens)
                done[sample] = None
            except StateGap as gap:
                self.writer.discard(sample)
                done[sample] = gap.sentence()
        self.writer.sync()
        with self._lock:
            self._done.update(done)

    def _discard(self, samples: Sequence[str]) -> None:
        for sample in samples:
            self._closed.add(sample)
            self._held.pop(sample, None)
            self.writer.discard(sample)
