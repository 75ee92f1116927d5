"""What a run still takes and costs: from the plan where nothing is known better, from the run's own progress where it is."""

import json
import re

import pytest

from jobs.job_file import load
from jobs.reporting.forecast import forecast, told
from jobs.reporting.plan import for_all_machines

SKIPPED = {"state": "skipped"}  # training that is done would have measured something


def job(*overrides):
    return load("hero", overrides=["rental.machine=8 x B300", "rental.price_per_hour=48", *overrides], environment={})


def planned(settings):
    return {plan.machine: plan for plan in for_all_machines(settings)}["8 x B300"]


def ledger(settings, *left: str, **states) -> dict:
    """A run whose stages are all done but for `left`, which are pending, and `states` (a dot in a name is written as _)."""
    stages = {stage.name: {"state": "done", "seconds": 60.0} for stage in planned(settings).stages if stage.name != "engine start"}
    stages |= {name: {"state": "pending"} for name in left} | {name.replace("_", "."): record for name, record in states.items()}
    return {
        "status": "running", "settings": settings.as_dict(), "stages": stages, "machine": {"name": "8 x B300"},
        "cost": {"amount": 200.0, "currency": "USD"}, "verifier_loads": 1, "loads_before": 0,
    }  # fmt: skip


def progress(done: float, total: float, *, since: float = 0.0, seconds: float, now: float | None = None) -> dict:
    return {"done": done, "total": total, "unit": "steps", "from": since, "seconds": seconds, "per_second": now}


def test_what_has_not_begun_is_taken_from_the_plan():
    settings = job()
    plan = planned(settings)
    run = ledger(settings, "push", train={"state": "running", "seconds": 100.0})
    expected = forecast(run)
    left = plan.stage("train").seconds.high - 100 + plan.stage("push").seconds.high
    assert expected["seconds_left"]["high"] == pytest.approx(left) and expected["cost_left"]["high"] == pytest.approx(left / 75)
    assert expected["cost_in_all"]["high"] == pytest.approx(200 + left / 75)
    assert expected["seconds"] == 60.0 * (len(run["stages"]) - 2) + 100, "of all stages"
    assert "cost so far 200.00, in all" in expected["text"] and "by the plan for 8 x B300;" in expected["text"]
    assert expected["line"].startswith("elapsed 0:") and re.search(r" more, cost 200 of [\d,]+ to [\d,]+ USD$", expected["line"])
    assert len(f"  run: {expected['line']}") <= 80, "the width of a terminal"
    assert {name: stage["measured"] for name, stage in expected["stages"].items()} == {"train": False, "push": False}
    assert json.loads(json.dumps(expected)) == expected


def test_in_the_middle_of_training_its_own_progress_counts_and_not_the_plan():
    settings = job()
    steps = progress(3000, 10_000, seconds=3000.0, now=1.25)
    run = ledger(settings, "push", train={"state": "running", "seconds": 3200.0, "progress": steps})
    expected = forecast(run)
    push = planned(settings).stage("push").seconds
    assert expected["stages"]["train"] == {"low": 7000 / 1.25, "high": 7000 / 1.0, "measured": True}, (
        "1 step a second since it began, 1.25 over the last minute"
    )
    assert expected["seconds_left"] == pytest.approx({"low": 5600 + push.low, "high": 7000 + push.high})
    assert expected["cost_in_all"]["low"] == pytest.approx(200 + (5600 + push.low) / 75)
    assert "by the progress of train and by the plan for" in expected["text"]
    # It is ten times as slow as planned, and that is what is said.
    slow = forecast(ledger(settings, train={"state": "running", "seconds": 9e5, "progress": progress(5000, 10_000, seconds=9e5)}))
    assert slow["seconds_left"] == pytest.approx({"low": 9e5, "high": 9e5})


def test_a_few_seconds_of_progress_are_no_measurement():
    settings = job()
    whole = planned(settings).stage("generate.train").seconds
    run = ledger(
        settings, train=SKIPPED, generate_train={"state": "running", "seconds": 12.0, "progress": progress(3, 50_000, seconds=9.0, now=0.3)}
    )
    found = forecast(run)["stages"]["generate.train"]
    assert found == pytest.approx({"low": whole.low - 9, "high": whole.high - 9, "measured": False})
    # A small stage is known by its share.
    run["stages"]["generate.train"]["progress"] = progress(60, 200, seconds=3.0)
    assert forecast(run)["stages"]["generate.train"] == {"low": 7.0, "high": 7.0, "measured": True}


def test_a_continued_stage_counts_from_where_this_start_began():
    settings = job()
    whole = planned(settings).stage("train").seconds
    run = ledger(settings, train={"state": "running", "seconds": 8000.0, "progress": progress(5000, 10_000, since=5000, seconds=0.0)})
    assert forecast(run)["stages"]["train"] == pytest.approx({"low": whole.low / 2, "high": whole.high / 2, "measured": False}), (
        "half of it is left"
    )
    run["stages"]["train"]["progress"] = progress(6000, 10_000, since=5000, seconds=500.0)
    assert forecast(run)["stages"]["train"]["low"] == 4000 / 2, "1,000 steps in 500 s"
    run["stages"]["train"]["progress"] = progress(10_000, 10_000, since=5000, seconds=2500.0)
    assert forecast(run)["seconds_left"]["high"] == 0.0 and "0 s more" in forecast(run)["line"]


def test_the_verifier_is_loaded_once_a_start():
    settings = job()
    start = planned(settings).stage("engine start").seconds
    whole = {name: planned(settings).stage(name).seconds for name in ("generate.eval", "generate.train")}
    both = start.low + sum(seconds.low for seconds in whole.values())
    run = ledger(settings, "generate.train", train=SKIPPED, generate_eval={"state": "pending"}) | {"verifier_loads": 0}
    assert forecast(run)["seconds_left"]["low"] == pytest.approx(both)
    run["stages"]["generate.eval"] = {"state": "running", "seconds": 300.0}  # it is loading
    assert forecast(run)["seconds_left"]["low"] == pytest.approx(both - 300), "the seconds of the load count once, for the load"
    run["verifier_loads"] = 1
    run["stages"]["generate.eval"] = {"state": "running", "seconds": start.low, "progress": progress(0, 200, seconds=0.0)}
    assert forecast(run)["seconds_left"]["low"] == pytest.approx(both - start.low), "it is up"
    # In the middle of the train split: an interrupted run has lost the engine, and so has the next start until it loads it.
    answers = {"state": "running", "seconds": 900.0, "progress": progress(400, 1000, seconds=800.0)}
    run = ledger(settings, train=SKIPPED, generate_train=answers)
    assert forecast(run)["seconds_left"]["low"] == 1200.0
    for stopped in ({"status": "interrupted"}, {"loads_before": 1}):
        assert forecast(run | stopped)["seconds_left"]["low"] == pytest.approx(1200 + start.low), stopped


def test_the_train_split_is_expected_by_what_the_eval_split_measured():
    """Its length of an answer, and its rate as the least: the engine warms up in the small split."""
    settings = job()
    counts = {"prompts": 200, "turns": 200, "tokens": 200_000, "response_tokens": 160_000, "tokens_per_second": 9000.0}
    run = ledger(settings, "generate.train", generate_eval={"state": "done", "seconds": 1000.0, "counts": counts})
    guessed, known = planned(settings).stage("generate.train").seconds, forecast(run)["stages"]["generate.train"]
    assert known["high"] / known["low"] < guessed.high / guessed.low / 2, "the length of an answer was the widest guess"
    counts["tokens_per_second"] = 10.0
    slow = forecast(run)["stages"]["generate.train"]
    assert slow["low"] == pytest.approx(known["low"], rel=0.2) and slow["high"] < 10 * known["high"], "a slow eval split proves nothing"


def test_without_a_price_no_cost_is_invented():
    run = ledger(job("rental.price_per_hour=0"), "push") | {"cost": {"amount": 0.0, "currency": "USD"}}
    expected = forecast(run)
    assert expected["seconds_left"]["high"] > 0
    assert (expected["cost"], expected["cost_left"], expected["cost_in_all"]) == (None, None, None)
    for text in (expected["text"], expected["line"], told(run | {"status": "done"})):
        assert "cost" not in text and "USD" not in text


def test_a_machine_without_a_plan_has_its_time_and_cost_so_far():
    run = ledger(job(), "push") | {"machine": {"name": "a toaster", "gpus": ["Some Card"]}}
    expected = forecast(run)
    assert expected["seconds_left"] is None and expected["cost_in_all"] is None and expected["cost"] == 200.0
    assert "not known" in expected["text"] and expected["line"].endswith(", cost 200 USD") and "more" not in expected["line"]
    run["settings"] = {"another": "version"}
    assert forecast(run | {"machine": {"name": "8 x B300"}})["seconds_left"] is None


def test_a_stage_that_outlasts_its_plan_is_named():
    settings = job()
    run = ledger(settings, fetch={"state": "running", "seconds": 1e6})
    assert forecast(run)["seconds_left"]["high"] == 0.0 and "which fetch has outlasted" in forecast(run)["text"]


def test_a_run_that_is_over_has_no_rest_and_one_sentence():
    run = ledger(job()) | {"status": "done"}
    assert forecast(run) is None and forecast({}) is None and forecast({"stages": 3}) is None
    assert told(run) == f"In all {60 * len(run['stages']) / 60:.1f} min, cost 200.00 USD."
