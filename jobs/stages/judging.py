"""Heads judged by replay on the eval split: what `baseline` and `evaluate` share.

A judgement is kept in full, prompt by prompt, under `judgements/`: `evaluate` pairs the trained
head with the baseline on the same prompts, and anyone can recompute every figure from these files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from jobs.draft import statistics
from jobs.draft.acceptance import Judgement
from jobs.draft.replay import Candidate, judge_chains, judge_heads, standard_labels
from jobs.run import Context
from jobs.storage.files import read_json, write_json_atomically
from jobs.storage.responses import Response
from jobs.storage.states import StateStore
from jobs.verifier.chat import Chat
from jobs.verifier.ngram import ngram_chains


def judge_all(context: Context, candidates: Mapping[str, Candidate], store: StateStore) -> dict[str, Judgement]:
    """Every head in one pass over the eval states; each judgement is kept."""
    if not candidates:
        return {}
    judged = judge_heads(
        candidates, store, store.ids(), context.settings.evaluate.draft_tokens, labels=labels(context), should_stop=context.should_stop,
        progress=lambda done, total: context.progress(done, total, "answers"),
    )  # fmt: skip
    for judgement in judged.values():
        keep(context, judgement)
    return judged


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
    """Groups of an answer: where its prompt is from, and which of its tokens are thinking."""
    chat = Chat.load(context.verifier_path)
    return lambda answer: standard_labels(answer, chat.thinking_span(answer.prompt_token_ids, answer.response_token_ids))


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
    return statistics.paired_gain_interval(judgement, other, **_resampling(context))._asdict()


def figures(context: Context, judgement: Judgement) -> dict[str, Any]:
    """The figures of one head as the report and the model card show them."""
    interval = statistics.mean_interval(judgement, **_resampling(context))
    return {"acceptance_length": interval._asdict()} | judgement.summary()


def _resampling(context: Context) -> dict[str, int]:
    return {"bootstrap": context.settings.evaluate.bootstrap, "seed": context.settings.job.seed}


def write_figures(context: Context, path: Path, heads: Mapping[str, Any], **more: Any) -> None:
    write_json_atomically(path, {"draft_tokens": context.settings.evaluate.draft_tokens, "heads": dict(heads), **more})
    context.run.ledger["acceptance"] |= {name: figure["acceptance_length"] for name, figure in heads.items()}
    context.run.save()
