"""The cache of an engine in this very process goes when it is closed: training needs the memory, and so does the next engine."""

import gc

import psutil
import pytest

from jobs.settings import VerifierSettings
from jobs.verifier.engine import VerifierEngine
from jobs.verifier.tiny import CHECKPOINT


@pytest.mark.slow
def test_most_of_its_cache_is_no_longer_resident(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    settings = VerifierSettings(
        dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=256, enforce_eager=True, kv_cache_gib=1.0
    )
    engine = VerifierEngine(CHECKPOINT, settings, seed=0, capture_taps=(2, 5, 7))
    loaded = psutil.Process().memory_info().rss
    engine.close()
    gc.collect()
    assert loaded - psutil.Process().memory_info().rss > 0.8 * (1 << 30)
