"""Judge a head by replay: every chain it would draft, from stored states, against what the verifier said.

vLLM 0.16.0 proposes the draft's argmax (a one-hot proposal), so a draft is accepted exactly when the
verifier's own sampled token equals it, greedy or sampled: walking a stored answer IS the live process
in distribution, and for a greedy answer it is the live process itself. No verifier is needed.

**What the engine does, mirrored here.** After prefill of p prompt tokens the first token x[p] is
sampled without drafts. Then the head drafts from row p-1, which knows x[0..p]: K tokens for positions
p+1 .. p+K. The verifier accepts the a leading drafts that equal its own tokens and adds one bonus
token; the next chain starts at row p-1 + a+1. Between steps the engine re-runs the draft's first pass
over the accepted tokens with the verifier's own taps, so a chain from row t depends on true states up
to t only (`jobs.draft.drafting`), never on how the walk came there: one pass over all rows serves every walk.

**Two figures, kept apart.** The WALK counts the rows where the live process starts a step. The
ALL-POSITIONS average counts every response row as a start, easier rows and harder ones alike; it has less
variance and is the wrong number to promise anybody, since the walk lands more often just after a
rejected (hard) token.

**The end of an answer.** Normally a step is cut where the answer ends: drafts past the last token are
neither accepted nor tried, and the last step's tokens are what is left of the answer. The engine counts
otherwise, accepted drafts before stop handling; `stop_before` is its form: every step that starts before
that token, untruncated, which needs K tokens of the answer past it. Used with `ignore_eos` it equals the
engine's counters with difference 0 (tests/verifier/test_replay_equals_engine_counters.py).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from jobs.draft.acceptance import Counts, Judgement, SampleCounts, count_sample, walk
from jobs.draft.drafting import draft_chains
from jobs.draft.model import Eagle3Head
from jobs.errors import Interrupted, MustFix

__all__ = [
    "Candidate",
    "Counts",
    "Judgement",
    "SampleCounts",
    "count_sample",
    "draft_chains",
    "judge",
    "judge_chains",
    "judge_heads",
    "standard_labels",
    "walk",
]


class Answered(Protocol):
    """What replay needs of a stored answer (`jobs.storage.responses.Response` is one)."""

    id: str
    prompt_token_ids: list[int]
    response_token_ids: list[int]


Labels = Callable[[Any], Mapping[str, str | Sequence[str]]]


@dataclass(frozen=True)
class Candidate:
    """A head and the tap ids it reads; other than `head.config.taps` for the second reading of a published head."""

    head: Eagle3Head
    taps: tuple[int, ...]


def judge_heads(
    candidates: Mapping[str, Candidate],
    store: Any,
    ids: Sequence[str],
    draft_tokens: int,
    *,
    labels: Labels | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Judgement]:
    """Judge several heads in ONE pass over the states: reading 57 KB a token is what takes the time.

    Args:
        candidates: name -> head and taps; each head on the device and in the type it is to be judged in.
            Two readings of one head share its weights.
        store: `jobs.storage.states.StateStore`.
        ids: sample ids; their order does not matter.
        draft_tokens: K.
        labels: groups of an answer, for example `standard_labels`.
        should_stop: asked before every sample; true raises Interrupted.
        progress: called with (samples done, samples).

    Raises:
        MustFix: a head that does not fit the states, a tap the store does not hold, no answer to judge on.
    """
    for name, candidate in candidates.items():
        check_fits(name, candidate, store.layout)
    union = sorted({tap for c in candidates.values() for tap in c.taps})
    columns = {name: [union.index(tap) for tap in c.taps] for name, c in candidates.items()}
    counts: dict[str, dict[str, SampleCounts]] = {name: {} for name in candidates}
    ordered = sorted(set(ids))
    for done, sample_id in enumerate(ordered):
        if should_stop():
            raise Interrupted(f"Stopped after {done} of {len(ordered)} judged answers", remedy="run the same command again")
        sample = store.read(sample_id, union)  # taps [n-1, T, H]
        answer = sample.response
        prompt, response = answer.prompt_token_ids, answer.response_token_ids
        groups = labels(answer) if labels else None
        moved: dict[torch.device, torch.Tensor] = {}
        for name, candidate in candidates.items():
            device = candidate.head.fc.weight.device
            if device not in moved:
                moved[device] = sample.taps.to(device)  # [n-1, T, H], once for all heads
            taps = moved[device][:, columns[name]]  # [n-1, 3, H]
            chains = draft_chains(candidate.head, [*prompt, *response], taps, draft_tokens, first_row=len(prompt) - 1)
            counts[name][sample_id] = count_sample(chains.cpu(), prompt, response, draft_tokens, labels=groups)
        progress(done + 1, len(ordered))
    return {name: _judgement(name, draft_tokens, of) for name, of in counts.items()}


def judge(
    head: Eagle3Head,
    store: Any,
    ids: Sequence[str],
    draft_tokens: int,
    *,
    name: str = "head",
    taps: Sequence[int] | None = None,
    **options: Any,
) -> Judgement:
    """Judge one head; see `judge_heads` for the options and the errors. `taps` overrides `head.config.taps`."""
    candidate = Candidate(head, tuple(taps or head.config.taps))
    return judge_heads({name: candidate}, store, ids, draft_tokens, **options)[name]


def check_fits(name: str, candidate: Candidate, layout: Any) -> None:
    """Refuse a head of another width or one that reads taps the states do not hold."""
    config = candidate.head.config
    if config.hidden_size != layout.hidden_size:
        raise MustFix(
            f"The head {name} is {config.hidden_size} wide and the states are {layout.hidden_size}",
            where="hidden_size in its config.json",
            remedy="take a head made for this verifier",
        )
    missing = sorted(set(candidate.taps) - set(layout.taps))
    if missing or len(candidate.taps) != 3:
        raise MustFix(
            f"The head {name} reads taps {list(candidate.taps)} and the states hold {list(layout.taps)}", where="verifier.taps",
            remedy="capture the missing taps, or judge the other reading",
        )  # fmt: skip


def judge_chains(
    name: str, drafted: Iterable[tuple[Answered, np.ndarray | torch.Tensor]], draft_tokens: int, *, labels: Labels | None = None
) -> Judgement:
    """Judge chains drafted by anything: a head, or `jobs.verifier.ngram.ngram_chains`.

    Args:
        name: of the drafter.
        drafted: (answer, chains [rows, K] from row len(prompt)-1 on).
        draft_tokens: K.
        labels: groups of an answer, for example `standard_labels`.

    Raises:
        MustFix: there is no answer to judge on.
    """
    samples = {
        answer.id: count_sample(
            chains, answer.prompt_token_ids, answer.response_token_ids, draft_tokens, labels=labels(answer) if labels else None
        )
        for answer, chains in drafted
    }
    return _judgement(name, draft_tokens, samples)


POSITION_BUCKETS = (256, 1024, 4096, 16384)  # response positions; long thinking is where a head drifts


def standard_labels(answer: Any, thinking_span: range | None = None) -> dict[str, str | list[str]]:
    """The groups of every report: source, place in the answer, and inside or outside `<think>`.

    Args:
        answer: `jobs.storage.responses.Response`.
        thinking_span: positions of prompt + response inside `<think>`..`</think>` (`Chat.thinking_span`).
    """
    start, total = len(answer.prompt_token_ids), len(answer.prompt_token_ids) + len(answer.response_token_ids)
    edges = (0, *POSITION_BUCKETS)
    names = [f"{low}-{high - 1}" for low, high in zip(edges, POSITION_BUCKETS, strict=False)] + [f"{edges[-1]}+"]
    inside = thinking_span or range(0)
    return {
        "source": answer.source,
        "position": [names[sum(max(at - start, 0) >= edge for edge in POSITION_BUCKETS)] for at in range(total)],
        "thinking": ["inside" if at in inside else "outside" for at in range(total)],
    }


def _judgement(name: str, draft_tokens: int, samples: dict[str, SampleCounts]) -> Judgement:
    if not any(s.walk.steps for s in samples.values()):
        raise MustFix(
            f"There is no answer of two tokens or more to judge {name} on",
            where="responses.jsonl of the eval split",
            remedy="check that the eval split holds finished answers",
        )
    return Judgement(name, draft_tokens, dict(sorted(samples.items())))
