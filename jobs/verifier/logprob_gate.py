"""A permanent check while states are written: does a stored row give the log-probability the engine computed there?

A row under the wrong sample or position, a tap of the wrong layer's norm, a stale buffer: nothing else fails then, the
head just learns less. So of a sample of rows the state is read back from the file, the verifier's output head is
applied to it, and the log-probability of the token that followed must be the stored one. The head is read from the
checkpoint, not from the engine, and the check runs in a thread of its own on the CPU: a batch of rows costs one pass
over the head (2.3 GB for Kimi-K2.5), and rows that come meanwhile form the next batch.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from jobs.verifier.facts import read_tensor

# Entries of the vocabulary formed at once (16,384 x 7,168 in fp32: 470 MB), and rows of a batch.
PART, ROWS = 16384, 64
# Rows formed at once where many are computed (logits of a part: 67 MB): enough that a GPU is kept busy.
ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Check:
    """Rows of one sample, as stored: final [k, H], logprob [k], and the token that followed each [k]."""

    sample: str
    positions: Sequence[int]
    final: Tensor
    logprob: Tensor
    tokens: Sequence[int]


class LogprobGate:
    """Checks what is given to `add` and tells `answer(sample, None or why it is wrong)`, in a thread."""

    def __init__(self, model: Path, lm_head: str, tolerance: float, answer: Callable[[str, str | None], None]):
        self.failure: BaseException | None = None
        self._model, self._name, self._tolerance, self._answer = model, lm_head, tolerance, answer
        self._head: Tensor | None = None  # [V, H]
        self._queue: queue.Queue[Check | None] = queue.Queue()
        self._thread = threading.Thread(target=self._loop, name="logprob-gate", daemon=True)
        self._thread.start()

    def add(self, check: Check) -> None:
        self._queue.put(check)

    def join(self) -> None:
        """Returns when everything given so far is answered."""
        self._queue.join()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    @torch.inference_mode()
    def _loop(self) -> None:
        while (check := self._queue.get()) is not None:
            batch, rows = [check], len(check.tokens)
            while rows < ROWS:
                try:
                    following = self._queue.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    self._queue.put(None)
                    self._queue.task_done()
                    break
                batch.append(following)
                rows += len(following.tokens)
            try:
                if self.failure is None:
                    self._check(batch)
            except BaseException as error:  # noqa: BLE001  it is raised in the driver, see `failure`
                self.failure = error
            finally:
                for _ in batch:
                    self._queue.task_done()
        self._queue.task_done()

    def _check(self, batch: list[Check]) -> None:
        if self._head is None:
            self._head = read_tensor(self._model, self._name)
        tokens = torch.tensor([token for check in batch for token in check.tokens])  # [r]
        found = logprobs(torch.cat([check.final for check in batch]), self._head, tokens)  # [r]
        for check, mine in zip(batch, found.split([len(check.tokens) for check in batch]), strict=True):
            wrong = [
                place
                for place, (a, b) in enumerate(zip(mine.tolist(), check.logprob.tolist(), strict=True))
                if not abs(a - b) <= self._tolerance
            ]
            reason = None
            if wrong:
                at = wrong[0]
                reason = (
                    f"Sample {check.sample}: the state at position {check.positions[at]} gives its next token a log-probability of "
                    f"{mine[at]:.4f}, the engine gave {check.logprob[at]:.4f}"
                )
            self._answer(check.sample, reason)


def logprobs(final: Tensor, head: Tensor, tokens: Tensor) -> Tensor:
    """[r] fp32 on the CPU: log_softmax(final @ head.T) of `tokens` [r]; final [r, H], computed where head [V, H] lies.

    Memory is that of min(r, ROWS_AT_ONCE) rows and PART entries of the vocabulary, whatever r and V.
    """
    found = [_logprobs(*part, head) for part in zip(final.split(ROWS_AT_ONCE), tokens.split(ROWS_AT_ONCE), strict=True)]
    return torch.cat(found).cpu()


def _logprobs(final: Tensor, tokens: Tensor, head: Tensor) -> Tensor:
    final, tokens = final.to(head.device), tokens.to(head.device)  # [r, H], [r]
    total = torch.full((len(final),), float("-inf"), device=head.device)  # [r] log of the sum of exponentials
    chosen = torch.zeros(len(final), device=head.device)  # [r]
    for first in range(0, len(head), PART):
        logits = _product(final, head[first : first + PART])  # [r, part]
        total = torch.logaddexp(total, logits.logsumexp(dim=-1))
        place = tokens - first  # [r]
        here = (place >= 0) & (place < logits.shape[1])
        # Not by a mask as an index, for whose size a GPU would be waited for in every part.
        chosen += torch.where(here, logits.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None])[:, 0], 0)
    return chosen - total


def _product(final: Tensor, part: Tensor) -> Tensor:
    """[r, part] fp32: final [r, H] @ part [part, H].T without rounding the logits.

    Of bf16 a GPU forms exact products and fp32 sums, as fp32 would, ten times as fast; a CPU has no such product.
    """
    if part.is_cuda and final.dtype == part.dtype == torch.bfloat16:
        return torch.mm(final, part.T, out_dtype=torch.float32)
    return final.float() @ part.float().T
