"""The features in the store are, bit for bit, those that vLLM hands to the draft head when it serves with `method="eagle3"`.

Inside the real engine, speculating and capturing at once: a spy on the proposer (serving_spy.py) keeps what the head
is fed, keyed by the metadata the proposer is given. For the tiny Kimi-K2.5, whose aux states `compat` brings, and for
a Llama, whose aux states are vLLM's own. One layer off, no row is equal.
"""

import dataclasses

import pytest
import torch
from captured import answer_into, requests
from served import random_head, shares_fed, small_llama
from serving_spy import EXTENSION

from jobs.settings import VerifierSettings
from jobs.verifier.capture import CaptureExtension
from jobs.verifier.engine import VerifierEngine
from jobs.verifier.tiny import CHECKPOINT

pytestmark = pytest.mark.slow
SETTINGS = VerifierSettings(dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=96, enforce_eager=True)


@pytest.fixture(autouse=True)
def worker_without_extensions():
    """vLLM mixes an extension into the worker class of this process for good, and refuses another one with the same methods."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    found = CPUWorker.__bases__
    CPUWorker.__bases__ = tuple(base for base in found if not issubclass(base, CaptureExtension))
    yield
    CPUWorker.__bases__ = found


@pytest.mark.parametrize(("name", "taps"), [("Kimi-K2.5", (2, 5, 7)), ("Llama", (2, 4, 5))], ids=["Kimi-K2.5", "Llama"])
def test_the_head_is_fed_what_is_stored(tmp_path, name, taps):
    model = CHECKPOINT if name == "Kimi-K2.5" else small_llama(tmp_path / "model")
    head = random_head(tmp_path / "head", model, taps)
    stored = tuple(sorted({tap for i in taps for tap in (i, i + 1)}))
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    engine = VerifierEngine(
        model, SETTINGS, seed=0, capture_taps=stored,
        engine_arguments={"worker_extension_cls": EXTENSION, "speculative_config": speculation, "skip_tokenizer_init": name == "Llama"},
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        engine._rpc("spy_open")
        # Greedy: on CPU speculation verifies nothing else.
        store = answer_into(engine, tmp_path / "states", [dataclasses.replace(r, temperature=0.0) for r in requests(16)], stored)
        engine._rpc("spy_save", str(tmp_path / "fed.pt"))
    finally:
        engine.close()
    assert len(store.ids()) == 16
    assert shares_fed(store, torch.load(tmp_path / "fed.pt"), taps) == (1.0, 0.0)
