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
from jobs.rental import RentalClock, last_written
from jobs.run import RunDirectory
from jobs.settings import load

STAGE = """
import sys, time
from pathlib import Path
from jobs import run
from jobs.settings import load

run.METER_SECONDS = 0.05
directory = run.RunDirectory(Path(sys.argv[1]))
directory.begin(load("smoke", overrides=["rental.price_per_hour=3600"], environment={}))
directory.stage("generate.train")["state"] = "running"
directory.save()
with directory.metered("generate.train", 3600.0):
    print("running", flush=True)
    while True:  # the ledger in memory changes all the time, as a stage may change it
        directory.ledger[f"key {time.monotonic()}"] = {}
        time.sleep(0.001)
"""


def killed_after(folder, seconds: float) -> None:
    process = subprocess.Popen([sys.executable, "-c", STAGE, str(folder)], stdout=subprocess.PIPE, text=True)
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
    rental = load("smoke", overrides=["rental.price_per_hour=3600", f"rental.spending_limit={second / 2}", "rental.reserve_minutes=0"], environment={}).rental
    with pytest.raises(MustFix, match="The run has cost"):
        RentalClock(rental, RunDirectory(folder, read_only=True).ledger["cost"]["amount"]).require_time()


def test_the_meter_is_no_progress(tmp_path):
    folder = tmp_path / "run"
    killed_after(folder, 0.2)
    events = folder / "events.jsonl"
    events.write_text("")
    os.utime(events, (1000, 1000))
    assert last_written(folder) == 1000
