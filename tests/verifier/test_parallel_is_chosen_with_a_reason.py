"""`verifier.parallel = auto` says what it chose and why; what is not supported is refused in one sentence."""

import json

import pytest
import torch

from jobs.errors import MustFix
from jobs.settings import VerifierSettings, load
from jobs.verifier.engine import _arguments
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.parallel import parallel
from jobs.verifier.serve import serve_arguments
from jobs.verifier.tiny import CHECKPOINT

KIMI = {"n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}


@pytest.mark.parametrize(
    ("text", "gpus", "requests", "experts", "why"),
    [
        (KIMI, 8, 1024, False, "256 columns"),
        (KIMI, 32, 1024, True, "64 columns of each expert on each of 32 GPUs are too narrow, and 21 tokens"),
        (KIMI, 32, 64, False, "1.3 tokens an expert at 64 requests"),
        (KIMI, 1, 64, False, "one GPU"),
        ({}, 8, 64, False, "no experts"),
    ],
)
def test_what_auto_chooses(tmp_path, text, gpus, requests, experts, why):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    found = parallel(tmp_path, VerifierSettings(tensor_parallel_size=gpus, max_num_seqs=requests), cuda=True)
    assert found.experts == experts and why in found.why


def test_what_is_set_reaches_the_engine_and_the_server(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    facts = VerifierFacts.read(CHECKPOINT)
    for wanted in ("tp", "tp_ep"):
        settings = VerifierSettings(tensor_parallel_size=2, parallel=wanted)
        assert _arguments(CHECKPOINT, settings, facts, 0, ())["enable_expert_parallel"] == (wanted == "tp_ep")
        assert ("--enable-expert-parallel" in serve_arguments(CHECKPOINT, settings, None, 0)) == (wanted == "tp_ep")


def test_what_cannot_be_done_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MustFix, match="no experts to split"):
        parallel(tmp_path, VerifierSettings(parallel="tp_ep"))
    with pytest.raises(MustFix, match="cannot split experts by number on a CPU"):
        parallel(CHECKPOINT, VerifierSettings(parallel="tp_ep"), cuda=False)
    assert parallel(CHECKPOINT, VerifierSettings(tensor_parallel_size=2, max_num_seqs=1024), cuda=False).why == "no GPU"
    with pytest.raises(MustFix, match="dp_ep.* is not supported yet, choose auto"):
        load("smoke", overrides=['verifier.parallel="dp_ep"'])
