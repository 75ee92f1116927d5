"""Scaling: what less data would have given, so that the size of the next run can be chosen.

For each share in `evaluate.scaling` a head is trained from the same start, with the same settings, on
that share of the train split: the beginning of its seeded order, so the table's rows are what smaller
runs with the same seed would have trained on. The trained head itself is the row of the whole. It runs
after the publication: the head does not wait for a table.

`plan --calibrate` reads the table from the ledger.
"""

import math
from pathlib import Path
from typing import Any

from jobs.context import Context
from jobs.draft.replay import Candidate
from jobs.draft.trainer import train
from jobs.draft.weights import VerifierWeights
from jobs.stages import judging
from jobs.stages.conversations import seeded
from jobs.stages.train import FREE_SETTINGS, initial_head
from jobs.storage.files import read_json, write_json_atomically
from jobs.storage.states import StateStore
from jobs.wording import counted

__all__ = ["FREE_SETTINGS", "NAME", "SETTINGS", "inputs", "outputs", "run"]
NAME = "scaling"
SETTINGS = (
    "evaluate.scaling",
    "verifier.dtype",
    "evaluate.draft_tokens",
    "evaluate.bootstrap",
    "train",
    "job.seed",
    "heads.warm_start",
    "verifier.taps",
)


def inputs(context: Context) -> list[Path]:
    train_split = context.states("train")
    return [
        context.path / "evaluation.json",
        context.path / "vocab.safetensors",
        train_split / "index.jsonl",
        train_split / "responses.jsonl",
    ]


def outputs(context: Context) -> list[Path]:
    return [context.path / "scaling.json"]


def run(context: Context) -> dict[str, Any]:
    store, evaluation = StateStore(context.states("train")), StateStore(context.states("eval"))
    whole = judging.kept(context, "trained")
    rows = []
    for share in sorted(context.settings.evaluate.scaling):
        ids = first_share(store.ids(), share, context.settings.job.seed)
        steps = _train(context, store, ids, share)
        judged = judging.judge_all(context, {f"scaling-{share:g}": steps.pop("candidate")}, evaluation)[f"scaling-{share:g}"]
        figures = judging.figures(context, judged)
        rows.append(
            {
                "share": share,
                **_size(store, ids),
                **steps,
                "acceptance_length": figures["acceptance_length"],
                "whole_gains": judging.gain(context, whole, judged),
            }
        )
        write_json_atomically(context.path / "scaling.json", {"rows": rows})
    counts = context.run.stage("train")["counts"]
    figures = read_json(context.path / "evaluation.json")["heads"]["trained"]
    rows.append(
        {"share": 1.0, **_size(store, store.ids()), "steps": counts.get("steps"), "acceptance_length": figures["acceptance_length"]}
    )
    write_json_atomically(context.path / "scaling.json", {"rows": rows})
    return {
        "table": [
            {"samples": row["samples"], "tokens": row["tokens"], "acceptance_length": round(row["acceptance_length"]["mean"], 4)}
            for row in rows
        ]
    }


def first_share(ids: list[str], share: float, seed: int) -> list[str]:
    """Sample ids of the first `share` of the conversations in seeded order: all turns of a conversation or none."""
    conversations = sorted({sample.rpartition("#")[0] for sample in ids}, key=lambda name: seeded(seed, name))
    kept = set(conversations[: max(1, math.ceil(share * len(conversations)))])
    return [sample for sample in ids if sample.rpartition("#")[0] in kept]


def _train(context: Context, store: StateStore, ids: list[str], share: float) -> dict[str, Any]:
    """A head on these samples; {candidate, steps}. An interrupted one continues from its checkpoint."""
    verifier = VerifierWeights.read(context.verifier_path)
    head, is_warm = initial_head(context, verifier)
    settings = context.settings.train.model_copy(update={"evaluate_every": None})
    context.note(f"scaling: training on {share:.0%} of the train split, {counted(len(ids), 'samples')}")
    result = train(
        settings=settings, seed=context.settings.job.seed, head=head, verifier=verifier, store=store, sample_ids=ids, warm=is_warm, evaluate=None,
        folder=context.path / "scaling" / f"{share:g}", should_stop=context.should_stop, report=context.display.metrics,
    )  # fmt: skip
    head = head.to(judging.replay_device(context))
    return {"candidate": Candidate(head, head.config.taps), "steps": result.steps}


def _size(store: StateStore, ids: list[str]) -> dict[str, int]:
    return {"samples": len(ids), "tokens": sum(store.response(sample).tokens for sample in ids)}
