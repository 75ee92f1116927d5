"""The states in the store are those an independent implementation computes, whatever the scheduler did.

One engine, made to suffer: prompts in chunks of 64 tokens, a KV cache so small that requests are
preempted, shared prefixes, 48 sequences of 3 to 330 tokens. The reference is transformers'
DeepSeek-V3 in fp32 with hooks (deepseek_reference.py).
"""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from captured import TAPS, TOLERANCE, answer_into, assert_equals_reference, layout_of, logprobs_of, requests, whole
from deepseek_reference import Reference, largest_error

from jobs.settings import StatesSettings, VerifierSettings
from jobs.storage.states import StateStore
from jobs.verifier.engine import Finished, Request, VerifierEngine
from jobs.verifier.tiny import CHECKPOINT

SETTINGS = VerifierSettings(dtype="float32", max_model_len=512, max_num_seqs=48, max_num_batched_tokens=64, enforce_eager=True)


@pytest.fixture(scope="module")
def engine():
    # 24 blocks of 32 tokens for 48 sequences of up to 330: most are preempted at least once.
    made = VerifierEngine(
        CHECKPOINT, SETTINGS, seed=0, capture_taps=TAPS, engine_arguments={"block_size": 32, "num_gpu_blocks_override": 24}
    )
    torch.set_num_threads(1)  # vLLM takes one a core; a tiny model only waits for them
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(CHECKPOINT)


@pytest.fixture(scope="module")
def preemptions(engine) -> Counter:
    """Counts vLLM's own preemptions by request, from here on."""
    counted: Counter = Counter()
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def counting(request, *args, **kwargs):
        counted[request.request_id] += 1
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counting
    return counted


@pytest.fixture(scope="module")
def store(engine, preemptions, tmp_path_factory) -> StateStore:
    made = answer_into(engine, tmp_path_factory.mktemp("states"), requests())
    assert len(preemptions) >= 5, "the KV cache was not small enough to preempt anything"
    return made


def test_every_row_equals_the_reference(store, reference):
    assert len(store.ids()) == 48
    assert_equals_reference(store, reference)


def test_taps_one_layer_off_are_noticed(store, reference):
    """The comparison above can fail: the neighbouring layer's states are far outside its tolerance."""
    sample = store.read(store.ids()[0])
    for shift in (-1, 1):
        wrong, _ = reference.states(whole(sample)[:-1], tuple(tap + shift for tap in TAPS))
        for k in range(len(TAPS)):
            assert largest_error(sample.taps[:, k], wrong[:, k]) > 100 * TOLERANCE


def test_prompt_rows_have_no_logprob_while_decoding(store):
    for sample_id in store.ids():
        sample = store.read(sample_id)
        assert sample.logprob[: len(sample.response.prompt_token_ids) - 1].isnan().all()


def test_answers_do_not_depend_on_the_order_of_arrival(engine, store, tmp_path):
    shuffled = requests()
    random.Random(2).shuffle(shuffled)
    again = answer_into(engine, tmp_path, shuffled)
    assert again.ids() == store.ids()
    for sample_id in store.ids():
        assert again.response(sample_id) == store.response(sample_id)
        a, b = again.read(sample_id), store.read(sample_id)
        assert largest_error(a.taps, b.taps) < TOLERANCE and largest_error(a.final, b.final) < TOLERANCE


def test_prefill_of_the_same_answers_gives_the_same_states(engine, store, reference, tmp_path):
    existing = [
        Request(i, store.response(i).prompt_token_ids, response_token_ids=store.response(i).response_token_ids) for i in store.ids()
    ]
    prefilled = answer_into(engine, tmp_path, existing, taps=(2, 5, 7))
    assert prefilled.ids() == store.ids()
    for sample_id in store.ids():
        a, b = prefilled.read(sample_id), store.read(sample_id, taps=(2, 5, 7))
        assert whole(a) == whole(b)
        assert largest_error(a.taps, b.taps) < TOLERANCE and largest_error(a.final, b.final) < TOLERANCE
        torch.testing.assert_close(a.logprob, logprobs_of(a, reference), rtol=0, atol=1e-3)  # known on every row, prompt rows too


def test_a_lost_row_drops_the_sample_and_names_it(engine, tmp_path, monkeypatch):
    """A row taken away on its way to the writer is noticed at the end of the sample; the others are kept."""
    capture = engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker._capture
    spans = type(capture)._spans

    def without_position_seven(self, scheduler_output):
        found = spans(self, scheduler_output)
        lost = (np.array(found.samples) == "s01#0") & (found.position <= 7) & (found.position + found.rows > 7)
        return found.only(~lost)

    monkeypatch.setattr(type(capture), "_spans", without_position_seven)
    engine.open_store(tmp_path, layout_of(engine), StatesSettings(shard_mib=16))
    finished: dict[str, Finished] = {}
    wanted = [Request(r.id, [5] * 20, max_tokens=4, ignore_eos=True) for r in requests(3)]
    engine.run(wanted, lambda f: finished.update({f.request.id: f}) or ())
    engine.close_store()
    assert set(finished) == {"s00#0", "s01#0", "s02#0"}
    assert finished["s00#0"].dropped is None and finished["s02#0"].dropped is None
    assert "s01#0" in finished["s01#0"].dropped and "position" in finished["s01#0"].dropped


def test_misattributed_rows_are_caught_while_they_are_written(engine, tmp_path, monkeypatch):
    """Rows complete, but those of the neighbour in the batch: only the log-probability tells, and it tells in the run."""
    capture = engine._llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker._capture
    read = type(capture)._read

    def shifted(self, state, output):
        step = read(self, state, output)
        if step is not None and len(step.rows["final"]) == 3:  # all three decode
            step.rows["final"] = step.rows["final"].roll(1, 0)
        return step

    monkeypatch.setattr(type(capture), "_read", shifted)
    engine.open_store(tmp_path, layout_of(engine), StatesSettings(shard_mib=16, check_one_in=1))
    finished: dict[str, Finished] = {}
    wanted = [Request(r.id, [5 + k] * 20, max_tokens=4 + k, ignore_eos=True) for k, r in enumerate(requests(3))]
    engine.run(wanted, lambda f: finished.update({f.request.id: f}) or ())
    engine.close_store()
    assert set(finished) == {"s00#0", "s01#0", "s02#0"}
    for sample, end in finished.items():
        assert sample in end.dropped and "log-probability" in end.dropped


def test_an_answer_that_loops_ends_where_the_loop_is_complete(engine, tmp_path, monkeypatch):
    """Greedy answers of the tiny verifier go round in circles. Looked at in time or only at the end, the cut is the same."""
    prompts = [[42] * 5, [44, 32, 695] * 3, [44, 32, 695] * 4, [40] * 5]
    wanted = [Request(f"loop{k}#0", prompt, max_tokens=100, ignore_eos=True, loop_window=24) for k, prompt in enumerate(prompts)]
    monkeypatch.setattr("jobs.verifier.engine.LOOP_EVERY", 0.0)
    decoded = engine.tokens
    stopped = answer_into(engine, tmp_path / "stopped", wanted)
    decoded = engine.tokens - decoded
    monkeypatch.setattr("jobs.verifier.engine.LOOP_EVERY", 1e9)
    whole_answers = answer_into(engine, tmp_path / "whole", wanted)
    answers = [stopped.response(i) for i in stopped.ids()]
    assert answers == [whole_answers.response(i) for i in whole_answers.ids()]
    looped = [a for a in answers if a.finish_reason == "repetition"]
    assert len(looped) >= 2 and all(24 <= len(a.response_token_ids) < 100 for a in looped)
    assert decoded < sum(len(a.response_token_ids) for a in answers) + 8 * len(answers)  # they were really stopped


def test_a_fault_of_the_caller_is_not_blamed_on_the_engine(engine):
    """A bug must not look like a passing fault (75, "run it again"), and the engine serves on after it."""

    def broken(finished: Finished) -> tuple:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        engine.run([Request(f"b{i}#0", [5] * 20, max_tokens=4, ignore_eos=True) for i in range(4)], broken)
    answers: list[Finished] = []
    engine.run([Request(f"c{i}#0", [5] * 20, max_tokens=4, ignore_eos=True) for i in range(4)], lambda f: answers.append(f) or ())
    assert sorted(f.request.id for f in answers) == ["c0#0", "c1#0", "c2#0", "c3#0"]
