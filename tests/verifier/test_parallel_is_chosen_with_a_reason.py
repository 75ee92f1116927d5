"""`verifier.parallel = auto` says what it chose and why; what is not supported is refused in one sentence."""

import json
import os
import struct

import pytest
import torch

from jobs.errors import MustFix
from jobs.job_file import load
from jobs.settings import VerifierSettings
from jobs.verifier import fit
from jobs.verifier.engine import _arguments
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.parallel import parallel
from jobs.verifier.serve import serve_arguments
from jobs.verifier.tiny import CHECKPOINT

KIMI = {"n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
LATENT = KIMI | {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
GB = 10**9


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
    for wanted in ("tp", "tp_ep", "dp", "dp_ep"):
        settings = VerifierSettings(tensor_parallel_size=4, parallel=wanted, max_num_seqs=1023, max_num_batched_tokens=2048)
        given, served = _arguments(CHECKPOINT, settings, facts, 0, ()), serve_arguments(CHECKPOINT, settings, None, 0)
        replicated = wanted.startswith("dp")
        assert given["enable_expert_parallel"] == ("--enable-expert-parallel" in served) == wanted.endswith("_ep")
        assert (given["tensor_parallel_size"], given.get("data_parallel_size", 1)) == ((1, 4) if replicated else (4, 1))
        assert (given["max_num_seqs"], given["max_num_batched_tokens"]) == ((256, 512) if replicated else (1023, 2048))
        for option in ("--tensor-parallel-size", "--max-num-seqs", "--max-num-batched-tokens"):
            assert served[served.index(option) + 1] == str(given[option[2:].replace("-", "_")])
        assert ("--data-parallel-size" in served) == replicated
    two = VerifierSettings(tensor_parallel_size=4, parallel="dp", data_parallel_size=2)
    assert [_arguments(CHECKPOINT, two, facts, 0, ())[name] for name in ("tensor_parallel_size", "data_parallel_size")] == [2, 2]


def checkpoint(folder, text: dict, tensors: dict[str, int]):
    """A checkpoint whose weights are a hole of the right size."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    ends, header = 0, {}
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [ends, ends := ends + size]}
    body = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(body)) + body)
    os.truncate(folder / "model.safetensors", 8 + len(body) + ends)
    return folder


def test_what_replicas_would_hold_is_said_and_what_they_need_is_counted(tmp_path, monkeypatch):
    """Kimi-K2.5 on eight cards of 141 GB: 70,272 bytes a token, 64.4 GB of experts and 25 GB of everything else on each."""
    kimi = checkpoint(
        tmp_path / "kimi",
        LATENT,
        {"model.layers.1.mlp.experts.0.up_proj.weight_packed": 515 * GB, "model.layers.1.mlp.shared_experts.up_proj.weight": 25 * GB},
    )
    settings = VerifierSettings(tensor_parallel_size=8, max_num_seqs=512, max_model_len=12288)
    said = fit.of_data_parallel_attention(kimi, settings, memory=141 * GB)
    # tp: (126.9 - 1.07 - 67.5) / 70,272 B; dp_ep: 8 x (126.9 - 1.07 - 64.375 - 25) / 70,272 B; from 25 GB / 70,272 B on
    assert "holds 0.8 million tokens, 512 requests have 6.3 at most" in said and "would hold 4.1 and read less from 0.4 million" in said
    assert fit.of_data_parallel_attention(checkpoint(tmp_path / "dense", {}, {"a": GB}), settings, memory=141 * GB) is None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fit, "device_bytes", lambda: 96 * GB)
    fit.refuse_too_large(kimi, settings)
    with pytest.raises(MustFix, match="91.3 GB are needed and each of 8 GPU.* gives 86.4 GB, 4.9 GB too little") as refused:
        fit.refuse_too_large(kimi, settings.model_copy(update={"parallel": "dp_ep"}))
    assert 'verifier.parallel = "tp"' in refused.value.remedy
    fit.refuse_too_large(kimi, settings.model_copy(update={"parallel": "dp_ep", "data_parallel_size": 2}))


def test_what_cannot_be_done_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MustFix, match="no experts to split"):
        parallel(tmp_path, VerifierSettings(parallel="tp_ep"))
    with pytest.raises(MustFix, match="cannot split experts by number on a CPU"):
        parallel(CHECKPOINT, VerifierSettings(parallel="tp_ep"), cuda=False)
    assert parallel(CHECKPOINT, VerifierSettings(tensor_parallel_size=2, max_num_seqs=1024), cuda=False).why == "no GPU"
    with pytest.raises(MustFix, match="no experts to split"):
        parallel(tmp_path, VerifierSettings(parallel="dp_ep", tensor_parallel_size=2))
    for wrong, said in (
        ({"parallel": '"dp_ep"'}, "'dp_ep' needs 2 or more GPUs"),
        (
            {"parallel": '"dp"', "tensor_parallel_size": 4, "data_parallel_size": 3},
            "3 replicas do not divide verifier.tensor_parallel_size = 4",
        ),
        ({"tensor_parallel_size": 4, "data_parallel_size": 2}, "is for verifier.parallel = .dp. or .dp_ep., not 'auto'"),
    ):
        with pytest.raises(MustFix, match=said):
            load("smoke", overrides=[f"verifier.{name}={value}" for name, value in wrong.items()])
