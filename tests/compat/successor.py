"""A Kimi-K2.5 whose next token is known, and a head whose every draft is known.

The verifier is the shipped tiny one with its blocks adding nothing and its output head shifted by one:
after token x comes x + 1. The head drafts x + 2 from the state of x, which is right for the first
drafted token, if x + 2 is even (the draft vocabulary); from its own state it drafts x + 2 again, which
is wrong for the second. So acceptance is known before vLLM counts it.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from jobs.verifier.tiny import CHECKPOINT

HEADS, HEAD_DIM, FFN = 4, 32, 64


def make(folder: Path) -> tuple[Path, Path]:
    """Write verifier and head below `folder`; returns their folders."""
    verifier, head = folder / "verifier", folder / "head"
    shutil.copytree(CHECKPOINT, verifier)
    (path,) = verifier.glob("*.safetensors")
    weights = load_file(path)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(weights["language_model.model.embed_tokens.weight"].shape, generator=generator)  # [V, H]
    for name in weights:
        if name.startswith("language_model") and ("o_proj" in name or "down_proj" in name):
            weights[name].zero_()
    weights["language_model.model.embed_tokens.weight"] = embedding
    weights["language_model.model.norm.weight"] = torch.ones(embedding.shape[1])
    weights["language_model.lm_head.weight"] = torch.roll(embedding, 1, 0).contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    head.mkdir()
    save_file(head_weights(embedding, generator), head / "model.safetensors", metadata={"format": "pt"})
    (head / "config.json").write_text(json.dumps(head_config(embedding)))
    return verifier, head


def head_weights(embedding: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    vocab, hidden = embedding.shape
    drafted = torch.arange(0, vocab, 2)  # [Vd]
    fusion = torch.zeros(hidden, 3 * hidden)
    fusion[:, 2 * hidden :] = torch.eye(hidden)  # takes the last tap, which here is the embedding still
    width = HEADS * HEAD_DIM
    shapes = {"self_attn.q_proj": (width, 2 * hidden), "self_attn.k_proj": (width, 2 * hidden), "self_attn.v_proj": (width, 2 * hidden)}
    shapes |= {"mlp.gate_proj": (FFN, hidden), "mlp.up_proj": (FFN, hidden)}
    weights = {f"midlayer.{name}.weight": torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    weights |= {f"midlayer.{name}.weight": torch.ones(hidden) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    weights |= {"midlayer.self_attn.o_proj.weight": torch.zeros(hidden, width), "midlayer.mlp.down_proj.weight": torch.zeros(hidden, FFN)}
    return weights | {
        "fc.weight": fusion,
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": torch.roll(embedding, 2, 0)[drafted].contiguous(),
        "d2t": drafted - torch.arange(len(drafted)),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, drafted, True),
    }


def head_config(embedding: torch.Tensor) -> dict:
    vocab, hidden = embedding.shape
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "float32",
        "hidden_size": hidden, "intermediate_size": FFN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "vocab_size": vocab, "draft_vocab_size": vocab // 2,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
