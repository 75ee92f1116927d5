"""Train the head on the states of the train split: from scratch, or from the head the baseline chose."""

from pathlib import Path
from typing import Any

from jobs.context import Context
from jobs.draft import checkpoint
from jobs.draft.data import check_type
from jobs.draft.export import save_speculators
from jobs.draft.model import Eagle3Head
from jobs.draft.replay import judge
from jobs.draft.trainer import train
from jobs.draft.vocabulary import DraftVocabulary
from jobs.draft.weights import VerifierWeights
from jobs.stages import initial, judging
from jobs.stages.vocab import token_counts
from jobs.storage.files import JsonLog
from jobs.storage.states import StateStore
from jobs.verifier.facts import VerifierFacts

NAME = "train"
SETTINGS = ("train", "job.seed", "heads.warm_start", "verifier.taps")
# Changed, they throw no paid work away: a training takes them over where it continues, and says so.
FREE_SETTINGS = frozenset(f"train.{name}" for name in checkpoint.FREE | checkpoint.ROUNDING)


def inputs(context: Context) -> list[Path]:
    train = context.states("train")
    return [context.path / "fetched.json", context.path / "vocab.safetensors", train / "index.jsonl", train / "responses.jsonl"]


def outputs(context: Context) -> list[Path]:
    return [context.path / "checkpoints", context.path / "trained", context.path / "train.jsonl"]


def run(context: Context) -> dict[str, Any]:
    settings = context.settings
    store, evaluation = StateStore(context.states("train")), StateStore(context.states("eval"))
    check_type(store, settings.states.dtype)
    verifier = VerifierWeights.read(context.verifier_path)
    head, is_warm = initial_head(context, verifier)
    judged_ids = judging.sampled_ids(evaluation, settings.train.evaluate_samples, settings.job.seed)
    depth, log = settings.evaluate.draft_tokens, JsonLog(context.path / "train.jsonl")

    def replay(current: Eagle3Head) -> dict[str, Any]:
        judged = judge(
            judging.as_served(context, current), evaluation, judged_ids, depth, name="in training", should_stop=context.should_stop
        )
        return {"acceptance": judged.mean_acceptance_length, "rates": judged.walk.rates}

    def report(line: dict[str, Any]) -> None:
        log.append_json(line)
        context.display.metrics(line)
        if "step" in line:
            context.progress(line["step"], line.get("steps"), "steps", **{k: line[k] for k in ("loss", "tokens_per_second") if k in line})

    result = train(
        settings=settings.train, seed=settings.job.seed, head=head, verifier=verifier, store=store, sample_ids=store.ids(),
        folder=context.path / "checkpoints", warm=is_warm, evaluate=replay, should_stop=context.should_stop, report=report,
    )  # fmt: skip
    save_trained(context, head)
    return result.counts()


def initial_head(context: Context, verifier: VerifierWeights) -> tuple[Eagle3Head, bool]:
    """(head to train, whether it is a warm start); its draft vocabulary is the one `vocab` wrote."""
    start, vocabulary = initial.chosen(context), DraftVocabulary.load(context.path / "vocab.safetensors")
    if start is None:
        return initial.scratch(context, verifier, vocabulary.draft_ids), False
    return initial.warm(context, start, verifier, token_counts(context, "train")), True


def save_trained(context: Context, head: Eagle3Head) -> None:
    """The trained head in the training's own precision: what evaluate and package read."""
    save_speculators(
        head, context.path / "trained", verifier_name=context.fetched()["verifier"]["model"],
        verifier_architecture=VerifierFacts.read(context.verifier_path).architecture, draft_tokens=context.settings.evaluate.draft_tokens, dtype=None,
    )  # fmt: skip
