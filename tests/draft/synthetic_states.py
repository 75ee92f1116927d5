"""A small state store a head can learn from, made without a verifier: for the training tests only.

The language is a noisy permutation: with probability 0.9 the token after x is `successor[x]`, else
any. The "verifier" knows it: final[t] points at the output row of successor[x[t]], its taps are
three fixed random views of the embeddings of x[t] and x[t-1]. So there is something to learn at
every TTT step, and the best any head can do is known (it is right nine times in ten).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jobs.draft.model import HeadConfig, VerifierWeights
from jobs.storage.states import Response, ResponseLog, StateLayout, StateStore, StateWriter

TAPS = (2, 5, 7)
VOCABULARY, HIDDEN = 64, 32


@pytest.fixture
def one_core() -> Iterator[None]:
    """Training takes all cores of the process; at this size threads that wait for each other cost more
    than they bring, and other tests want the second core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@dataclass(frozen=True)
class Language:
    """The stand-in verifier: weights, and states of any token sequence."""

    verifier: VerifierWeights
    successor: Tensor  # [V]
    views: Tensor  # [3, 2H, H]

    @classmethod
    def make(cls, seed: int = 0, vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> "Language":
        g = torch.Generator().manual_seed(seed)
        embedding = torch.randn(vocabulary, hidden, generator=g).bfloat16()
        lm_head = torch.randn(vocabulary, hidden, generator=g).bfloat16()
        views = torch.randn(3, 2 * hidden, hidden, generator=g) / hidden**0.5
        norm = 1 + 0.1 * torch.randn(hidden, generator=g)
        return cls(VerifierWeights(embedding, norm.bfloat16(), lm_head), torch.randperm(vocabulary, generator=g), views)

    def write(self, tokens: int, generator: torch.Generator) -> list[int]:
        """A sequence of this language."""
        vocabulary = len(self.successor)
        ids = [int(torch.randint(vocabulary, (1,), generator=generator))]
        for _ in range(tokens - 1):
            usual = torch.rand(1, generator=generator) < 0.9
            ids.append(int(self.successor[ids[-1]]) if usual else int(torch.randint(vocabulary, (1,), generator=generator)))
        return ids

    def states(self, ids: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """taps [n-1, 3, H], final [n-1, H], logprob [n-1] of the sequence."""
        x = torch.tensor(ids)
        here = self.verifier.embedding.float()[x[:-1]]  # [n-1, H]
        before = here.roll(1, 0)  # [n-1, H]
        taps = torch.einsum("nd,tdh->nth", torch.cat((here, before), -1), self.views)  # [n-1, 3, H]
        taps = taps + 0.1 * torch.randn(taps.shape, generator=generator)
        head = self.verifier.lm_head.float()
        final = head[self.successor[x[:-1]]]
        final = 0.3 * final + 0.05 * torch.randn(final.shape, generator=generator)  # [n-1, H]
        logprob = (final @ head.T).log_softmax(-1).gather(-1, x[1:, None]).squeeze(-1)  # [n-1]
        return taps, final, logprob


def make_store(
    folder: Path, lengths: list[tuple[int, int]], *, seed: int = 0, dtype: str = "float32", language: Language | None = None
) -> StateStore:
    """A store of samples with (prompt, response) tokens; the same arguments give the same bytes."""
    language = language or Language.make()
    generator = torch.Generator().manual_seed(seed)
    layout = StateLayout(TAPS, language.verifier.embedding.shape[1], dtype, "synthetic", "0" * 40, "0" * 64)
    with ResponseLog(folder) as log:
        writer = StateWriter(folder, layout, shard_bytes=max(1 << 20, 256 * layout.row_bytes), extent_rows=64)
        for number, (prompt, response) in enumerate(lengths):
            ids = language.write(prompt + response, generator)
            name = f"p{number:04d}#0"
            writer.append(name, 0, *language.states(ids, generator))
            writer.finish(name, len(ids))
            writer.sync()
            log.append(Response(name, ids[:prompt], ids[prompt:], "length", {"temperature": 1.0}, "synthetic", False))
        writer.close()
    return StateStore(folder)


def small_config(**changes) -> HeadConfig:
    values = dict(
        vocab_size=VOCABULARY, draft_vocab_size=48, hidden_size=HIDDEN, intermediate_size=48, heads=4, kv_heads=2,
        head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, taps=TAPS, norm_before_residual=True,
    )  # fmt: skip
    return HeadConfig(**{**values, **changes})


def draft_ids(config: HeadConfig, seed: int = 3) -> Tensor:
    """A draft vocabulary with holes, so that offsets and uncovered targets occur."""
    order = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(seed))
    return order[: config.draft_vocab_size].sort().values
