"""What a verifier's checkpoint folder says about itself, read without vLLM and without its weights.

Everything the other stages need to know before twenty minutes are spent on a load stands in
`config.json` and the headers of the safetensors files.
"""

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.errors import MustFix

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
# Bytes at each end of a weights file that go into the revision of a local checkpoint.
SAMPLED_BYTES = 1 << 20


@dataclass(frozen=True)
class VerifierFacts:
    """Shape of the text decoder, names of the tensors a draft head shares with it, and its revision."""

    architecture: str
    layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    default_taps: tuple[int, int, int]
    revision: str  # commit of the hub snapshot, or a sha256 of the local weights
    embedding_name: str
    final_norm_name: str
    lm_head_name: str  # the embedding's where the weights are tied
    mla_width: int | None = None  # kv_lora_rank + qk_rope_head_dim, None without latent attention

    @classmethod
    def read(cls, model: Path) -> "VerifierFacts":
        """Read `model/config.json` and the tensor names. Raises MustFix for a folder that is no usable checkpoint."""
        config = _read_json(model / "config.json")
        text = config.get("text_config", config)
        layers = _positive(text, "num_hidden_layers", model)
        names = tensor_names(model)
        _refuse_unusable(config, text, names, model)
        embedding = _ending(names, "model.embed_tokens.weight", model)
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        hidden = _positive(text, "hidden_size", model)
        return cls(
            architecture=(config.get("architectures") or ["unknown"])[0],
            layers=layers,
            hidden_size=hidden,
            vocab_size=_positive(text, "vocab_size", model),
            heads=_positive(text, "num_attention_heads", model),
            intermediate_size=_positive(text, "intermediate_size", model),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(text.get("max_position_embeddings", 0)),
            default_taps=default_taps(layers),
            revision=revision_of(model),
            embedding_name=embedding,
            final_norm_name=_ending(names, "model.norm.weight", model),
            lm_head_name=embedding if tied else _ending(names, "lm_head.weight", model),
            mla_width=text["kv_lora_rank"] + text["qk_rope_head_dim"] if text.get("kv_lora_rank") else None,
        )

    def checked_taps(self, taps: tuple[int, ...] | None) -> tuple[int, ...]:
        """The taps of the settings, or the default ones; ids outside the layers or that coincide are a MustFix."""
        chosen = self.default_taps if taps is None else tuple(sorted(taps))
        # Id 0 is the embedding and id L the unnormed output: vLLM's own models put out neither.
        outside = [tap for tap in chosen if not 1 <= tap < self.layers]
        if outside:
            raise MustFix(
                f"Tap {outside[0]} lies outside the verifier's {self.layers} layers", where="verifier.taps",
                remedy=f"choose ids from 1 to {self.layers - 1}",
            )  # fmt: skip
        if len(set(chosen)) != len(chosen):
            raise MustFix(
                f"The taps {list(chosen)} are not different layers", where=f"verifier.taps, {self.layers} layers",
                remedy="name three different layers",
            )  # fmt: skip
        return chosen

    def both_readings(self, taps: tuple[int, ...] | None) -> tuple[int, ...]:
        """Ids i and i+1 of every tap, ascending.

        A published head's ids are ambiguous (input or output of layer i), so the eval split keeps
        both and a head is scored under both. L is not to be had; the last layer has one reading.
        """
        chosen = self.checked_taps(taps)
        return tuple(sorted({tap for i in chosen for tap in (i, i + 1) if tap < self.layers}))


def default_taps(layers: int) -> tuple[int, int, int]:
    """What vLLM, SGLang and the EAGLE code take where nothing is said, as ids of layers' inputs."""
    return 2, layers // 2, layers - 3


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise MustFix("The folder is no checkpoint", where=str(path), remedy="name a folder with config.json and weights") from None
    except ValueError as error:
        raise MustFix(f"The file is not JSON: {error}", where=str(path), remedy="fetch the verifier again") from error


def _positive(text: dict[str, Any], key: str, model: Path) -> int:
    value = text.get(key)
    if not isinstance(value, int) or value < 1:
        raise MustFix(f"config.json does not say {key}", where=str(model / "config.json"), remedy="name the checkpoint of a decoder")
    return value


def _ending(names: list[str], end: str, model: Path) -> str:
    """The one tensor called `end`, with or without the prefix a multimodal checkpoint puts before it."""
    found = [name for name in names if name == end or name.endswith("." + end)]
    if len(found) != 1:
        raise MustFix(f"{len(found)} tensors are called {end}, one is needed", where=str(model), remedy="fetch the verifier again")
    return found[0]


def _refuse_unusable(config: dict[str, Any], text: dict[str, Any], names: list[str], model: Path) -> None:
    packed = any(name.endswith((".weight_packed", ".qweight")) for name in names)
    if packed and not (config.get("quantization_config") or text.get("quantization_config") or config.get("compression_config")):
        raise MustFix(
            "The weights are packed integers, but config.json has no quantization_config", where=str(model / "config.json"),
            remedy="restore it from the model's repository, vLLM would load noise",
        )  # fmt: skip


def weight_files(model: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order. Raises MustFix where one is missing."""
    index = model / INDEX
    if index.exists():
        files = [model / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    else:
        files = sorted(model.glob("*.safetensors"))
    missing = [path for path in files if not path.exists()]
    if missing or not files:
        raise MustFix(
            "Weights are missing", where=str(missing[0] if missing else model / "*.safetensors"), remedy="fetch the verifier again"
        )
    return files


def tensor_names(model: Path) -> list[str]:
    """Names of all tensors, from the index or the headers."""
    index = model / INDEX
    if index.exists():
        weight_files(model)
        return sorted(_read_json(index)["weight_map"])
    return sorted(name for path in weight_files(model) for name in _header(path) if name != "__metadata__")


def tensor_sizes(model: Path) -> dict[str, int]:
    """Name -> bytes of all tensors, from the headers."""
    sizes: dict[str, int] = {}
    for path in weight_files(model):
        for name, tensor in _header(path).items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                sizes[name] = end - begin
    return sizes


def read_tensor(model: Path, name: str) -> "Tensor":
    """One tensor of a checkpoint, mapped from its file. Raises MustFix where there is none of this name."""
    from safetensors import safe_open

    for path in weight_files(model):
        if name in _header(path):
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
    raise MustFix(f"There is no tensor {name}", where=str(model), remedy="fetch the verifier again")


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return json.loads(file.read(length))
    except (struct.error, ValueError, MemoryError, OverflowError) as error:
        raise MustFix("The weights file is damaged", where=str(path), remedy="fetch the verifier again") from error


def revision_of(model: Path) -> str:
    """Commit of a hub snapshot, else a sha256 over names, sizes and both ends of the weights files.

    Nobody reads 540 GB for a hash; a retrained or requantized checkpoint differs at its ends.
    """
    commit = re.search(r"/snapshots/([0-9a-f]{40})(?:/|$)", str(model.resolve()))
    if commit:
        return commit[1]
    digest = hashlib.sha256()
    for path in weight_files(model):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(SAMPLED_BYTES))
            file.seek(max(size - SAMPLED_BYTES, 0))
            digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()
