"""The draft vocabulary: which of the verifier's tokens the head can draft.

A smaller output head makes every drafted token cheaper; what it cannot draft is simply rejected.
Counted over the responses the verifier wrote itself, with the special and template tokens forced
in. A warm start keeps its head's own map (its output rows are trained for it). The map of a head
from scratch is counted over the train responses alone: over the eval responses it would draft every
token it is judged on, and on other traffic it would not. Only the untrained floor, judged before there
is a train split, has a map of the eval responses; it accepts nothing with either.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jobs.context import Context
from jobs.draft.vocabulary import DraftVocabulary, build
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix
from jobs.stages import initial, standard
from jobs.storage.states import StateStore
from jobs.verifier.chat import Chat
from jobs.verifier.facts import VerifierFacts

NAME = "vocab"
SETTINGS = ("vocab", "heads.warm_start")


def inputs(context: Context) -> list[Path]:
    return [context.path / "baseline.json", context.states("train") / "responses.jsonl"]


def outputs(context: Context) -> list[Path]:
    return [context.path / "vocab.safetensors"]


def run(context: Context) -> dict[str, Any]:
    counts = token_counts(context, "train")
    start = initial.chosen(context)
    if start is not None:
        head = initial.warm(context, start, VerifierWeights.read(context.verifier_path), counts)
        chosen, source = DraftVocabulary.from_ids(head.draft_ids.cpu(), head.config.vocab_size), start.name
    else:
        chosen, source = draft_vocabulary(context, "train"), "train"
    coverage = chosen.coverage_of(counts)
    if coverage < context.settings.vocab.min_coverage:
        raise MustFix(
            f"The draft vocabulary covers {coverage:.1%} of the response tokens, vocab.min_coverage asks for {context.settings.vocab.min_coverage:.0%}",
            where="vocab", remedy="raise vocab.size, or lower vocab.min_coverage knowingly",
        )  # fmt: skip
    _save(context.path / "vocab.safetensors", replace(chosen, coverage=coverage))
    return {"size": chosen.size, "coverage": round(coverage, 5), "counted_tokens": sum(counts.values()), "map_from": source}


def _save(path: Path, vocabulary: DraftVocabulary) -> None:
    """Leave an equal file alone: safetensors writes its metadata in any order, and training would look stale."""
    if path.exists():
        earlier = DraftVocabulary.load(path)
        if torch.equal(earlier.d2t, vocabulary.d2t) and torch.equal(earlier.t2d, vocabulary.t2d):
            return
    vocabulary.save(path)


def draft_vocabulary(context: Context, split: str) -> DraftVocabulary:
    """The map from the responses of a split, deterministic for the same responses."""
    facts, chat = VerifierFacts.read(context.verifier_path), Chat.load(context.verifier_path)
    size = context.settings.vocab.size or facts.vocab_size
    if size > facts.vocab_size:
        raise MustFix(f"vocab.size = {size} exceeds the verifier's vocabulary of {facts.vocab_size}", where="vocab.size", remedy="lower it")
    return build(token_counts(context, split), size, chat.special_token_ids, facts.vocab_size)


def token_counts(context: Context, split: str) -> Counter[int]:
    store = StateStore(context.states(split))
    counts: Counter[int] = Counter()
    # Standard prompts are for judging only: the map must not be made for them.
    for sample_id in (i for i in store.ids() if standard.set_of(i) is None):
        counts.update(store.response(sample_id).response_token_ids)
    if not counts:
        raise MustFix(
            f"The {split} split holds no response",
            where=str(context.states(split)),
            remedy=f"generate it again with --redo generate.{split}",
        )
    return counts
