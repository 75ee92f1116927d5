"""Train the head on the states of the train split: from scratch, or from the head the baseline chose."""

from pathlib import Path
from typing import Any

from jobs.draft import formats
from jobs.draft.model import Eagle3Head, VerifierWeights
from jobs.draft.replay import judge
from jobs.draft.trainer import train
from jobs.draft.vocabulary import DraftVocabulary
from jobs.run import Context
from jobs.stages import judging, warm
from jobs.storage.files import append_line
from jobs.storage.states import StateStore
from jobs.verifier.engine import VerifierFacts

NAME = "train"
SETTINGS = ("train", "job.seed", "heads.warm_start", "verifier.taps")


def inputs(context: Context) -> list[Path]:
    train = context.states("train")
    return [context.path / "fetched.json", context.path / "vocab.safetensors", train / "index.jsonl", train / "responses.jsonl"]


def outputs(context: Context) -> list[Path]:
    return [context.path / "checkpoints", context.path / "trained", context.path / "train.jsonl"]


def run(context: Context) -> dict[str, Any]:
    settings = context.settings
    store, evaluation = StateStore(context.states("train")), StateStore(context.states("eval"))
    verifier = VerifierWeights.read(context.verifier_path)
    head, is_warm = initial_head(context, verifier)
    depth = settings.evaluate.draft_tokens

    def replay(current: Eagle3Head) -> dict[str, Any]:
        judged = judge(current, evaluation, evaluation.ids(), depth, judging.replay_device(context), name="in training")
        return {"acceptance": judged.mean_acceptance_length, "rates": judged.walk.rates}

    def report(line: dict[str, Any]) -> None:
        append_line(context.path / "train.jsonl", _json(line))
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
    """(head to train, whether it is a warm start)."""
    start = warm.chosen(context)
    vocabulary = DraftVocabulary.load(context.path / "vocab.safetensors")
    if start is None:
        facts = VerifierFacts.read(context.verifier_path)
        config = formats.config_from_scratch(facts, context.settings, vocabulary.size)
        return Eagle3Head.from_scratch(config, verifier, vocabulary.draft_ids, context.settings.job.seed), False
    context.note(f"train: warm start from {start.name}, its taps read as {list(start.taps)}")
    return formats.load_head(start.folder, verifier=verifier, taps=start.taps), True


def save_trained(context: Context, head: Eagle3Head) -> None:
    """The trained head in fp32, whole or not at all: what evaluate and package read."""
    formats.save_speculators(
        head, context.path / "trained", verifier_name=context.fetched()["verifier"]["model"],
        verifier_architecture=VerifierFacts.read(context.verifier_path).architecture, dtype="float32",
    )  # fmt: skip
