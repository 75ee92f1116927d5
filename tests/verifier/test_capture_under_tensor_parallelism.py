"""Two tensor-parallel workers on CPU: rank 0 writes exact states, and faults of a worker end the run with 75."""

import os
import signal
from collections.abc import Callable

import psutil
import pytest
from captured import answer_into, assert_equals_reference, requests
from deepseek_reference import Reference
from engine_processes import engine_and_processes, fault

from jobs.settings import VerifierSettings
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


def test_states_are_exact_and_a_killed_worker_is_a_passing_fault(engine, tmp_path):
    engine, workers = engine
    store = answer_into(engine, tmp_path / "states", requests(16))
    assert len(store.ids()) == 16
    assert_equals_reference(store, Reference(CHECKPOINT))
    assert fault(engine, signalled(workers, signal.SIGKILL), tmp_path / "killed") < 60


def test_a_hung_worker_is_noticed_by_the_watchdog(engine, tmp_path):
    engine, workers = engine
    assert 4 < fault(engine, signalled(workers, signal.SIGSTOP), tmp_path / "hung") < 60
