"""The gate: no-go at the threshold and below the margin, go everywhere else, and what a no-go saves by the plan."""

from types import SimpleNamespace

import pytest

from jobs.job_file import load
from jobs.reporting.figures import seconds_text
from jobs.reporting.plan import for_all_machines
from jobs.run import STAGES
from jobs.settings import GateSettings
from jobs.stages import gate

BEST = gate.Best("ngram", 2.5)


def context(*, force: bool = False, machine: str = "8 x B300", price: float = 48.0, **asked: float) -> SimpleNamespace:
    """A run at its baseline, what comes before it done; `asked`: its [gate], without the job file's own."""
    settings = load("hero", overrides=["rental.machine=8 x B300", f"rental.price_per_hour={price}"], environment={})
    settings = settings.model_copy(update={"gate": GateSettings(**asked)})
    stages = {name: {"state": "done" if STAGES.index(name) < STAGES.index("baseline") else "pending", "seconds": 0.0} for name in STAGES}
    stages["baseline"] = {"state": "running", "seconds": 5.0}
    ledger = {
        "status": "running", "settings": settings.as_dict(), "stages": stages, "machine": {"name": machine},
        "cost": {"amount": 10.0, "currency": "USD"}, "verifier_loads": 1, "loads_before": 0,
    }  # fmt: skip
    return SimpleNamespace(settings=settings, force=force, run=SimpleNamespace(ledger=ledger))


@pytest.fixture
def trial(monkeypatch):
    """The trial's outcome as the test says it, and how often it was asked for: what a trial costs is asked only where it decides."""
    asked = []

    def gains(mean: float) -> list[gate.Best]:
        def trial_gain(_, best: gate.Best) -> dict[str, float]:
            asked.append(best)
            return {"mean": mean, "low": mean - 0.05, "high": mean + 0.05}

        monkeypatch.setattr(gate, "trial_gain", trial_gain)
        return asked

    return gains


@pytest.mark.parametrize(("gained", "verdict"), [(0.25, "go"), (0.375, "go"), (0.2499, "no_go"), (-0.5, "no_go")])
def test_a_trial_that_gains_the_margin_is_a_go_and_one_that_does_not_is_none(trial, gained, verdict):
    asked = trial(gained)
    found = gate.decide(context(min_gain=0.25), BEST)
    assert (found["verdict"], found["forced"], found["trial"]["mean"]) == (verdict, False, gained)
    assert asked == [BEST]
    assert f"a trial on 5% of the train split gains {gained:+.3f} ({gained - 0.05:+.3f} to {gained + 0.05:+.3f}) over ngram" in found["why"]
    assert (gate.SAVED in found["why"]) == (verdict == "no_go"), "a go saves nothing"


@pytest.mark.parametrize(("threshold", "verdict"), [(2.51, "go"), (2.5, "no_go"), (2.0, "no_go")])
def test_a_best_head_under_the_threshold_is_a_go_without_a_trial(trial, threshold, verdict):
    asked = trial(9.0)
    found = gate.decide(context(train_if_best_below=threshold), BEST)
    assert found["verdict"] == verdict and "trial" not in found and asked == []
    assert "ngram" in found["why"] and "2.500 tokens a step" in found["why"]
    assert (f"gate.train_if_best_below is {threshold}" in found["why"]) == (verdict == "no_go") == (gate.SAVED in found["why"])


def test_with_both_questions_the_threshold_is_asked_first_and_the_trial_decides_under_it(trial):
    asked = trial(0.3)
    assert gate.decide(context(min_gain=0.25, train_if_best_below=2.4), BEST)["verdict"] == "no_go" and asked == [], "no trial is paid for"
    assert gate.decide(context(min_gain=0.25, train_if_best_below=2.6), BEST)["verdict"] == "go"
    trial(0.2)
    assert gate.decide(context(min_gain=0.25, train_if_best_below=2.6), BEST)["verdict"] == "no_go" and len(asked) == 2


def test_no_question_and_nothing_to_compare_with_are_a_go(trial):
    asked = trial(-1.0)
    assert gate.decide(context(), BEST)["verdict"] == "go"
    assert gate.decide(context(min_gain=0.25, train_if_best_below=2.0), None)["verdict"] == "go"
    assert asked == []


def test_force_is_recorded_for_a_no_go_only(trial):
    trial(0.0)
    assert gate.decide(context(min_gain=0.25, force=True), BEST) | {"why": "", "trial": None} == {
        "verdict": "no_go", "why": "", "forced": True, "trial": None,
    }  # fmt: skip
    assert gate.decide(context(min_gain=0.0, force=True), BEST)["forced"] is False


def expected(run: SimpleNamespace) -> tuple[float, float]:
    """Hours that the plan has for the stages behind the gate: low and high."""
    plan = {plan.machine: plan for plan in for_all_machines(run.settings)}["8 x B300"]
    after = [stage.seconds for stage in plan.stages if stage.name in STAGES[STAGES.index("baseline") + 1 :]]
    return sum(seconds.low for seconds in after) / 3600, sum(seconds.high for seconds in after) / 3600


def test_a_no_go_says_the_hours_and_the_money_of_the_stages_that_are_left(trial):
    run = context(train_if_best_below=2.0)
    low, high = expected(run)
    saved = f"are saved: {seconds_text(3600 * low)} to {seconds_text(3600 * high)}, {48 * low:,.2f} to {48 * high:,.2f} USD by the plan"
    assert gate.decide(run, BEST)["why"].endswith(saved)
    # After a trial on half of the train split only the other half is still to be answered.
    trial(0.0)
    tried = context(min_gain=1.0, trial_fraction=0.5)
    (less, most), why = expected(tried), gate.decide(tried, BEST)["why"]
    assert most < 0.7 * high and why.endswith(f"{48 * less:,.2f} to {48 * most:,.2f} USD by the plan")


def test_where_nothing_is_planned_the_sentence_ends_with_what_is_saved(trial):
    elsewhere = context(train_if_best_below=2.0, machine="a machine of another table")
    assert gate.decide(elsewhere, BEST)["why"].endswith(gate.SAVED)
    unpriced = context(train_if_best_below=2.0, price=0.0)
    assert "are saved: " in (why := gate.decide(unpriced, BEST)["why"]) and why.endswith("by the plan") and "USD" not in why
