"""A run with everything that is measured on request: standard sets, live speed, a scaling table.

Its live server is given a second to start, so it cannot: the head is published all the same, exit code 75, and
the next start without the live measurement repeats nothing and ends with 0.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_smoke import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, result of the start whose server fails, result of the next one)."""
    base = tmp_path_factory.mktemp("measured")
    questions = base / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": f"How many are {i} and {i + 3} apples together?"}) + "\n" for i in range(6)))
    asked = [
        "evaluate.live={concurrencies=[1], requests=4, start_seconds=1}", "evaluate.scaling=[0.5]",
        f'prompts.standard=[{{name="gsm8k", source="{questions}"}}]', "rental.price_per_hour=3.6",
    ]  # fmt: skip
    folder = base / "run"
    first = run(folder, *asked)
    second = run(folder, "evaluate.live.concurrencies=[]", "train.log_every=3")  # which decides nothing
    return folder, first, second


def test_the_rest_goes_on_and_the_exit_code_says_run_it_again(runs):
    folder, first, _ = runs
    assert first["exit_code"] == 75 and first["status"] == "failed"
    assert "0 of 2 live measurements were made: The live server did not answer within 1 s" in first["error"]["message"]
    states = {name: stage["state"] for name, stage in first["stages"].items()}
    assert states.pop("live") == "failed" and set(states.values()) == {"done"}
    assert (Path(first["published"].removeprefix("file://")) / "manifest.json").exists()


def test_the_next_start_does_without_it_and_repeats_nothing(runs):
    folder, first, second = runs
    assert (second["exit_code"], second["status"], second["error"]) == (0, "done", None)
    assert second["verifier_loads"] == 0
    ended = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    again = [event["stage"] for event in ended if event["kind"] == "stage started"]
    assert again.count("train") == again.count("evaluate") == again.count("scaling") == again.count("generate.eval") == 1


def test_the_standard_set_was_answered_judged_apart_and_published(runs):
    folder, first, _ = runs
    assert first["stages"]["prompts"]["counts"]["standard"] == 6
    figure = json.loads((folder / "evaluation.json").read_text())["heads"]["trained"]
    assert (
        figure["samples"]
        == first["stages"]["evaluate"]["counts"]["sequences"]
        < len((folder / "states/eval/responses.jsonl").read_text().splitlines())
    )
    length = figure["standard"]["gsm8k"]["acceptance_length"]
    assert length["low"] <= length["mean"] <= length["high"]
    published = json.loads((folder / "head" / "manifest.json").read_text())["figures"]["heads"]["trained"]
    assert published["standard"]["gsm8k"]["acceptance_length"] == length
    assert f"{length['mean']:.3f} ({length['low']:.3f} to {length['high']:.3f}), 6 prompts" in (folder / "head" / "README.md").read_text()


def test_the_scaling_table_stands_in_the_ledger_and_the_plan_reads_it(runs):
    folder, first, _ = runs
    half, whole = json.loads((folder / "scaling.json").read_text())["rows"]
    assert (half["share"], whole["share"]) == (0.5, 1.0) and half["samples"] < whole["samples"] and half["steps"] < whole["steps"]
    assert whole["acceptance_length"] == json.loads((folder / "evaluation.json").read_text())["heads"]["trained"]["acceptance_length"]
    assert half["whole_gains"]["mean"] == pytest.approx(whole["acceptance_length"]["mean"] - half["acceptance_length"]["mean"])
    done = subprocess.run(
        [sys.executable, "-m", "entrypoints.cli", "plan", "smoke", "--calibrate", str(folder), "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["plans"][0]["assumptions"]
    assert any("scaling table of the run" in line and "a doubling of the samples brought" in line for line in said), said


def test_the_report_tells_all_of_it(runs):
    folder, *_ = runs
    page = (folder / "report.html").read_text()
    for needed in (
        "Standard prompts",
        "What less data would have given",
        "scaling.json#/rows/0/samples",
        "standard/gsm8k/acceptance_length/mean",
        "stages/generate.eval/cost",
    ):
        assert needed in page, needed
