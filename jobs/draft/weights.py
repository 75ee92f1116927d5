"""The three tensors of the verifier that training reads: embedding, final norm, output head.

Read by name from the checkpoint's safetensors shards; the model itself is never built (540 GB for
1.2 billion trained parameters). The name may carry a prefix: `language_model.` in Kimi-K2.5, whose
decoder sits beside a vision tower.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from jobs.errors import MustFix

PREFIXES = ("", "language_model.", "model.language_model.")
EMBEDDING = ("model.embed_tokens.weight", "embed_tokens.weight")
FINAL_NORM = ("model.norm.weight", "norm.weight")
LM_HEAD = ("lm_head.weight",)


@dataclass(frozen=True)
class VerifierWeights:
    """embedding `[V, H]`, final_norm `[H]`, lm_head `[V, H]`, in the checkpoint's dtype, on CPU."""

    embedding: Tensor
    final_norm: Tensor
    lm_head: Tensor

    @classmethod
    def read(cls, model: Path) -> "VerifierWeights":
        """From a checkpoint folder; a tied output head falls back to the embedding.

        MustFix: no safetensors, a tensor that is missing (a head missing without
        `tie_word_embeddings` included), shapes that do not fit each other.
        """
        model = Path(model)
        shards = _shards(model)
        embedding = _read(model, shards, EMBEDDING)
        final_norm = _read(model, shards, FINAL_NORM)
        if embedding is None or final_norm is None:
            name = (EMBEDDING if embedding is None else FINAL_NORM)[0]
            raise MustFix(
                f"no tensor {name!r} in the checkpoint, with or without a language_model prefix",
                where=str(model),
                remedy="point verifier.model at a complete checkpoint",
            )
        lm_head = _read(model, shards, LM_HEAD)
        if lm_head is None:
            if not _tied(model):
                raise MustFix(
                    "no tensor 'lm_head.weight' in the checkpoint, and its config does not tie it to the embedding",
                    where=str(model),
                    remedy="fetch the missing shard",
                )
            lm_head = embedding
        weights = cls(embedding, final_norm, lm_head)
        weights.check(*embedding.shape)
        return weights

    def check(self, vocab_size: int, hidden_size: int) -> None:
        """MustFix where the tensors are not those of a verifier of this vocabulary and width."""
        wanted = {
            "embedding": (self.embedding, (vocab_size, hidden_size)),
            "final norm": (self.final_norm, (hidden_size,)),
            "lm_head": (self.lm_head, (vocab_size, hidden_size)),
        }
        for name, (tensor, shape) in wanted.items():
            if tuple(tensor.shape) != shape:
                raise MustFix(
                    f"the verifier's {name} has shape {tuple(tensor.shape)} where {shape} is needed",
                    where="verifier checkpoint against the draft head",
                    remedy="use a head and a verifier that belong together",
                )


def _shards(model: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or the single file."""
    index = model / "model.safetensors.index.json"
    if index.is_file():
        return {name: model / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    names: dict[str, Path] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            names.update(dict.fromkeys(shard.keys(), file))
    if not names:
        raise MustFix("no safetensors file in the verifier's folder", where=str(model), remedy="run the fetch stage")
    return names


def _read(model: Path, shards: dict[str, Path], candidates: tuple[str, ...]) -> Tensor | None:
    for name in (prefix + candidate for candidate in candidates for prefix in PREFIXES):
        if name not in shards:
            continue
        if not shards[name].is_file():
            raise MustFix(f"shard {shards[name].name} of tensor {name!r} is missing", where=str(model), remedy="run the fetch stage")
        with safe_open(shards[name], "pt") as shard:
            return shard.get_tensor(name)
    return None


def _tied(model: Path) -> bool:
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config") or {}
    return bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
