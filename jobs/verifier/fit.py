"""Does the verifier fit? Asked of file sizes and the device's memory before twenty minutes are spent on a load."""

import json
import os
from pathlib import Path

from jobs.errors import MustFix
from jobs.settings import VerifierSettings
from jobs.verifier.drafter import Drafter
from jobs.verifier.facts import tensor_sizes, weight_files
from jobs.verifier.parallel import parallel

# What a process needs beside weights and cache: CUDA's context, NCCL's buffers, the activations of one step.
OVERHEAD_BYTES = 1 << 30


def refuse_too_large(model: Path, settings: VerifierSettings, drafter: Drafter | None = None) -> None:
    """Raise MustFix with the number of missing gigabytes where weights and one longest sequence exceed the memory.

    Weights count as their files do, split over the tensor-parallel devices of a replica, routed experts over all;
    the latent cache of MLA is held by every device, another cache is split. On CPU all share the machine's memory.
    A draft head counts in the same way, with its embedding: vLLM loads it before it finds that it is the verifier's.
    """
    import torch

    # Asked through the driver's management library, or CUDA would be started in this process (preflight asks here too).
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    weights = sum(path.stat().st_size for path in weight_files(model))
    replicas, cache = parallel(model, settings).replicas, cache_bytes(text, settings)
    experts = expert_bytes(model) if replicas > 1 else 0
    head = draft_bytes(Path(drafter.config["model"]), settings) if drafter and "model" in drafter.config else 0
    if torch.cuda.is_available():
        gpus = settings.tensor_parallel_size
        share = gpus // replicas
        given, what = int(device_bytes() * settings.gpu_memory_utilization), "the GPU" if gpus == 1 else f"each of {gpus} GPUs"
        needed = (
            experts // gpus
            + (weights - experts) // share
            + (cache if text.get("kv_lora_rank") else cache // share)
            + head // share
            + OVERHEAD_BYTES
        )
    else:
        import psutil

        given, what = psutil.virtual_memory().total, "this machine"
        needed = experts + (weights - experts + cache + head) * replicas
    if needed > given:
        raise MustFix(
            f"The verifier does not fit: {needed / 1e9:.1f} GB are needed and {what} gives {given / 1e9:.1f} GB, {(needed - given) / 1e9:.1f} GB too little",
            where=f"{model}, {weights / 1e9:.1f} GB of weights{f' and {head / 1e9:.1f} GB of a draft head' if head else ''}, verifier.max_model_len = {settings.max_model_len}",
            remedy="use more or larger GPUs (verifier.tensor_parallel_size), a quantized checkpoint or a smaller verifier.max_model_len"
            + (', or verifier.parallel = "tp"' if replicas > 1 else "")
            + (', or generate.speculate = "off"' if head else ""),
        )


def of_data_parallel_attention(model: Path, settings: VerifierSettings, memory: int | None = None) -> str | None:
    """What `dp_ep` would do to a latent cache that `tp` holds on every GPU, in one sentence; None where there is nothing to gain.

    memory: bytes of a GPU, None asks; there is nothing to say without one. A replica a GPU. Tokens in flight from which a step reads fewer bytes of memory:
    where the cache that is read once instead of once a GPU outweighs the weights that are read whole instead of shared.
    """
    import torch

    config = json.loads((model / "config.json").read_text())
    text, gpus = config.get("text_config", config), settings.tensor_parallel_size
    if gpus < 2 or not text.get("kv_lora_rank") or (memory is None and not torch.cuda.is_available()):
        return None
    if not (experts := expert_bytes(model)):
        return None
    others = sum(path.stat().st_size for path in weight_files(model)) - experts
    token = cache_bytes(text, settings) // settings.max_model_len
    given = int((device_bytes() if memory is None else memory) * settings.gpu_memory_utilization) - OVERHEAD_BYTES
    split, replicated = max(0, given - (experts + others) // gpus) // token, gpus * (max(0, given - experts // gpus - others) // token)
    longest = settings.max_num_seqs * settings.max_model_len
    return (
        f'the cache holds {split / 1e6:.1f} million tokens, {settings.max_num_seqs} requests have {longest / 1e6:.1f} at most; "dp_ep" would hold '
        f"{replicated / 1e6:.1f} and read less from {others / token / 1e6:.1f} million in flight on, but nobody has measured it here"
    )


def expert_bytes(model: Path) -> int:
    """Bytes of the routed experts: under data parallelism they are what the replicas share."""
    return sum(size for name, size in tensor_sizes(model).items() if ".experts." in name)


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
