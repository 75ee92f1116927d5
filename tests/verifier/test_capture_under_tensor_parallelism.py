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


def children() -> set[psutil.Process]:
    alive = {child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE}
    return {child for child in alive if "resource_tracker" not in " ".join(child.cmdline())}


@pytest.fixture
def engine(monkeypatch):
    """A loaded engine, and the processes it started."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = children()  # servers of other tests may live on in this process
    made = VerifierEngine(CHECKPOINT, SETTINGS, seed=0, capture_taps=TAPS)
    yield made, children() - before
    made.close()
    assert not children() - before, "workers were left behind"


def fault(engine: VerifierEngine, workers: set[psutil.Process], folder, number: int) -> float:
    """Send a signal to one worker in the middle of decoding; seconds until the run ended with TryAgain."""
    engine.open_store(folder, layout_of(engine), StatesSettings(shard_mib=16))
    sent, enough = [], engine.tokens + 100

    def strike() -> None:
        while engine.tokens < enough:
            time.sleep(0.05)
        sent.append(time.monotonic())
        os.kill(min(workers, key=lambda worker: worker.pid).pid, number)

    threading.Thread(target=strike, daemon=True).start()
    with pytest.raises(TryAgain) as failure:
        engine.run(ENDLESS, lambda finished: ())
    assert failure.value.exit_code == 75
    return time.monotonic() - sent[0]


def test_states_are_exact_and_a_killed_worker_is_a_passing_fault(engine, tmp_path):
    engine, workers = engine
    store = answer_into(engine, tmp_path / "states", requests(16))
    assert len(store.ids()) == 16
    assert_equals_reference(store, Reference(CHECKPOINT))
    assert fault(engine, workers, tmp_path / "killed", signal.SIGKILL) < 60


def test_a_hung_worker_is_noticed_by_the_watchdog(engine, tmp_path):
    assert 4 < fault(*engine, tmp_path / "hung", signal.SIGSTOP) < 60
