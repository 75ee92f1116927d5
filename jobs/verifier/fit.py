"""Does the verifier fit? Asked of file sizes and the device's memory before twenty minutes are spent on a load."""

import json
import os
from pathlib import Path

from jobs.errors import MustFix
from jobs.settings import VerifierSettings
from jobs.verifier.drafter import Drafter
from jobs.verifier.facts import weight_files

# What a process needs beside weights and cache: CUDA's context, NCCL's buffers, the activations of one step.
OVERHEAD_BYTES = 1 << 30


def refuse_too_large(model: Path, settings: VerifierSettings, drafter: Drafter | None = None) -> None:
    """Raise MustFix with the number of missing gigabytes where weights and one longest sequence exceed the memory.

    Weights count as their files do, split over the tensor-parallel devices; the latent cache of MLA is held by
    every one of them, another cache is split. On CPU every tensor-parallel process shares the machine's memory.
    A draft head counts in the same way, with its embedding: vLLM loads it before it finds that it is the verifier's.
    """
    import torch

    # Asked through the driver's management library, or CUDA would be started in this process (preflight asks here too).
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    weights = sum(path.stat().st_size for path in weight_files(model))
    share, cache = settings.tensor_parallel_size, cache_bytes(text, settings)
    head = draft_bytes(Path(drafter.config["model"]), settings) if drafter and "model" in drafter.config else 0
    if torch.cuda.is_available():
        given, what = int(device_bytes() * settings.gpu_memory_utilization), f"each of {share} GPU(s)"
        needed = weights // share + (cache if "kv_lora_rank" in text else cache // share) + head // share + OVERHEAD_BYTES
    else:
        import psutil

        given, what = psutil.virtual_memory().total, "this machine"
        needed = weights + cache + head
    if needed > given:
        raise MustFix(
            f"The verifier does not fit: {needed / 1e9:.1f} GB are needed and {what} gives {given / 1e9:.1f} GB, {(needed - given) / 1e9:.1f} GB too little",
            where=f"{model}, {weights / 1e9:.1f} GB of weights{f' and {head / 1e9:.1f} GB of a draft head' if head else ''}, verifier.max_model_len = {settings.max_model_len}",
            remedy="use more or larger GPUs (verifier.tensor_parallel_size), a quantized checkpoint or a smaller verifier.max_model_len"
            + (', or generate.speculate = "off"' if head else ""),
        )


def cache_bytes(text: dict, settings: VerifierSettings) -> int:
    """Bytes of the KV cache of one sequence of verifier.max_model_len tokens on one device, undivided."""
    width = 4 if settings.dtype == "float32" else 2
    if "kv_lora_rank" in text and text["kv_lora_rank"]:
        values = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    else:
        heads = text["num_attention_heads"]
        values = 2 * text.get("num_key_value_heads", heads) * (text.get("head_dim") or text["hidden_size"] // heads)
    return text["num_hidden_layers"] * values * width * settings.max_model_len


def draft_bytes(folder: Path, settings: VerifierSettings) -> int:
    """Bytes of a draft head in vLLM, undivided: its files and the cache of one sequence in its layer."""
    config = json.loads((folder / "config.json").read_text())
    layer = config.get("transformer_layer_config") or config
    return sum(path.stat().st_size for path in weight_files(folder)) + cache_bytes(layer | {"num_hidden_layers": 1}, settings)


def device_bytes() -> int:
    """Memory of the first GPU, asked of the driver's management library: no CUDA context is made in this process."""
    from vllm.platforms import current_platform

    return current_platform.get_device_total_memory()
