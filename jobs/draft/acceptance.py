"""Counting acceptance: from drafted chains and the verifier's answer to steps, tokens and rates.

Every drafter is counted by this one module, a head, n-gram speculation and (in the tests) the engine,
so that two figures that stand side by side mean the same thing. What a step is and where an answer
ends is told in `jobs.draft.replay`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Counts:
    """Sums over verification steps, additive over samples.

    `tokens` includes the bonus token of every step. `tried[j]`: steps that verified draft j, all before
    it accepted; `accepted[j]`: steps that accepted drafts 0..j. `drafts` and `draft_tokens` are vLLM's
    `num_drafts` and `num_draft_tokens`: steps that proposed anything, and how much.
    """

    steps: int
    tokens: int
    drafts: int
    draft_tokens: int
    tried: tuple[int, ...]  # [K]
    accepted: tuple[int, ...]  # [K], vLLM's num_accepted_tokens_per_pos

    @classmethod
    def zero(cls, draft_tokens: int) -> "Counts":
        return cls(0, 0, 0, 0, (0,) * draft_tokens, (0,) * draft_tokens)

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.steps + other.steps,
            self.tokens + other.tokens,
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            tuple(a + b for a, b in zip(self.tried, other.tried, strict=True)),
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
        )

    @property
    def mean(self) -> float:
        """Acceptance length: tokens a verification step, the bonus token included; nan without a step."""
        return self.tokens / self.steps if self.steps else float("nan")

    @property
    def rates(self) -> list[float]:
        """[K] Share of drafting steps that accepted drafts 0..j (the field's per-position acceptance)."""
        return [_ratio(a, self.drafts) for a in self.accepted]

    @property
    def conditional_rates(self) -> list[float]:
        """[K] Share accepted at j of the steps that got as far as verifying j."""
        return [_ratio(a, t) for a, t in zip(self.accepted, self.tried, strict=True)]

    @property
    def histogram(self) -> list[int]:
        """[K+1] Steps that accepted exactly 0, 1 .. K drafts; steps that drafted nothing are among the zeros."""
        edges = [self.steps, *self.accepted, 0]
        return [edges[i] - edges[i + 1] for i in range(len(edges) - 1)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "drafts": self.drafts,
            "draft_tokens": self.draft_tokens,
            "tried": list(self.tried),
            "accepted": list(self.accepted),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Counts":
        return cls(data["steps"], data["tokens"], data["drafts"], data["draft_tokens"], tuple(data["tried"]), tuple(data["accepted"]))


@dataclass(frozen=True)
class SampleCounts:
    """One answer: the walk, every position as a start, and the walk's steps by group (dimension -> label)."""

    walk: Counts
    every: Counts
    groups: dict[str, dict[str, Counts]] = field(default_factory=dict)


@dataclass(frozen=True)
class Judgement:
    """What one drafter (head or n-gram) did on a set of stored answers, by sample id."""

    name: str
    draft_tokens: int
    samples: dict[str, SampleCounts]

    @property
    def walk(self) -> Counts:
        """The live process over all answers."""
        return sum((s.walk for s in self.samples.values()), Counts.zero(self.draft_tokens))

    @property
    def every(self) -> Counts:
        """Every row with K tokens after it as a start."""
        return sum((s.every for s in self.samples.values()), Counts.zero(self.draft_tokens))

    @property
    def mean_acceptance_length(self) -> float:
        return self.walk.mean

    def labels(self, dimension: str) -> list[str]:
        return sorted({label for s in self.samples.values() for label in s.groups.get(dimension, {})})

    def group(self, dimension: str, label: str) -> Counts:
        """The walk's steps of one group; a step belongs to the group of its first emitted token."""
        parts = (s.groups.get(dimension, {}).get(label) for s in self.samples.values())
        return sum((p for p in parts if p is not None), Counts.zero(self.draft_tokens))

    def summary(self) -> dict[str, Any]:
        """The figures a person wants, without the rows of the samples."""
        walk, every = self.walk, self.every
        dimensions = sorted({d for s in self.samples.values() for d in s.groups})
        return {
            "name": self.name,
            "draft_tokens": self.draft_tokens,
            "samples": len(self.samples),
            "mean_acceptance_length": _number(walk.mean),
            "rates": [_number(r) for r in walk.rates],
            "conditional_rates": [_number(r) for r in walk.conditional_rates],
            "histogram": walk.histogram,
            "walk": walk.as_dict(),
            "all_positions": {
                "mean_acceptance_length": _number(every.mean),
                "rates": [_number(r) for r in every.rates],
                "histogram": every.histogram,
            },
            "groups": {
                d: {
                    label: {"mean_acceptance_length": _number(self.group(d, label).mean), **self.group(d, label).as_dict()}
                    for label in self.labels(d)
                }
                for d in dimensions
            },
        }

    def as_dict(self) -> dict[str, Any]:
        """JSON form; `from_dict` reads it back equal."""
        rows = {
            sample_id: {
                "walk": s.walk.as_dict(),
                "every": s.every.as_dict(),
                "groups": {d: {label: c.as_dict() for label, c in by.items()} for d, by in s.groups.items()},
            }
            for sample_id, s in self.samples.items()
        }
        return {"summary": self.summary(), "samples": rows}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Judgement":
        samples = {
            sample_id: SampleCounts(
                Counts.from_dict(row["walk"]),
                Counts.from_dict(row["every"]),
                {d: {label: Counts.from_dict(c) for label, c in by.items()} for d, by in row["groups"].items()},
            )
            for sample_id, row in data["samples"].items()
        }
        return cls(data["summary"]["name"], data["summary"]["draft_tokens"], samples)


def accepted_lengths(chains: np.ndarray | torch.Tensor, tokens: Sequence[int], first_row: int) -> np.ndarray:
    """Leading drafts of every row's chain that equal the answer: int64 [rows], 0..K.

    Args:
        chains: [rows, K] target ids drafted from rows first_row, first_row+1, …; -1 is no draft.
        tokens: prompt and response, n ids; draft j of row r stands for position r+2+j. Past the end nothing matches.
    """
    drafted = np.asarray(chains, dtype=np.int64)  # [rows, K]
    rows, width = drafted.shape
    truth = np.full((rows, width), -2, dtype=np.int64)  # [rows, K], never equal to a draft
    ids = np.asarray(tokens, dtype=np.int64)  # [n]
    for j in range(width):
        following = ids[first_row + 2 + j :][:rows]
        truth[: following.size, j] = following
    return np.logical_and.accumulate(drafted == truth, axis=1).sum(axis=1)


def walk_rows(lengths: np.ndarray, tokens: int, first_row: int, draft_tokens: int, stop_before: int | None = None) -> list[int]:
    """Rows where the live process starts a step, from the accepted length of every row.

    A step at row r knows tokens up to r+1 and emits from r+2 on. It starts as long as an answer token is
    left, or, in the engine's form, as long as fewer than `stop_before` tokens are known.
    """
    if stop_before is not None and tokens < stop_before + draft_tokens - 1:
        raise ValueError(f"{tokens} tokens do not reach {draft_tokens - 1} past {stop_before}")
    limit = tokens if stop_before is None else stop_before
    rows, row = [], first_row
    while row + 2 < limit:
        if row - first_row >= len(lengths):
            raise ValueError(f"the walk reached row {row} and there are chains up to row {first_row + len(lengths) - 1} only")
        rows.append(row)
        row += int(lengths[row - first_row]) + 1
    return rows


def walk(
    chains: np.ndarray | torch.Tensor, tokens: Sequence[int], first_row: int, draft_tokens: int, stop_before: int | None = None
) -> list[int]:
    """Accepted drafts of each verification step of the live process.

    Args:
        chains: [rows, K] target ids drafted from rows first_row, first_row+1, …; -1 is no draft.
        tokens: prompt and response, n ids.
        first_row: len(prompt) - 1.
        draft_tokens: K; the first K columns of the chains are used.
        stop_before: the engine's form (see `jobs.draft.replay`): count every step that starts while fewer
            tokens than this (prompt included) are known, untruncated. Needs n >= stop_before + K - 1.
    """
    lengths = accepted_lengths(np.asarray(chains)[:, :draft_tokens], tokens, first_row)  # [rows]
    return [int(lengths[r - first_row]) for r in walk_rows(lengths, len(tokens), first_row, draft_tokens, stop_before)]


def count_sample(
    chains: np.ndarray | torch.Tensor,
    prompt: Sequence[int],
    response: Sequence[int],
    draft_tokens: int,
    *,
    labels: Mapping[str, str | Sequence[str]] | None = None,
    stop_before: int | None = None,
) -> SampleCounts:
    """Both figures of one answer.

    Args:
        chains: [rows, K] from row len(prompt)-1 on.
        labels: dimension -> one label for the answer, or one a position of prompt + response.
        stop_before: the engine's form of the walk, see `walk`.
    """
    tokens, first = [*prompt, *response], len(prompt) - 1
    drafted = np.asarray(chains, dtype=np.int64)[:, :draft_tokens]  # [rows, K]
    lengths = accepted_lengths(drafted, tokens, first)  # [rows]
    proposed = (drafted >= 0).sum(axis=1)  # [rows]
    rows = walk_rows(lengths, len(tokens), first, draft_tokens, stop_before)
    cut = len(tokens) if stop_before is None else None
    whole = range(first, len(tokens) - 1 - draft_tokens)  # rows with K tokens after the known one
    groups: dict[str, dict[str, Counts]] = {}
    for dimension, label in (labels or {}).items():
        members: dict[str, list[int]] = {}
        for row in rows:
            members.setdefault(label if isinstance(label, str) else label[row + 2], []).append(row)
        groups[dimension] = {name: _count(of, lengths, proposed, first, draft_tokens, cut) for name, of in sorted(members.items())}
    return SampleCounts(
        _count(rows, lengths, proposed, first, draft_tokens, cut),
        _count(whole, lengths, proposed, first, draft_tokens, None),
        groups,
    )


def _count(rows: Sequence[int], lengths: np.ndarray, proposed: np.ndarray, first: int, draft_tokens: int, cut: int | None) -> Counts:
    """Sum the steps that start at these rows; `cut` is the length of the answer that truncates the last one."""
    at = np.asarray(rows, dtype=np.int64) - first  # [S]
    accepted, given = lengths[at], proposed[at]  # [S], [S]
    left = np.full(at.size, draft_tokens + 1) if cut is None else cut - (at + first + 2)  # [S] answer tokens still to come
    verifiable = np.minimum(given, left)  # [S]
    places = np.arange(draft_tokens)  # [K]
    tried = (places < verifiable[:, None]) & (places <= accepted[:, None])  # [S, K]
    taken = places < accepted[:, None]  # [S, K]
    return Counts(
        steps=at.size,
        tokens=int(np.minimum(accepted + 1, left).sum()),
        drafts=int((given > 0).sum()),
        draft_tokens=int(given.sum()),
        tried=tuple(int(n) for n in tried.sum(axis=0)),
        accepted=tuple(int(n) for n in taken.sum(axis=0)),
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def _number(value: float) -> float | None:
    """JSON has no nan."""
    return None if value != value else value
