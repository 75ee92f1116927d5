"""Two tensor-parallel workers on CPU: rank 0 writes exact states, and faults of a worker end the run with 75 and keep what is finished."""

import json
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest
from captured import TOLERANCE, answer_into, assert_equals_reference, requests, whole
from deepseek_reference import Reference, largest_error
from engine_processes import ends_with_75, engine_and_processes, fault

from jobs.settings import VerifierSettings
from jobs.storage.responses import RESPONSES
from jobs.verifier.tiny import CHECKPOINT

pytestmark = pytest.mark.slow

SETTINGS = VerifierSettings(
    dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=64, enforce_eager=True, tensor_parallel_size=2, stall_seconds=8
)  # fmt: skip


@pytest.fixture
def engine(monkeypatch):
    """A loaded engine, and the processes it started."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with engine_and_processes(SETTINGS) as loaded:
        yield loaded


def signalled(workers: set[psutil.Process], number: int) -> Callable[[], None]:
    return lambda: os.kill(min(workers, key=lambda worker: worker.pid).pid, number)


def test_states_are_exact_and_a_killed_worker_costs_only_what_is_in_flight(engine, tmp_path):
    engine, workers = engine
    asked = requests(24)
    store = answer_into(engine, tmp_path / "states", asked)
    assert len(store.ids()) == 24
    assert_equals_reference(store, Reference(CHECKPOINT))

    folder, struck = tmp_path / "killed", []

    def after_a_few(answers: int) -> None:
        if answers == 5:
            struck.append(time.monotonic())
            signalled(workers, signal.SIGKILL)()

    with ends_with_75():
        answer_into(engine, folder, asked, on_commit=after_a_few)
    assert time.monotonic() - struck[0] < 60
    engine.close()
    kept = (folder / RESPONSES).read_text().splitlines()
    ids = {json.loads(line)["id"] for line in kept}
    assert 5 <= len(ids) < 24

    with engine_and_processes(SETTINGS) as (again, _):
        continued = answer_into(again, folder, [request for request in asked if request.id not in ids])
    assert (folder / RESPONSES).read_text().splitlines()[: len(kept)] == kept, "a finished answer was touched"
    assert continued.ids() == store.ids() and continued.verify().problems == []
    for sample_id in store.ids():
        one, other = store.read(sample_id), continued.read(sample_id)
        assert whole(one) == whole(other), sample_id
        assert largest_error(other.taps, one.taps) < TOLERANCE and largest_error(other.final, one.final) < TOLERANCE


def test_a_hung_worker_is_noticed_by_the_watchdog(engine, tmp_path):
    engine, workers = engine
    assert 4 < fault(engine, signalled(workers, signal.SIGSTOP), tmp_path / "hung") < 60
