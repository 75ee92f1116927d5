"""The public heads of Kimi-K2 and K2.5 in their real shapes: each is read, every tensor accounted for, its rope, heads and map kept.

AQ-MedAI's have FFN 18,432, 64 KV heads of 128, 32,000 draft ids and a plain rope of theta 1e6; lightseek's FFN 12,288, the full
vocabulary and YaRN. What is not known of them is tried both ways, and so is every mixture; epsilon, trained length and tap ids, on
which no shape depends, are stand-ins. The files are whole and consist of holes: 5 GB that no disk holds and no test reads.
"""

import itertools
import json
import struct
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from jobs.draft.formats import read_head
from jobs.draft.weights import VerifierWeights

V, H, HEADS, LAYERS = 163_840, 7168, 64, 61
DEFAULT_TAPS = (2, LAYERS // 2, LAYERS - 3)
# (KV heads, width of a head): AQ-MedAI's; and as few and as narrow as a config may leave them: hidden size over heads.
ATTENTION = ((64, 128), (8, None))


def config_of(ffn: int, draft: int, yarn: bool, attention: tuple[int, int | None], short: bool) -> dict:
    """A config.json in the `LlamaForCausalLMEagle3` form; short: all that may be missing is."""
    kv_heads, head_dim = attention
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": ffn,
        "num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "num_hidden_layers": 1, "vocab_size": V,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if head_dim:
        config["head_dim"] = head_dim
    if yarn:  # the scaling of Kimi itself
        scaling = {"type": "yarn"} if short else {"rope_type": "yarn", "original_max_position_embeddings": 4096}
        config["rope_scaling"] = {"factor": 64.0, "beta_fast": 32.0, "beta_slow": 1.0} | scaling
    elif not short:
        config["rope_scaling"] = None
    if draft < V or not short:
        config["draft_vocab_size"] = draft
    if not short:
        taps = {"eagle_aux_hidden_state_layer_ids": [1, 29, 57], "use_aux_hidden_state": True}
        config |= {
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "target_hidden_size": H,
            "eagle_config": taps,
        }
    return config


def shapes_of(ffn: int, draft: int, attention: tuple[int, int | None]) -> dict[str, tuple[int, ...]]:
    kv_heads, head_dim = attention
    head_dim = head_dim or 112  # 7168 / 64
    layer = {
        "input_layernorm": (H,), "hidden_norm": (H,), "post_attention_layernorm": (H,),
        "self_attn.q_proj": (HEADS * head_dim, 2 * H), "self_attn.k_proj": (kv_heads * head_dim, 2 * H),
        "self_attn.v_proj": (kv_heads * head_dim, 2 * H), "self_attn.o_proj": (H, HEADS * head_dim),
        "mlp.gate_proj": (ffn, H), "mlp.up_proj": (ffn, H), "mlp.down_proj": (H, ffn),
    }  # fmt: skip
    return {f"midlayer.{name}.weight": shape for name, shape in layer.items()} | {
        "fc.weight": (H, 3 * H), "norm.weight": (H,), "lm_head.weight": (draft, H),
    }  # fmt: skip


def write_holes(path: Path, shapes: dict[str, tuple[int, ...]], maps: dict[str, torch.Tensor]) -> None:
    """A safetensors file: the maps, and behind them bf16 tensors of zeros that take no place on the disk."""
    types = {torch.int64: "I64", torch.bool: "BOOL"}
    sizes = {name: (types[m.dtype], m.shape, m.nbytes) for name, m in maps.items()}
    sizes |= {name: ("BF16", shape, 2 * prod(shape)) for name, shape in shapes.items()}
    ends = list(itertools.accumulate(size for *_, size in sizes.values()))
    table = {
        name: {"dtype": dtype, "shape": list(shape), "data_offsets": [end - size, end]}
        for (name, (dtype, shape, size)), end in zip(sizes.items(), ends, strict=True)
    }
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in maps.values():
            file.write(tensor.numpy().tobytes())
        file.truncate(8 + len(text) + ends[-1])


def public_head(folder: Path, ffn: int, draft: int, yarn: bool, attention: tuple[int, int | None], short: bool) -> torch.Tensor:
    """Writes one; returns the ids it drafts, `[Vd]`."""
    generator = torch.Generator().manual_seed(draft)
    ids = torch.randperm(V, generator=generator)[:draft].sort().values
    maps = {"d2t": ids - torch.arange(draft)} if draft < V or not short else {}
    if not short:
        maps["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    shapes = shapes_of(ffn, draft, attention) | ({} if short else {"embed_tokens.weight": (V, H)})
    write_holes(folder / "model.safetensors", shapes, maps)
    (folder / "config.json").write_text(json.dumps(config_of(ffn, draft, yarn, attention, short)))
    return ids


@pytest.mark.parametrize("short", [False, True], ids=["spelt out", "short"])
@pytest.mark.parametrize("attention", ATTENTION, ids=str)
@pytest.mark.parametrize("yarn", [False, True], ids=["plain", "yarn"])
@pytest.mark.parametrize("draft", [32_000, V])
@pytest.mark.parametrize("ffn", [18_432, 12_288])
def test_it_is_read_with_every_tensor_in_its_place(tmp_path, ffn, draft, yarn, attention, short):
    ids = public_head(tmp_path, ffn, draft, yarn, attention, short)
    verifier = VerifierWeights(*(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((V, H), (H,), (V, H))))
    loaded = read_head(tmp_path, verifier=verifier, default_taps=DEFAULT_TAPS)
    (tmp_path / "model.safetensors").unlink()  # mapped it goes on to be there; a copy of this folder would fill its holes
    head, config = loaded.head, loaded.head.config

    stored = {name.replace("midlayer", "layers.0"): shape for name, shape in shapes_of(ffn, draft, attention).items()}
    wanted = stored | {"embed_tokens.weight": (V, H), "d2t": (draft,), "t2d": (V,)}
    assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == wanted
    assert all(head.get_parameter(name).dtype == torch.bfloat16 for name in stored)
    assert loaded.form == "llama" and loaded.own_embedding is not short and head.embed_tokens.weight.is_meta is short
    assert (config.heads, config.kv_heads, config.head_dim) == (HEADS, attention[0], attention[1] or 112)
    assert torch.equal(head.draft_ids, ids) and head.t2d.sum() == draft and bool(head.t2d[ids].all())
    assert config.norm_before_residual is False and config.max_position_embeddings == 262_144
    assert loaded.declared_taps == (None if short else (1, 29, 57)) and config.taps == (DEFAULT_TAPS if short else (1, 29, 57))

    published = LlamaConfig(**{k: v for k, v in config_of(ffn, draft, yarn, attention, short).items() if k != "architectures"})
    positions = torch.tensor([0, 1, 4095, 20_000])
    for ours, theirs in zip(head.rotation(positions), LlamaRotaryEmbedding(published)(torch.zeros(1), positions[None]), strict=True):
        assert torch.allclose(ours, theirs[0], atol=1e-5)
