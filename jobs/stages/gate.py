"""The gate: is there anything left to buy? Decided before the train split is paid for.

Two questions, each asked only if its setting is there. Is the best existing head already good
enough (`train_if_best_below`)? And does training gain anything: a trial on the first
`trial_fraction` of the train split must beat the best existing way to speculate by `min_gain`? The
trial's answers are the beginning of the train split in its seeded order, so a go throws nothing
away: `generate.train` continues behind them.

The verdict stands in the ledger with its why and with what it saves; `--force` overrides a no-go
and is recorded.
"""

from dataclasses import dataclass
from typing import Any

from jobs.context import Context
from jobs.draft.acceptance import Judgement
from jobs.draft.replay import Candidate
from jobs.draft.trainer import train
from jobs.draft.weights import VerifierWeights
from jobs.reporting import figures
from jobs.reporting.forecast import forecast
from jobs.reporting.plan import span
from jobs.reporting.stage_times import ZERO
from jobs.reporting.workload import Range
from jobs.run import STAGES
from jobs.stages import generate, initial, judging
from jobs.stages.vocab import draft_vocabulary, token_counts
from jobs.storage.states import StateStore

SAVED = "the rest of the train split, the training and the publication are saved"


@dataclass(frozen=True)
class Best:
    """The best existing way to speculate, by name and mean acceptance length."""

    name: str
    length: float


def decide(context: Context, best: Best | None) -> dict[str, Any]:
    """{verdict: go | no_go, why, forced, trial}."""
    settings = context.settings.gate
    if best is None:
        return _verdict(context, True, "no existing head could be judged")
    if settings.train_if_best_below is not None and best.length >= settings.train_if_best_below:
        why = f"{best.name} already accepts {best.length:.3f} tokens a step, gate.train_if_best_below is {settings.train_if_best_below}; {_saved(context)}"
        return _verdict(context, False, why)
    if settings.min_gain is None:
        return _verdict(context, True, f"{best.name} accepts {best.length:.3f} tokens a step, which leaves room; no trial was asked for")
    gain = trial_gain(context, best)
    enough = gain["mean"] >= settings.min_gain
    why = f"a trial on {settings.trial_fraction:.0%} of the train split gains {gain['mean']:+.3f} ({gain['low']:+.3f} to {gain['high']:+.3f}) over {best.name}, gate.min_gain is {settings.min_gain}"
    return _verdict(context, enough, why if enough else f"{why}; {_saved(context)}") | {"trial": gain}


def _verdict(context: Context, go: bool, why: str) -> dict[str, Any]:
    return {"verdict": "go" if go else "no_go", "why": why, "forced": context.force and not go}


def _saved(context: Context) -> str:
    """What a no-go saves, in hours and money where the plan knows this machine; the answers of a trial it plans apart from the others."""
    after, stages = STAGES[STAGES.index("baseline") + 1 :], (forecast(context.run.ledger) or {"stages": {}})["stages"]
    seconds = sum((Range(stage["low"], stage["high"]) for name, stage in stages.items() if name in after), ZERO)
    if not seconds.high:
        return SAVED
    rental = context.settings.rental
    paid = f", {span(seconds.times(rental.price_per_hour / 3600), figures.money_text)} {rental.currency}" if rental.price_per_hour else ""
    return f"{SAVED}: {span(seconds)}{paid} by the plan"


def trial_gain(context: Context, best: Best) -> dict[str, float]:
    """Paired gain in acceptance length of a head trained for one pass over the first slice of the train split."""
    context.note(f"gate: a trial on the first {context.settings.gate.trial_fraction:.0%} of the train split")
    generate.run_split(context, "train", share=context.settings.gate.trial_fraction)
    judged = _train_and_judge(context)
    judging.keep(context, judged)
    return judging.gain(context, judged, judging.kept(context, best.name))


def _train_and_judge(context: Context) -> Judgement:
    settings, verifier = context.settings, VerifierWeights.read(context.verifier_path)
    store, start = StateStore(context.states("train")), initial.chosen(context)
    if start is None:
        head = initial.scratch(context, verifier, draft_vocabulary(context, "train").draft_ids)
    else:
        head = initial.warm(context, start, verifier, token_counts(context, "train"))
    train(
        settings=settings.train.model_copy(update={"epochs": 1.0, "max_steps": None, "evaluate_every": None}), seed=settings.job.seed, head=head,
        verifier=verifier, store=store, sample_ids=store.ids(), folder=context.path / "trial", warm=start is not None, evaluate=None,
        should_stop=context.should_stop, report=context.display.metrics,
    )  # fmt: skip
    evaluation = StateStore(context.states("eval"))
    head = head.to(judging.replay_device(context))
    return judging.judge_all(context, {"trial": Candidate(head, head.config.taps)}, evaluation)["trial"]
