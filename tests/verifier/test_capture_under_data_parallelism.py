"""Two data-parallel replicas on CPU, their experts split over both: each writes its own requests, exactly, 1,100 of them at once."""

import os
import signal
from collections import Counter

import pytest
from captured import TOLERANCE, answer_into, assert_equals_reference, layout_of, whole
from deepseek_reference import Reference, largest_error
from engine_processes import ENDLESS, engine_and_processes, fault

from jobs.settings import StatesSettings, VerifierSettings
from jobs.storage.extents import read_index
from jobs.verifier.engine import Request
from jobs.verifier.tiny import CHECKPOINT

pytestmark = pytest.mark.slow

AT_ONCE = 1100
SETTINGS = VerifierSettings(
    dtype="float32", max_model_len=512, max_num_seqs=AT_ONCE, max_num_batched_tokens=2 * AT_ONCE, enforce_eager=True, tensor_parallel_size=2, parallel="dp",
    stall_seconds=600,
)  # fmt: skip


@pytest.fixture
def engine(monkeypatch):
    """A loaded engine, and the processes it started."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # else each process compiles vLLM's sampler
    with engine_and_processes(SETTINGS) as loaded:
        yield loaded


def many() -> list[Request]:
    """Prompts of 2 to 40 tokens, answers of 12 to 24: all are decoded together before the first one ends."""
    made = []
    for i in range(AT_ONCE):
        prompt = [(31 * i + 7 * k) % 1500 for k in range(2 + (i * i) % 39)]
        made.append(Request(f"m{i:04d}#0", prompt, max_tokens=12 + i % 13, temperature=1.0, top_p=0.95, seed=i, ignore_eos=True))
    return made


def test_each_replica_writes_its_own_requests_and_a_killed_one_is_a_passing_fault(engine, tmp_path):
    engine, processes = engine
    most = 0

    def decoded_at_once() -> bool:
        nonlocal most
        states = list(engine._core.process.request_states.values())
        most = max(most, sum(bool(state.detokenizer.output_token_ids) for state in states))
        return False

    folder = tmp_path / "states"
    store = answer_into(engine, folder, many(), should_stop=decoded_at_once)
    assert len(store.ids()) == AT_ONCE and most >= 1024
    assert engine.tokens == sum(len(store.response(i).response_token_ids) for i in store.ids())
    assert store.verify().problems == []
    assert_equals_reference(store, Reference(CHECKPOINT), every=25)
    written = Counter(sample[1] for sample in {(e.sample, e.shard % 2) for e in read_index(folder / "index.jsonl")})
    assert written == {0: AT_ONCE // 2, 1: AT_ONCE // 2}, "each replica writes the states of the requests it answers, all of them"

    existing = [
        Request(i, store.response(i).prompt_token_ids, response_token_ids=store.response(i).response_token_ids) for i in store.ids()[::25]
    ]
    prefilled = answer_into(engine, tmp_path / "prefilled", existing)
    for sample_id in prefilled.ids():
        a, b = prefilled.read(sample_id), store.read(sample_id)
        assert whole(a) == whole(b)
        assert largest_error(a.taps, b.taps) < TOLERANCE and largest_error(a.final, b.final) < TOLERANCE

    # What is discarded while it is decoded is stopped; the other replica's requests do not mind.
    engine.open_store(tmp_path / "discarded", layout_of(engine), StatesSettings(shard_mib=16))
    ended: list[str] = []

    def one_is_enough(finished) -> tuple:
        ended.append(finished.request.id)
        engine.discard([request.id for request in ENDLESS])
        return ()

    engine.run([*ENDLESS, Request("short#0", [5] * 20, max_tokens=4, ignore_eos=True)], one_is_enough)
    engine.close_store()
    assert ended == ["short#0"]

    replica = max((p for p in processes if p.ppid() == os.getpid()), key=lambda p: p.cpu_times().user)
    assert fault(engine, lambda: os.kill(replica.pid, signal.SIGKILL), tmp_path / "killed") < 120


def test_a_hung_replica_is_noticed_by_the_watchdog(engine, tmp_path):
    engine, processes = engine
    engine.settings = engine.settings.model_copy(update={"stall_seconds": 15})
    answer_into(engine, tmp_path / "before", [Request(f"b{i}#0", [5] * 20, max_tokens=4, ignore_eos=True) for i in range(4)])
    replica = max((p for p in processes if p.ppid() == os.getpid()), key=lambda p: p.cpu_times().user)
    assert 5 < fault(engine, lambda: os.kill(replica.pid, signal.SIGSTOP), tmp_path / "hung") < 120
