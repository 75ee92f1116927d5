"""Hundreds of requests of very unequal length in one batch: each has its own rows, and decoding gives those that prefill gives.

A batch of 48 (test_capture_is_exact.py) has all its requests in a few kilobytes of bookkeeping; what goes wrong with
places, chunks or joined steps only where hundreds come and go beside each other would not be seen there.
"""

import dataclasses

import pytest
import torch
from captured import TAPS, TOLERANCE, answer_into, assert_equals_reference, requests, whole
from deepseek_reference import Reference, largest_error

from jobs.settings import VerifierSettings
from jobs.verifier.engine import Request, VerifierEngine
from jobs.verifier.tiny import CHECKPOINT

pytestmark = pytest.mark.slow

ASKED = 400
SETTINGS = VerifierSettings(dtype="float32", max_model_len=512, max_num_seqs=ASKED, max_num_batched_tokens=2048, enforce_eager=True)


@pytest.fixture
def engine(monkeypatch):
    # The core in a process of its own: a gigabyte of rows and cache that the tests' process would keep.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = VerifierEngine(CHECKPOINT, SETTINGS, seed=0, capture_taps=TAPS)
    torch.set_num_threads(1)  # vLLM takes one a core; a tiny model only waits for them
    yield made
    made.close()


def test_prefill_equals_decoding_and_both_the_reference(engine, tmp_path):
    most = 0

    def decoded_at_once() -> bool:
        nonlocal most
        states = engine._core.process.request_states.values()
        most = max(most, sum(bool(state.detokenizer.output_token_ids) for state in states))
        return False

    # Answers of 20 tokens at least, else the first have ended before the last prompt is computed.
    asked = [dataclasses.replace(request, max_tokens=max(request.max_tokens, 20)) for request in requests(ASKED)]
    decoded = answer_into(engine, tmp_path / "decoded", asked, should_stop=decoded_at_once)
    assert most >= 300, "they were to be decoded together"
    lengths = decoded.lengths().values()
    assert len(lengths) == ASKED and min(lengths) < 10 and max(lengths) > 300

    answers = [decoded.response(sample_id) for sample_id in decoded.ids()]
    existing = [Request(answer.id, answer.prompt_token_ids, response_token_ids=answer.response_token_ids) for answer in answers]
    prefilled = answer_into(engine, tmp_path / "prefilled", existing)
    assert prefilled.ids() == decoded.ids()
    for sample_id in decoded.ids():
        a, b = prefilled.read(sample_id), decoded.read(sample_id)
        assert whole(a) == whole(b), sample_id
        assert largest_error(a.taps, b.taps) < TOLERANCE and largest_error(a.final, b.final) < TOLERANCE, sample_id
    assert_equals_reference(decoded, Reference(CHECKPOINT), every=15)
