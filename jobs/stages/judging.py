"""Heads judged by replay on the eval split: what `baseline` and `evaluate` share.

A judgement is kept in full, prompt by prompt, under `judgements/`: `evaluate` pairs the trained
head with the baseline on the same prompts, and anyone can recompute every figure from these files.

Standard sets are judged in the same pass and stand apart: the figure of a head, its gains and the gate
are of the run's own prompts.
"""

import contextlib
import copy
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jobs.context import Context
from jobs.draft import statistics
from jobs.draft.acceptance import Counts, Judgement
from jobs.draft.model import Eagle3Head
from jobs.draft.replay import Candidate, judge_chains, judge_heads, standard_labels
from jobs.errors import MustFix
from jobs.stages import standard
from jobs.stages.domains import domain_of
from jobs.storage.files import read_json, write_json_atomically
from jobs.storage.responses import RESPONSES, Response, scan_responses
from jobs.storage.states import StateStore
from jobs.verifier.chat import Chat
from jobs.verifier.ngram import ngram_chains

# A dimension with more labels than this (the sources of a wide mix) is shown with the sum of the others.
LABELS_SHOWN = 8


def judge_all(context: Context, candidates: Mapping[str, Candidate], store: StateStore) -> dict[str, Judgement]:
    """Every head, as it is served, in one pass over the eval states; each judgement is kept."""
    if not candidates:
        return {}
    _tell_incomplete(context, store)
    served: dict[int, Eagle3Head] = {}  # two readings of one head share it
    for candidate in candidates.values():
        served.setdefault(id(candidate.head), as_served(context, candidate.head))
    judged = judge_heads(
        {name: replace(candidate, head=served[id(candidate.head)]) for name, candidate in candidates.items()}, store, store.ids(),
        context.settings.evaluate.draft_tokens, labels=labels(context), should_stop=context.should_stop,
        progress=lambda done, total: context.progress(done, total, "answers"),
    )  # fmt: skip
    for judgement in judged.values():
        keep(context, judgement)
    return judged


def as_served(context: Context, head: Eagle3Head) -> Eagle3Head:
    """The head in the verifier's type, in which it is published and vLLM computes drafts: a copy where it was trained in another."""
    dtype = getattr(torch, context.settings.verifier.dtype)
    if head.fc.weight.dtype == dtype:
        return head
    # Rounded as they are copied, and shared where there is nothing to round: beside training there is no room for all of it in fp32.
    served = {id(weight): torch.nn.Parameter(weight.detach().to(dtype), requires_grad=False) for weight in head.parameters()}
    return copy.deepcopy(head, served)


def _tell_incomplete(context: Context, store: StateStore) -> None:
    """An answer with a gap in its states cannot be judged; the others are, and it is said how many are missing."""
    committed = sum(1 for _ in scan_responses(store.folder / RESPONSES))
    if committed > len(store):
        context.note(
            f"{committed - len(store)} of {committed} eval answers have no complete states and are not judged: see `states verify`"
        )


def judge_ngram(context: Context, store: StateStore) -> Judgement:
    """n-gram speculation through the same walk, with vLLM's own proposer."""
    depth, (shortest, longest) = context.settings.evaluate.draft_tokens, context.settings.heads.ngram_window
    limit = context.settings.verifier.max_model_len

    def chains(answer: Response) -> Any:
        tokens = answer.prompt_token_ids + answer.response_token_ids
        return ngram_chains(tokens, len(answer.prompt_token_ids) - 1, depth, lookup_min=shortest, lookup_max=longest, max_model_len=limit)

    drafted = ((answer, chains(answer)) for answer in map(store.response, store.ids()))
    return keep(context, judge_chains("ngram", drafted, depth, labels=labels(context)))


def labels(context: Context) -> Any:
    """Groups of an answer: where its prompt is from, of what domain it is, and which of its tokens are thinking."""
    chat, named = Chat.load(context.verifier_path), context.settings.prompts.domains

    def groups(answer: Response) -> dict[str, Any]:
        span = chat.thinking_span(answer.prompt_token_ids, answer.response_token_ids)
        return {"domain": domain_of(answer.source, named)} | standard_labels(answer, span)

    return groups


def own(judgement: Judgement) -> Judgement:
    """The run's own prompts of a judgement, the standard sets left out."""
    return _part(judgement, None)


def own_ids(store: StateStore) -> list[str]:
    """Ids of the run's own answers in the eval split."""
    return [i for i in store.ids() if standard.set_of(i) is None]


def sampled_ids(store: StateStore, samples: int | None, seed: int) -> list[str]:
    """So many of them, drawn by the seed; all where there are no more or `samples` is None."""
    ids = sorted(own_ids(store))
    return ids if samples is None or samples >= len(ids) else sorted(random.Random(seed).sample(ids, samples))


def _part(judgement: Judgement, name: str | None) -> Judgement:
    return replace(judgement, samples={i: s for i, s in judgement.samples.items() if standard.set_of(i) == name})


def replay_device(context: Context) -> torch.device:
    wanted = context.settings.train.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def keep(context: Context, judgement: Judgement, name: str | None = None) -> Judgement:
    folder = context.path / "judgements"
    folder.mkdir(exist_ok=True)
    write_json_atomically(folder / f"{name or judgement.name}.json", judgement.as_dict())
    return judgement


def kept(context: Context, name: str) -> Judgement:
    return Judgement.from_dict(read_json(context.path / "judgements" / f"{name}.json"))


def gain(context: Context, judgement: Judgement, other: Judgement) -> dict[str, float]:
    """Paired gain in acceptance length over another head on the same prompts, with its 95 % interval."""
    return statistics.paired_gain_interval(own(judgement), own(other), **_resampling(context))._asdict()


def gains_by_domain(context: Context, judgement: Judgement, other: Judgement) -> dict[str, dict[str, float]]:
    """The paired gain in each domain that both were judged in and that has prompts enough for an interval."""
    mine, theirs, found = own(judgement), own(other), {}
    for label in mine.labels("domain"):
        # Too few prompts of a domain, or a judgement kept before there were domains, leave a gap in this table.
        with contextlib.suppress(MustFix):
            found[label] = statistics.paired_gain_interval(mine, theirs, dimension="domain", label=label, **_resampling(context))._asdict()
    return found


def figures(context: Context, judgement: Judgement) -> dict[str, Any]:
    """The figures of one head as the report and the model card show them."""
    mine = own(judgement)
    interval = statistics.mean_interval(mine, **_resampling(context))
    found = {"acceptance_length": interval._asdict()} | mine.summary()
    for dimension, labels_of in found["groups"].items():
        for label, entry in labels_of.items():
            entry |= _interval(context, mine, dimension, label)
        if len(labels_of) > LABELS_SHOWN:
            found.setdefault("others", {})[dimension] = _others(mine, dimension)
    sets = sorted({name for i in judgement.samples if (name := standard.set_of(i)) is not None})
    if sets:
        found["standard"] = {name: _standard(context, _part(judgement, name)) for name in sets}
    return found


def _others(judgement: Judgement, dimension: str) -> dict[str, Any]:
    """Which labels of a long dimension a page shows, those with the most answers, and the sum of the others."""
    answers = Counter(label for sample in judgement.samples.values() for label in sample.groups.get(dimension, {}))
    ordered = sorted(answers, key=lambda label: (-answers[label], label))
    rest = sum((judgement.group(dimension, label) for label in ordered[LABELS_SHOWN:]), Counts.zero(judgement.draft_tokens))
    return {
        "shown": ordered[:LABELS_SHOWN],
        "labels": len(ordered) - LABELS_SHOWN,
        "mean_acceptance_length": rest.mean if rest.steps else None,
        **rest.as_dict(),
    }


def _interval(context: Context, judgement: Judgement, dimension: str | None = None, label: str | None = None) -> dict[str, float]:
    """`low` and `high`, or nothing where the prompts are too few for an interval."""
    try:
        interval = statistics.mean_interval(judgement, dimension=dimension, label=label, **_resampling(context))
    except MustFix:
        return {}
    return {"low": interval.low, "high": interval.high}


def _standard(context: Context, judgement: Judgement) -> dict[str, Any]:
    """A standard set in the field's convention: drafted tokens and the bonus token, one figure a set."""
    summary, prompts = judgement.summary(), {statistics.prompt_of(i) for i in judgement.samples}
    length = {"mean": summary["mean_acceptance_length"]} | _interval(context, judgement)
    return {"acceptance_length": length, "prompts": len(prompts), "rates": summary["rates"], "walk": summary["walk"]}


def _resampling(context: Context) -> dict[str, int]:
    return {"bootstrap": context.settings.evaluate.bootstrap, "seed": context.settings.job.seed}


def write_figures(context: Context, path: Path, heads: Mapping[str, Any], **more: Any) -> None:
    write_json_atomically(path, {"draft_tokens": context.settings.evaluate.draft_tokens, "heads": dict(heads), **more})
    context.run.ledger["acceptance"] |= {name: figure["acceptance_length"] for name, figure in heads.items()}
    context.run.save()
