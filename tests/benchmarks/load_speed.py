"""How long the verifier's weights take from a cold disk: vLLM's ways, and ours ahead of them, as ratios of one run.

    python tests/benchmarks/load_speed.py FOLDER [--gib 3] [--engine [--rounds 1]]

FOLDER is on the disk to be measured; a Llama of random weights is made there. Without `--engine` only the reading is
timed: vLLM's own iterator, each tensor copied once as a weight loader does. With it the real engine starts, a process
each, cold: as it is, with the read-ahead begun as early as a run begins it, and warm, which no reading can beat.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

HIDDEN, FFN, VOCAB, SHARD_LAYERS = 2048, 8192, 32_000, 4
BYTES_OF_A_LAYER = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN)


def random_llama(folder: Path, gib: float) -> Path:
    """A bf16 checkpoint in shards of four layers with their index, as a hub repository has them."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    layers = max(SHARD_LAYERS, round(gib * (1 << 30) / BYTES_OF_A_LAYER))
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16, vocab_size=VOCAB,
        max_position_embeddings=2048, tie_word_embeddings=False, torch_dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    block = torch.randn(1 << 20, dtype=torch.bfloat16) * 0.02

    def draw(*shape: int) -> torch.Tensor:
        size = math.prod(shape)
        return block.repeat(-(-size // block.numel()))[:size].view(shape).clone()

    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN, HIDDEN),
        "self_attn.v_proj": (HIDDEN, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
    }
    shapes |= {
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    names: dict[str, str] = {}
    for first in range(0, layers, SHARD_LAYERS):
        tensors = {
            f"model.layers.{i}.{name}.weight": draw(*shape)
            for i in range(first, min(first + SHARD_LAYERS, layers))
            for name, shape in shapes.items()
        }
        if first == 0:
            tensors |= {
                "model.embed_tokens.weight": draw(VOCAB, HIDDEN),
                "model.norm.weight": draw(HIDDEN),
                "lm_head.weight": draw(VOCAB, HIDDEN),
            }
        file = f"model-{first // SHARD_LAYERS:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def cold(folder: Path) -> None:
    for file in files_of(folder):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copied(iterator) -> float:
    """Seconds until every tensor of the iterator is copied."""
    began = time.perf_counter()
    for _, tensor in iterator:
        tensor.clone()
    return time.perf_counter() - began


def readers(folder: Path) -> dict[str, float]:
    from vllm.model_executor.model_loader.weight_utils import multi_thread_safetensors_weights_iterator, safetensors_weights_iterator

    from jobs.storage.read_ahead import read

    files, found = [str(file) for file in files_of(folder)], {}
    ways = {
        "lazy": lambda: safetensors_weights_iterator(files, False),
        "eager": lambda: safetensors_weights_iterator(files, False, "eager"),
        "threads": lambda: multi_thread_safetensors_weights_iterator(files, False, max_workers=8),
    }
    for way, made in ways.items():
        cold(folder)
        found[way] = copied(made())
    for threads in (1, 4, 8):
        cold(folder)
        found[f"read by {threads}"] = read(files_of(folder), threads, 1 << 62).seconds
    found["lazy after it"] = copied(ways["lazy"]())
    return found


ENGINE = """
import sys, time
began = time.monotonic()
from pathlib import Path
from jobs.settings import VerifierSettings
folder, ahead = Path(sys.argv[1]), sys.argv[2] == "ahead"
settings = VerifierSettings(dtype="bfloat16", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=256, enforce_eager=True, read_ahead=ahead)
from jobs.verifier.loading import read_ahead
reading = read_ahead(folder, settings)
from jobs.verifier.engine import VerifierEngine
engine = VerifierEngine(folder, settings, seed=0, capture_taps=(2, 3), engine_arguments={"skip_tokenizer_init": True})
print("STARTED", time.monotonic() - began, reading and reading.stop(), flush=True)
engine.close()
"""


def engine_start(folder: Path, way: str) -> dict[str, float]:
    """Seconds until the engine is up, and of them those that vLLM says the weights took."""
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(folder), way], capture_output=True, text=True, env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO"}
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    weights = next(line for line in (done.stdout + done.stderr).splitlines() if "Loading weights took" in line)
    started = next(line for line in done.stdout.splitlines() if line.startswith("STARTED"))
    print(started, file=sys.stderr)
    return {"engine": float(started.split()[1]), "weights": float(weights.split("took")[1].split()[0])}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--gib", type=float, default=3.0)
    options.add_argument("--engine", action="store_true")
    options.add_argument("--rounds", type=int, default=1)
    wanted = options.parse_args()
    folder = wanted.folder / "random-llama"
    if not (folder / "model.safetensors.index.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        random_llama(folder, wanted.gib)
    size = sum(file.stat().st_size for file in files_of(folder))
    result: dict = {"bytes": size}
    if wanted.engine:
        for way in ("plain", "ahead") * wanted.rounds:
            cold(folder)
            result.setdefault(way, []).append(engine_start(folder, way))
        result["warm"] = engine_start(folder, "plain")
    else:
        result["seconds"] = readers(folder)
        result["GB/s"] = {way: round(size / seconds / 1e9, 3) for way, seconds in result["seconds"].items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
