"""Two tensor-parallel workers on CPU: rank 0 writes exact states, and faults of a worker end the run with 75."""

import os
import signal
import threading
import time

import psutil
import pytest
from captured import TAPS, answer_into, assert_equals_reference, layout_of, requests
from deepseek_reference import Reference

from jobs.errors import TryAgain
from jobs.settings import StatesSettings, VerifierSettings
from jobs.verifier.engine import Request, VerifierEngine
from jobs.verifier.tiny import CHECKPOINT

pytestmark = pytest.mark.slow

SETTINGS = VerifierSettings(
    dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=64, enforce_eager=True, tensor_parallel_size=2, stall_seconds=8
)  # fmt: skip
ENDLESS = [Request(f"e{i}#0", [7, 8, 9], max_tokens=500, ignore_eos=True) for i in range(8)]


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = set(workers())
    made = VerifierEngine(CHECKPOINT, SETTINGS, seed=0, capture_taps=TAPS)
    yield made
    made.close()
    assert not [worker for worker in workers() if worker not in before and "resource_tracker" not in " ".join(worker.cmdline())], "workers were left behind"


def fault(engine: VerifierEngine, folder, number: int) -> float:
    """Send a signal to one worker in the middle of decoding; seconds until the run ended with TryAgain."""
    engine.open_store(folder, layout_of(engine), StatesSettings(shard_mib=16))
    sent = []

    def strike() -> None:
        while engine.tokens < 100:
            time.sleep(0.05)
        victim = next(worker for worker in workers() if "resource_tracker" not in " ".join(worker.cmdline()))
        sent.append(time.monotonic())
        os.kill(victim.pid, number)

    threading.Thread(target=strike, daemon=True).start()
    with pytest.raises(TryAgain) as failure:
        engine.run(ENDLESS, lambda finished: ())
    assert failure.value.exit_code == 75
    return time.monotonic() - sent[0]


def test_states_are_exact_and_a_killed_worker_is_a_passing_fault(engine, tmp_path):
    store = answer_into(engine, tmp_path / "states", requests(16))
    assert len(store.ids()) == 16
    assert_equals_reference(store, Reference(CHECKPOINT))
    assert fault(engine, tmp_path / "killed", signal.SIGKILL) < 60


def test_a_hung_worker_is_noticed_by_the_watchdog(engine, tmp_path):
    assert 4 < fault(engine, tmp_path / "hung", signal.SIGSTOP) < 60
