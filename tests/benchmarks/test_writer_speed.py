"""Decoding is written nearly as fast as a prefill, though each of its steps has one row of many samples."""

import os
from pathlib import Path

import pytest
from writer_speed import main, parser, scheduling

from jobs.storage.states import StateWriter


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A folder in memory where there is one, so that the disk is not what is measured."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else tmp_path


@pytest.mark.slow
def test_one_row_of_many_samples_a_step_costs_little_more_than_long_runs(memory):
    found = main(parser().parse_args([str(memory), "--gib", "0.4", "--samples", "256", "--rounds", "4"]))
    print(found)
    # In processor seconds, since the machine may be shared, and of the best round but the first: a virtual machine's memory is
    # slow when touched anew. Wall times and quiet machines' figures stand in NOTES.md.
    spent = {kind: min(sum(measured["cpu_s"].values()) for measured in found[kind][1:]) for kind in ("decode", "prefill")}
    assert spent["decode"] < 3 * spent["prefill"], spent


@pytest.mark.slow
def test_a_decoding_step_is_taken_in_by_a_few_array_operations(tmp_path, monkeypatch):
    """What the thread that takes rows in costs the interpreter, against the same rows taken in one by one; rows so small that copying them costs nothing."""
    given = parser().parse_args([str(tmp_path), "--gib", "0.05", "--samples", "1024", "--hidden", "32", "--rounds", "2"])
    together = main(given)["decode"][-1]["cpu_s"]["state-writer"]
    monkeypatch.setattr(StateWriter, "_continue", lambda self, runs: range(len(runs.samples)))
    one_by_one = main(given)["decode"][-1]["cpu_s"]["state-writer"]
    print({"together": together, "one by one": one_by_one})
    assert one_by_one > 2.5 * together


@pytest.mark.slow
def test_joined_steps_hold_up_the_thread_that_schedules_less(memory):
    found = scheduling(memory, joined=(0, 1, 12), rounds=15)  # of a fifth of a second each: 5 were over before a neighbour was
    print(found)
    assert found[12] < found[1], found
