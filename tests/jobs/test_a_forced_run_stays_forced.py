"""`--force` is recorded where a run is started and stays; asking for it later, or starting without it, changes nothing."""

import copy
import sys
from types import SimpleNamespace

import pytest

from jobs import pipeline
from jobs.context import Context
from jobs.job_file import load
from jobs.reporting.display import Display
from jobs.run import STAGES, RunDirectory

NO_GO = {"verdict": "no_go", "why": "ngram already accepts 3.700 tokens a step", "forced": False}


@pytest.fixture
def started(tmp_path, monkeypatch):
    """started(force=…, only=…) -> (status, ledger) of a start of one run whose baseline said no and whose push does nothing."""
    pushed = []
    push = SimpleNamespace(
        NAME="push", SETTINGS=(), inputs=lambda _: [], outputs=lambda _: [], run=lambda _: pushed.append(1) or {}, ALWAYS=True
    )
    monkeypatch.setattr(pipeline, "PIPELINE", (push,))

    def start(force: bool = False, only: str | None = None) -> tuple[str, dict, int]:
        run = RunDirectory(tmp_path / "run")
        try:
            run.begin(load("smoke", environment={}))
            run.ledger["gate"] = run.ledger["gate"] or dict(NO_GO)
            context = Context(load("smoke", environment={}), run, Display.open("plain", stream=sys.stderr), force=force)
            pushed.clear()
            status = pipeline.run_pipeline(context, only=only)
            return status, copy.deepcopy(run.ledger), len(pushed)
        finally:
            run.close()

    return start


def test_one_stage_of_a_forced_run_is_run(started):
    status, ledger, pushed = started(force=True)
    assert (status, pushed, ledger["gate"]["forced"]) == ("done", 1, True)
    status, ledger, pushed = started(only="push")  # `eagle3-job push RUN`, which has no --force
    assert (status, pushed, ledger["gate"]["forced"], ledger["stages"]["push"]["state"]) == ("done", 1, True, "done")


def test_a_later_start_without_the_flag_goes_on_and_loses_nothing(started):
    assert started(only="push")[0::2] == ("no_go", 0), "nobody forced it yet"
    assert started(force=True)[0::2] == ("done", 1)
    status, ledger, pushed = started()  # another machine, a live measurement asked for afterwards
    assert (status, pushed, ledger["gate"]["forced"], ledger["stages"]["push"]["state"]) == ("done", 1, True, "done")


def test_a_question_changes_no_ledger():
    ledger = {"gate": dict(NO_GO)}
    context = SimpleNamespace(run=SimpleNamespace(ledger=ledger), force=True)
    for stage in STAGES:
        pipeline._stopped_by_gate(context, stage)
    assert ledger == {"gate": NO_GO}
