"""At which rows the verifier's argmax can be drafted, found out once for each row of the store.

The reference gives no loss where it lies outside the draft vocabulary. Multiplying every final state
with the verifier's whole output head in every step would cost an eighth of the step (2.35 of 20 GFLOP
a token at 163,840 ids). It is a fact of the data, so:

* Where the store says that the token which followed had a probability over a half, that token IS the
  argmax: known without arithmetic, on a reader thread. That is most rows of an answer.
* The other rows go through the whole head the first time they are trained on, and are remembered.

Both depend on the row alone, never on its neighbours or on when it is asked, so a resumed run finds
the same. One byte a row is kept, 0.1 GB for 100 M tokens.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from jobs.draft.ranks import HostCopy

SURE = math.log(0.55)  # over a half by more than the engine's logits round
NO, YES, UNKNOWN = 0, 1, 2


@dataclass(frozen=True)
class Undecided:
    """Rows of a packed row that must go through the whole head, and their places in the memory."""

    rows: Tensor  # [U] int64
    places: Tensor  # [U] int64, on the CPU

    def __len__(self) -> int:
        return len(self.rows)


class Coverage:
    """The memory of a store's rows. `look` is for reader threads, `decide` for the one that trains."""

    def __init__(self, lengths: Mapping[str, int], drafted: Tensor):
        """lengths: rows of every sample. drafted: bool `[V]`, the target ids of the draft vocabulary."""
        self._drafted = drafted.to("cpu", torch.uint8)
        self._begin: dict[str, int] = {}
        total = 0
        for sample_id, rows in lengths.items():
            self._begin[sample_id] = total
            total += rows
        self._memory = torch.full((total,), UNKNOWN, dtype=torch.uint8)
        self._coming: deque[tuple[Tensor, HostCopy]] = deque()

    def look(self, sample_id: str, first: int, tokens: Tensor, logprob: Tensor) -> tuple[Tensor, Tensor]:
        """What is known of the rows from `first` on: NO, YES or UNKNOWN, and their places, `[r]` each.

        tokens, logprob: `[r]`, the token that followed each row and its log-probability (NaN: not known).
        """
        places = torch.arange(len(tokens)) + (self._begin[sample_id] + first)  # [r]
        known = self._memory[places]
        return torch.where((known == UNKNOWN) & (logprob > SURE), self._drafted[tokens], known), places

    def decide(self, undecided: Undecided, covered: Tensor, final: Tensor, target_head) -> Tensor:
        """`covered` `[R]` bool with the undecided rows filled in; final: the states of those rows `[U, H]`."""
        found = target_head.drafted(final)  # [U]
        self._coming.append((undecided.places, HostCopy(found)))
        while self._coming and self._coming[0][1].ready():
            places, copy = self._coming.popleft()
            self._memory[places] = copy.get().to(torch.uint8)
        return covered.index_copy(0, undecided.rows.to(covered.device, non_blocking=True), found)
