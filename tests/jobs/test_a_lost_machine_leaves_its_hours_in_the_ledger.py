"""The seconds and the cost of a stage stand in the ledger while it runs, so a machine that is gone has been paid for.

A real process is killed in the middle of a stage; what `status` tells and what the spending limit counts come from what it left.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jobs.errors import MustFix
from jobs.job_file import load
from jobs.rental import RentalClock, last_written
from jobs.reporting.forecast import forecast
from jobs.run import RunDirectory

STAGE = """
import sys, time
from pathlib import Path
from jobs import run
from jobs.reporting.display import Display
from jobs.reporting.forecast import forecast
from jobs.job_file import load

run.METER_SECONDS = 0.05
directory = run.RunDirectory(Path(sys.argv[1]))
directory.begin(load("smoke", overrides=["rental.price_per_hour=3600"], environment={}))
directory.stage("generate.train")["state"] = "running"
directory.save()
display = Display.open("plain", outlook=lambda: forecast(directory.counted())["line"])
display.stage_started("generate.train")
done = int(sys.argv[2])
with directory.metered("generate.train", 3600.0, display.measured):
    print("running", flush=True)
    while True:  # the ledger in memory changes all the time, as a stage may change it
        directory.ledger[f"key {time.monotonic()}"] = {}
        display.progress(done, 10_000, "answers")
        done += 1
        time.sleep(0.001)
"""


def killed_after(folder, seconds: float, begin: int = 0) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STAGE, str(folder), str(begin)], stdout=subprocess.PIPE, stderr=(folder.parent / "log").open("a"), text=True
    )
    assert process.stdout.readline() == "running\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()


def ledger_of(folder) -> dict:
    return json.loads((folder / "run.json").read_text())


def test_a_killed_stage_has_been_paid_for(tmp_path):
    folder = tmp_path / "run"
    killed_after(folder, 1.0)
    ledger = ledger_of(folder)
    first = ledger["stages"]["generate.train"]["seconds"]
    assert ledger["stages"]["generate.train"]["state"] == "running" and first > 0.5
    # 3600 an hour are 1 a second.
    assert ledger["cost"]["amount"] == pytest.approx(first, abs=0.01) == ledger["stages"]["generate.train"]["cost"]
    assert not any(key.startswith("key ") for key in ledger), "only what the meter counts is written for the stage"

    killed_after(folder, 1.0)
    second = ledger_of(folder)["stages"]["generate.train"]["seconds"]
    assert second > first + 0.5, "another start goes on from there"
    rental = load(
        "smoke", overrides=["rental.price_per_hour=3600", f"rental.spending_limit={second / 2}", "rental.reserve_minutes=0"], environment={}
    ).rental
    with pytest.raises(MustFix, match="The run has cost"):
        RentalClock(rental, RunDirectory(folder, read_only=True).ledger["cost"]["amount"]).require_time()


def test_how_far_a_killed_stage_was_is_in_the_ledger_and_its_rest_is_known_by_it(tmp_path):
    folder = tmp_path / "run"
    killed_after(folder, 2.0, begin=5000)
    ledger = ledger_of(folder)
    ledger["stages"] |= {name: {"state": "done", "seconds": 1.0} for name in ledger["stages"] if name != "generate.train"}
    ledger["loads_before"], ledger["verifier_loads"] = 0, 1
    measured = ledger["stages"]["generate.train"]["progress"]
    assert 5500 < measured["done"] < 10_000 and (measured["total"], measured["unit"], measured["from"]) == (10_000, "answers", 5000)
    left = forecast(ledger)["stages"]["generate.train"]
    rate = (measured["done"] - 5000) / measured["seconds"]
    assert (
        left["measured"]
        and left["low"] <= (10_000 - measured["done"]) / rate * 1.001
        and left["high"] >= (10_000 - measured["done"]) / rate * 0.999
    )
    # Of the next start nothing is known at first: then what the last one left stands, and the display shows it.
    killed_after(folder, 0.3, begin=9990)
    lines = (tmp_path / "log").read_text().splitlines()
    assert "generate.train: started; run: elapsed 0:00:0" in lines[0] and " more, cost " in lines[0]
    assert ledger_of(folder)["stages"]["generate.train"]["progress"]["from"] == 9990


def test_a_stage_that_was_finished_and_is_done_anew_begins_at_nothing(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.begin(load("smoke", environment={}))
    for progress, kept in (({"done": 7, "total": 9}, {"done": 7, "total": 9}), ({"done": 9, "total": 9}, None)):
        run.stage("baseline")["progress"] = progress
        with run.metered("baseline", 0.0):
            assert run.counted()["stages"]["baseline"]["progress"] == kept
    run.close()


def test_the_meter_is_no_progress(tmp_path):
    folder = tmp_path / "run"
    killed_after(folder, 0.2)
    events = folder / "events.jsonl"
    events.write_text("")
    os.utime(events, (1000, 1000))
    assert last_written(folder) == 1000
