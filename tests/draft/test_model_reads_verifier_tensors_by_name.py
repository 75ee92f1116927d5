"""Embedding, final norm and output head are found by name in any checkpoint layout; what is missing is named."""

import json

import pytest
import torch
from safetensors.torch import save_file

from jobs.draft.model import VerifierWeights
from jobs.errors import MustFix

EMBEDDING, NORM, HEAD = torch.randn(12, 4).bfloat16(), torch.randn(4).bfloat16(), torch.randn(12, 4).bfloat16()


def checkpoint(folder, tensors, *, sharded, config=None):
    """A checkpoint folder, one file or one shard a tensor with an index."""
    if sharded:
        names = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            names[name] = f"model-{number:05d}.safetensors"
            save_file({name: tensor}, folder / names[name])
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_with_and_without_prefix(tmp_path, prefix, sharded):
    tensors = {
        f"{prefix}model.embed_tokens.weight": EMBEDDING, f"{prefix}model.norm.weight": NORM,
        f"{prefix}lm_head.weight": HEAD, f"{prefix}model.layers.0.input_layernorm.weight": torch.ones(4),
        "vision_tower.norm.weight": torch.ones(3),
    }  # fmt: skip
    got = VerifierWeights.read(checkpoint(tmp_path, tensors, sharded=sharded))
    assert torch.equal(got.embedding, EMBEDDING) and torch.equal(got.final_norm, NORM) and torch.equal(got.lm_head, HEAD)


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_tied_head_is_the_embedding(tmp_path, config):
    tensors = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": NORM}
    got = VerifierWeights.read(checkpoint(tmp_path, tensors, sharded=False, config=config))
    assert torch.equal(got.lm_head, EMBEDDING)


@pytest.mark.parametrize("tied", [False, True])
def test_no_shard_is_opened_but_those_of_the_three_tensors(tmp_path, tied):
    """Of Kimi's 540 GB two or three shards are there, the others missing or no safetensors at all."""
    needed = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": NORM} | ({} if tied else {"lm_head.weight": HEAD})
    layers = {f"model.layers.{layer}.mlp.experts.0.up_proj.weight": torch.ones(4) for layer in range(6)}
    tensors = {f"language_model.{name}": tensor for name, tensor in (needed | layers).items()}
    checkpoint(tmp_path, tensors, sharded=True, config={"text_config": {"tie_word_embeddings": tied}})
    others = sorted(tmp_path.glob("*.safetensors"))[len(needed) :]
    assert len(others) == len(layers)
    others[0].write_bytes(b"no safetensors")
    for shard in others[1:]:
        shard.unlink()
    got = VerifierWeights.read(tmp_path)
    assert torch.equal(got.embedding, EMBEDDING) and torch.equal(got.final_norm, NORM)
    assert torch.equal(got.lm_head, EMBEDDING if tied else HEAD)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(MustFix, match="no safetensors file"):
        VerifierWeights.read(tmp_path)
    checkpoint(tmp_path, {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": NORM}, sharded=True)
    with pytest.raises(MustFix, match="no tensor 'lm_head.weight'.*does not tie"):
        VerifierWeights.read(tmp_path)
    (tmp_path / "model-00001.safetensors").unlink()
    with pytest.raises(MustFix, match="model-00001.safetensors of tensor 'model.norm.weight' is missing"):
        VerifierWeights.read(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    checkpoint(other, {"model.norm.weight": NORM, "lm_head.weight": HEAD}, sharded=False)
    with pytest.raises(MustFix, match="no tensor 'model.embed_tokens.weight'"):
        VerifierWeights.read(other)
    checkpoint(other, {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": torch.ones(5), "lm_head.weight": HEAD}, sharded=False)
    with pytest.raises(MustFix, match=r"final norm has shape \(5,\) where \(4,\) is needed"):
        VerifierWeights.read(other)
