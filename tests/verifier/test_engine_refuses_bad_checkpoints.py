"""What is wrong with a checkpoint is said in one sentence before anything is loaded."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from jobs.errors import MustFix
from jobs.settings import VerifierSettings
from jobs.verifier.engine import VerifierEngine, VerifierFacts
from jobs.verifier.tiny import CHECKPOINT


@pytest.fixture
def copy(tmp_path):
    folder = tmp_path / "verifier"
    shutil.copytree(CHECKPOINT, folder)
    return folder


def change_config(folder, **text):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= text
    (folder / "config.json").write_text(json.dumps(config))


def test_facts_of_the_shipped_verifier():
    facts = VerifierFacts.read(CHECKPOINT)
    assert (facts.layers, facts.default_taps, facts.architecture) == (10, (2, 5, 7), "KimiK25ForConditionalGeneration")
    assert facts.lm_head_name == "language_model.lm_head.weight"
    assert facts.embedding_name == "language_model.model.embed_tokens.weight"
    assert facts.final_norm_name == "language_model.model.norm.weight"
    assert facts.both_readings(None) == (2, 3, 5, 6, 7, 8)
    assert facts.both_readings((1, 5, 9)) == (1, 2, 5, 6, 9)


def test_revision_is_the_commit_of_a_snapshot_or_follows_the_weights(copy, tmp_path):
    local = VerifierFacts.read(copy).revision
    assert local == VerifierFacts.read(CHECKPOINT).revision
    snapshot = tmp_path / "models--x--y" / "snapshots" / ("ab" * 20)
    shutil.copytree(copy, snapshot)
    assert VerifierFacts.read(snapshot).revision == "ab" * 20
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert VerifierFacts.read(copy).revision != local


@pytest.mark.parametrize(
    ("taps", "message"), [((2, 5, 10), "Tap 10 lies outside"), ((0, 5, 7), "Tap 0 lies outside"), ((2, 2, 7), "not different")]
)
def test_taps_outside_the_layers(taps, message):
    with pytest.raises(MustFix, match=message):
        VerifierFacts.read(CHECKPOINT).checked_taps(taps)


def test_default_taps_of_a_shallow_verifier(copy):
    change_config(copy, num_hidden_layers=4)
    with pytest.raises(MustFix, match="not different layers"):
        VerifierFacts.read(copy).checked_taps(None)


def test_missing_config_and_missing_weights(copy, tmp_path):
    with pytest.raises(MustFix, match="no checkpoint"):
        VerifierFacts.read(tmp_path)
    for weights in copy.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(MustFix, match="Weights are missing"):
        VerifierFacts.read(copy)


def test_damaged_weights(copy):
    next(copy.glob("*.safetensors")).write_bytes(b"\x01")
    with pytest.raises(MustFix, match="damaged"):
        VerifierFacts.read(copy)


def test_int4_without_its_quantization_config(copy):
    save_file(
        {"language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed": torch.zeros(1, dtype=torch.int32)},
        copy / "packed.safetensors",
    )
    with pytest.raises(MustFix, match="no quantization_config"):
        VerifierFacts.read(copy)
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors"}
    (copy / "config.json").write_text(json.dumps(config))
    assert VerifierFacts.read(copy).layers == 10


def test_float16_is_refused_before_anything_is_loaded():
    with pytest.raises(MustFix, match="cannot run in float16"):
        VerifierEngine(CHECKPOINT, VerifierSettings(), seed=0, engine_arguments={"dtype": "float16"})


def test_what_does_not_fit_is_said_before_it_is_loaded_and_by_how_much(copy):
    """Ten terabytes of weights (a sparse file), and a cache longer than any memory."""
    weights = next(copy.glob("*.safetensors"))
    with open(weights, "r+b") as file:
        file.truncate(10_000_000_000_000)
    with pytest.raises(MustFix, match=r"does not fit: 100\d\d\.\d GB are needed and .* GB too little") as refused:
        VerifierEngine(copy, VerifierSettings(), seed=0)
    assert "10000.0 GB of weights" in refused.value.where and refused.value.exit_code == 78
    with pytest.raises(MustFix, match="GB too little"):
        VerifierEngine(CHECKPOINT, VerifierSettings(max_model_len=1 << 32), seed=0)
