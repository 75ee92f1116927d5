"""Evaluate: the trained head judged like the baseline, on the same eval states, and compared with it.

What counts is the paired gain over the same prompts: its interval is far narrower than the
difference of two intervals. `evaluate.min_gain_over_…` turn a gain that is not there into a
failure of the run, before anything is published.
"""

from pathlib import Path
from typing import Any

from jobs.context import Context
from jobs.draft.formats import load_head
from jobs.draft.replay import Candidate
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix
from jobs.stages import judging
from jobs.storage.files import read_json
from jobs.storage.states import StateStore

NAME = "evaluate"
SETTINGS = (
    "verifier.dtype", "evaluate.draft_tokens", "evaluate.bootstrap", "evaluate.min_gain_over_untrained", "evaluate.min_gain_over_ngram",
    "evaluate.min_gain_over_best", "prompts.domains", "job.seed",
)  # fmt: skip


def inputs(context: Context) -> list[Path]:
    return [context.path / "trained", context.path / "baseline.json", context.states("eval") / "index.jsonl"]


def outputs(context: Context) -> list[Path]:
    return [context.path / "evaluation.json"]


def run(context: Context) -> dict[str, Any]:
    store = StateStore(context.states("eval"))
    head = load_head(context.path / "trained", verifier=VerifierWeights.read(context.verifier_path)).to(judging.replay_device(context))
    trained = judging.judge_all(context, {"trained": Candidate(head, head.config.taps)}, store)["trained"]
    baseline = read_json(context.path / "baseline.json")
    gains = {f"over_{name}": judging.gain(context, trained, judging.kept(context, name)) for name in baseline["heads"]}
    figures = judging.figures(context, trained)
    best = baseline.get("best")
    by_domain = judging.gains_by_domain(context, trained, judging.kept(context, best)) if best else {}
    judging.write_figures(context, context.path / "evaluation.json", {"trained": figures}, gains=gains, gains_by_domain=by_domain)
    if best and gains[f"over_{best}"]["low"] <= 0:
        gain = gains[f"over_{best}"]
        context.note(
            f"evaluate: the head is not shown to be better than {best}: gain {gain['mean']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f})"
        )
    _require_gains(context, gains, best)
    return {
        "acceptance_length": round(figures["acceptance_length"]["mean"], 4),
        "sequences": len(judging.own_ids(store)),
        "scored_steps": trained.walk.steps,
    }


def _require_gains(context: Context, gains: dict[str, dict[str, float]], best: str | None) -> None:
    settings = context.settings.evaluate
    wanted = [("untrained", "untrained", settings.min_gain_over_untrained), ("ngram", "ngram", settings.min_gain_over_ngram)]
    if best:
        wanted.append(("best", best, settings.min_gain_over_best))
    for setting, name, least in wanted:
        if least is not None and gains[f"over_{name}"]["low"] < least:
            got = gains[f"over_{name}"]
            raise MustFix(
                f"The trained head gains {got['mean']:.3f} (95 % interval {got['low']:.3f} to {got['high']:.3f}) over {name}, under {least}",
                where=f"evaluate.min_gain_over_{setting}",
                remedy="train longer or on more data, or ask for less and run it again; the head is kept in the run, nothing was published",
            )
