"""Capture under torch.compile: the taps are outputs of the compiled forward, not of hooks that would not run.

On CPU (inductor, needs a C++ compiler). CUDA graphs and vLLM's own compile cache exist on a GPU only.
"""

import shutil

import pytest
import torch
from captured import TAPS, answer_into, assert_equals_reference, requests
from deepseek_reference import Reference

from jobs.settings import VerifierSettings
from jobs.verifier.engine import VerifierEngine
from jobs.verifier.tiny import CHECKPOINT

SETTINGS = VerifierSettings(dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=64, enforce_eager=False)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on CPU needs g++")
def test_compiled_states_equal_the_reference(tmp_path):
    counters = torch._dynamo.utils.counters
    counters.clear()
    engine = VerifierEngine(CHECKPOINT, SETTINGS, seed=0, capture_taps=TAPS)
    torch.set_num_threads(1)
    try:
        assert engine._llm.llm_engine.vllm_config.compilation_config.backend == "inductor"
        assert counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
        store = answer_into(engine, tmp_path, requests(16))
    finally:
        engine.close()
    assert len(store.ids()) == 16
    assert_equals_reference(store, Reference(CHECKPOINT))
