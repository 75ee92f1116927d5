"""Rows of a run that decodes with speculation: rejected drafts leave no trace, accepted ones are exact.

n-gram drafting (no head needed), greedy, with chunks and preemption as in test_capture_is_exact.py.
Drafts of requests that are preempted in mid-speculation are part of it.
"""

import dataclasses

import pytest
import torch
from captured import TAPS, answer_into, assert_equals_reference, requests
from deepseek_reference import Reference

from jobs.settings import VerifierSettings
from jobs.verifier.engine import VerifierEngine
from jobs.verifier.tiny import CHECKPOINT

SETTINGS = VerifierSettings(dtype="float32", max_model_len=512, max_num_seqs=24, max_num_batched_tokens=96, enforce_eager=True)
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.slow
def test_rows_are_exact_while_drafts_are_accepted_and_rejected(tmp_path):
    engine = VerifierEngine(
        CHECKPOINT, SETTINGS, seed=0, capture_taps=TAPS,
        engine_arguments={"speculative_config": SPECULATION, "disable_log_stats": False, "block_size": 32, "num_gpu_blocks_override": 24},
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        greedy = [dataclasses.replace(request, temperature=0.0) for request in requests(24)]
        store = answer_into(engine, tmp_path, greedy)
        counters = {m.name.removeprefix("vllm:"): getattr(m, "value", 0) for m in engine._llm.get_metrics()}
    finally:
        engine.close()
    drafted, accepted = counters["spec_decode_num_draft_tokens"], counters["spec_decode_num_accepted_tokens"]
    assert accepted > 50 and drafted - accepted > 50, counters
    assert counters["num_preemptions"] > 0
    assert len(store.ids()) == 24
    assert_equals_reference(store, Reference(CHECKPOINT))
    for sample_id in store.ids():
        sample = store.read(sample_id)
        prompt = len(sample.response.prompt_token_ids)
        assert sample.logprob[: prompt - 1].isnan().all() and not sample.logprob[prompt - 1 :].isnan().any()
