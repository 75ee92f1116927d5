"""Verifiers and heads that are served for the comparison with capture: a small Llama, and heads with random weights."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from jobs.storage.states import StateStore
from jobs.verifier.facts import VerifierFacts

HEADS, HEAD_DIM, FFN, DRAFTED = 4, 32, 64, 256


def small_llama(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A Llama of 8 layers with random weights, attention shaped as the tiny Kimi-K2.5's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=HEADS * HEAD_DIM, intermediate_size=256, num_hidden_layers=8, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        vocab_size=1536, max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.1,
        bos_token_id=1504, eos_token_id=1506, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def random_head(folder: Path, verifier: Path, taps: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> Path:
    """An EAGLE-3 head in the Llama form that drafts nonsense: what it is fed is the point, not what it says."""
    facts, generator = VerifierFacts.read(verifier), torch.Generator().manual_seed(4)
    hidden, width = facts.hidden_size, HEADS * HEAD_DIM
    shapes = {"self_attn.q_proj": (width, 2 * hidden), "self_attn.k_proj": (width, 2 * hidden), "self_attn.v_proj": (width, 2 * hidden)}
    shapes |= {
        "self_attn.o_proj": (hidden, width),
        "mlp.gate_proj": (FFN, hidden),
        "mlp.up_proj": (FFN, hidden),
        "mlp.down_proj": (hidden, FFN),
    }
    weights = {f"midlayer.{name}.weight": torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes.items()}
    weights |= {f"midlayer.{name}.weight": torch.ones(hidden) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    weights |= {
        "fc.weight": torch.randn((hidden, 3 * hidden), generator=generator) * 0.05,
        "lm_head.weight": torch.randn((DRAFTED, hidden), generator=generator) * 0.05,
        "norm.weight": torch.ones(hidden),
    }
    drafted = torch.arange(0, 2 * DRAFTED, 2)  # [Vd]
    tables = {"d2t": drafted - torch.arange(DRAFTED), "t2d": torch.zeros(facts.vocab_size, dtype=torch.bool).index_fill(0, drafted, True)}
    folder.mkdir(parents=True)
    save_file(
        {name: weight.to(dtype) for name, weight in weights.items()} | tables, folder / "model.safetensors", metadata={"format": "pt"}
    )
    config = dict(
        architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=hidden, intermediate_size=FFN, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD_DIM, vocab_size=facts.vocab_size, draft_vocab_size=DRAFTED,
        max_position_embeddings=4096, rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu", attention_bias=False, mlp_bias=False,
        tie_word_embeddings=False, torch_dtype=str(dtype).removeprefix("torch."), eagle_aux_hidden_state_layer_ids=list(taps),
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def shares_fed(store: StateStore, fed: dict[str, dict[int, torch.Tensor]], taps: tuple[int, ...]) -> tuple[float, float]:
    """Shares of rows where the proposer's features are the stored `taps` bit for bit, and those one layer later."""
    equal, off, rows = 0, 0, 0
    for sample_id in store.ids():
        sample = store.read(sample_id)
        place = [store.layout.taps.index(tap) for tap in taps]
        later = [store.layout.taps.index(tap + 1) for tap in taps]
        given = torch.stack([fed[sample_id][position] for position in range(len(sample.taps))])  # [n-1, 3H]
        equal += int((sample.taps[:, place].flatten(1) == given).all(dim=1).sum())
        off += int((sample.taps[:, later].flatten(1) == given).all(dim=1).sum())
        rows += len(given)
    return equal / rows, off / rows
