"""Write a head: the speculators form for vLLM, the `LlamaForCausalLMEagle3` form for SGLang.

`jobs.draft.formats` holds the table of names and the reasons; reading back what is written here gives
the same tensors bit for bit. Every value an engine would otherwise guess (taps, residual, rope, head
width, length) is spelt out: both engines guess silently.
"""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from jobs.draft.model import Eagle3Head
from jobs.errors import MustFix
from jobs.storage.files import disk_full_named, fsync_file, fsync_folder, write_json_atomically

EXPORTED_LENGTH = 262_144
LLAMA_PREFIX, OUR_PREFIX = "midlayer.", "layers.0."


def save_speculators(
    head: Eagle3Head,
    folder: Path,
    *,
    verifier_name: str,
    verifier_architecture: str,
    draft_tokens: int = 3,
    dtype: torch.dtype | None = torch.bfloat16,
) -> None:
    """Write `config.json` and `model.safetensors` that vLLM 0.16.0 loads as they are.

    The config is built and validated by speculators' own classes; the Llama layer is then written in
    full, because vLLM reads it without Llama's defaults and a value left out would be missing there.

    Args:
        head: any device.
        folder: made where missing.
        verifier_name, verifier_architecture: as the verifier's hub id and config.json give them.
        draft_tokens: the default of a server that is given none.
        dtype: of the weights; None keeps the head's. The embedding always keeps its own, bit for bit:
            where it equals the verifier's, vLLM shares that one.

    Raises:
        MustFix: the disk is full or the folder cannot be written.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    layer = LlamaConfig(**_llama_values(head, dtype))
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=head.config.draft_vocab_size,
        norm_before_residual=head.config.norm_before_residual,
        eagle_aux_hidden_state_layer_ids=list(head.config.taps),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=draft_tokens)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=verifier_name, architectures=[verifier_architecture]),
        ),
    )
    written = config.to_diff_dict()
    full = layer.to_dict()
    written["transformer_layer_config"] = {k: full[k] for k in sorted(full) if full[k] is not None and k not in _GENERATION_ONLY}
    _write(Path(folder), written, _tensors(head, dtype))


def save_llama_eagle3(head: Eagle3Head, folder: Path, *, dtype: torch.dtype | None = torch.bfloat16) -> None:
    """Write the `LlamaForCausalLMEagle3` form, which SGLang serves (vLLM too).

    Raises:
        MustFix: a head whose residual is the normed feature (SGLang's layer takes the raw one and has no
            switch, so acceptance would collapse without an error), a tap of layer 0, a disk that is full.
    """
    if head.config.norm_before_residual:
        raise MustFix(
            "SGLang takes the residual from the raw feature and this head was trained with the normed one",
            where="train.norm_before_residual",
            remedy="train with norm_before_residual = false, or publish without the sglang form",
        )
    if min(head.config.taps) < 1:
        raise MustFix(
            f"SGLang cannot tap the input of layer 0, and this head taps {list(head.config.taps)}",
            where="package.sglang",
            remedy="publish without the sglang form",
        )
    written = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_llama_values(head, dtype),
        "draft_vocab_size": head.config.draft_vocab_size,
        "norm_before_residual": False,
        # vLLM reads this one, as the input of layer i …
        "eagle_aux_hidden_state_layer_ids": list(head.config.taps),
        # … and SGLang this one, to which it adds 1.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [t - 1 for t in head.config.taps], "use_aux_hidden_state": True},
    }
    tensors = {
        LLAMA_PREFIX + name.removeprefix(OUR_PREFIX) if name.startswith(OUR_PREFIX) else name: tensor
        for name, tensor in _tensors(head, dtype).items()
    }
    _write(Path(folder), written, tensors)


# Fields of every transformers config that mean nothing for a draft layer.
_GENERATION_ONLY = frozenset({"id2label", "label2id", "transformers_version", "_name_or_path", "architectures"})


def _llama_values(head: Eagle3Head, dtype: torch.dtype | None) -> dict[str, Any]:
    config = head.config
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max(config.max_position_embeddings, EXPORTED_LENGTH),
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype or head.fc.weight.dtype).removeprefix("torch."),
    }


def _tensors(head: Eagle3Head, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The state dict on CPU; everything but the embedding and the maps in `dtype`."""
    return {
        name: (tensor if dtype is None or not tensor.is_floating_point() or name == "embed_tokens.weight" else tensor.to(dtype))
        .detach()
        .cpu()
        .contiguous()
        for name, tensor in head.state_dict().items()
    }


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Weights first, config last; each file whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with disk_full_named(folder):
            temporary = folder / f".model.safetensors.{os.getpid()}.tmp"
            try:
                save_file(tensors, temporary, metadata={"format": "pt"})  # straight to disk: 4.7 GB need no second copy in memory
                fsync_file(temporary)
                os.replace(temporary, folder / "model.safetensors")
                fsync_folder(folder)
            finally:
                temporary.unlink(missing_ok=True)
            write_json_atomically(folder / "config.json", config)
    except OSError as error:
        raise MustFix(
            f"The head cannot be written: {error.strerror or error}", where=str(folder), remedy="make the folder writable"
        ) from error
