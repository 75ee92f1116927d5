"""A head on disk: the `speculators` form (what we publish), the `LlamaForCausalLMEagle3` form, and ours.

Our names are the speculators form's, so only the second form renames. Every tensor of a file must stand
in this table and every tensor a head needs must be in the file; nothing is loaded by `strict=False`,
which with the wrong prefix loads a third of a head without a word.

==========================================  =========================================  ====================
speculators form = `Eagle3Head.state_dict`  `LlamaForCausalLMEagle3` form              shape
==========================================  =========================================  ====================
embed_tokens.weight (*)                     embed_tokens.weight (*)                    [V, H]
fc.weight                                   fc.weight                                  [H, 3H]
layers.0.input_layernorm.weight             midlayer.input_layernorm.weight            [H]
layers.0.hidden_norm.weight                 midlayer.hidden_norm.weight                [H]
layers.0.post_attention_layernorm.weight    midlayer.post_attention_layernorm.weight   [H]
layers.0.self_attn.q_proj.weight            midlayer.self_attn.q_proj.weight           [heads*D, 2H]
layers.0.self_attn.k_proj.weight            midlayer.self_attn.k_proj.weight           [kv_heads*D, 2H]
layers.0.self_attn.v_proj.weight            midlayer.self_attn.v_proj.weight           [kv_heads*D, 2H]
layers.0.self_attn.o_proj.weight            midlayer.self_attn.o_proj.weight           [H, heads*D]
layers.0.mlp.gate_proj.weight               midlayer.mlp.gate_proj.weight              [I, H]
layers.0.mlp.up_proj.weight                 midlayer.mlp.up_proj.weight                [I, H]
layers.0.mlp.down_proj.weight               midlayer.mlp.down_proj.weight              [H, I]
norm.weight                                 norm.weight                                [H]
lm_head.weight                              lm_head.weight                             [Vd, H]
d2t (+)                                     d2t (+)                                    [Vd] int64 offsets
t2d (+)                                     t2d (+)                                    [V] bool
verifier_lm_head.weight (-)                                                            [Vd, H]
verifier_norm.weight (-)                                                               [H]
==========================================  =========================================  ====================

(*) missing in most published heads: the verifier's is taken. (+) both missing with Vd == V is the
identity; d2t missing with Vd < V is refused (vLLM would map onto the first Vd ids and acceptance
collapses); t2d alone missing is derived. (-) frozen copies that speculators' trainer saves along; dropped.

**What a config does not say.** `norm_before_residual` missing is False in the Llama form and True in the
speculators form: that is how vLLM 0.16.0 reads them (`configs/speculators/algos.py`), although
speculators' own class defaults to False.

**Tap ids** are read from the top level, else from `eagle_config`. What they mean in a published head is
ambiguous (input or output of layer i), so the caller may override them; `tap_readings` gives both.
Our exports are not ambiguous: top level for vLLM (input of layer i; it reads no other place), and in
the Llama form `eagle_config` holds i-1 for SGLang, which adds 1 to configured ids and reads only that.

**Length.** Both forms are written with `max_position_embeddings` 262,144, never the training length: once
one sequence is past it vLLM stops drafting for the whole batch, silently. A YaRN scaling that leaves
`original_max_position_embeddings` to `max_position_embeddings` gets it spelt out on reading, or the
longer length would change its frequencies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from jobs.draft.export import EXPORTED_LENGTH, LLAMA_PREFIX, OUR_PREFIX, save_llama_eagle3, save_speculators
from jobs.draft.model import Eagle3Head, HeadConfig
from jobs.draft.vocabulary import check_maps, draft_ids_of
from jobs.draft.warm_start import WarmStart, warm_start
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix
from jobs.storage.files import read_json
from jobs.wording import counted

__all__ = [
    "LoadedHead",
    "WarmStart",
    "load_head",
    "read_config",
    "read_head",
    "save_llama_eagle3",
    "save_speculators",
    "tap_readings",
    "warm_start",
]

LLAMA_FORM = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
FROZEN_COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")
ANOTHER = "use a head in the LlamaForCausalLMEagle3 or the speculators form"


@dataclass(frozen=True)
class LoadedHead:
    """A head with what its files said beside the weights.

    form: "speculators" or "llama". own_embedding: the file had one. declared_taps: as written, None if not.
    """

    head: Eagle3Head
    form: str
    own_embedding: bool
    declared_taps: tuple[int, ...] | None


def load_head(
    folder: Path,
    *,
    verifier: VerifierWeights | None = None,
    taps: tuple[int, int, int] | None = None,
    default_taps: tuple[int, int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> Eagle3Head:
    """The head of a folder; `read_head` tells more about it. Arguments and errors are the same."""
    return read_head(folder, verifier=verifier, taps=taps, default_taps=default_taps, dtype=dtype).head


def read_head(
    folder: Path,
    *,
    verifier: VerifierWeights | None = None,
    taps: tuple[int, int, int] | None = None,
    default_taps: tuple[int, int, int] | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedHead:
    """Load a head of either form from `config.json` and its weights.

    Args:
        folder: with model.safetensors, its shards, or pytorch_model.bin.
        verifier: gives the embedding a file lacks, and what vocabulary and width must be.
        taps: overrides the tap ids of the file (the other reading).
        default_taps: where the file names none, as vLLM does: (2, L//2, L-3).
        dtype: of the weights; None keeps the file's. The embedding always keeps its own.

    Raises:
        MustFix: not this kind of head, an unknown or missing tensor, a shape, vocabulary or width that does
            not fit, no tap ids, a file that cannot be read.
    """
    folder = Path(folder)
    raw = read_json(folder / "config.json")
    form, config, declared = read_config(raw, where=str(folder), taps=taps, default_taps=default_taps)
    tensors = {_our_name(name): tensor for name, tensor in read_tensors(folder).items()}
    own_embedding = "embed_tokens.weight" in tensors
    if verifier is not None:
        _fits_verifier(config, verifier, str(folder))
        if not own_embedding:
            tensors["embed_tokens.weight"] = verifier.embedding
    tensors = _complete_maps(tensors, config, str(folder))
    head = Eagle3Head(config)
    _account(head, tensors, str(folder))
    kept = {name: tensors[name] for name in head.state_dict()}
    floats = {t.dtype for n, t in kept.items() if t.is_floating_point() and n != "embed_tokens.weight"}
    wanted = dtype or (floats.pop() if len(floats) == 1 else torch.float32)  # a mixture is widened, which loses nothing
    for name, tensor in kept.items():
        if tensor.is_floating_point() and name != "embed_tokens.weight":
            kept[name] = tensor.to(wanted)
    head.load_state_dict(kept, strict=True, assign=True)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name != "embed_tokens.weight")
    return LoadedHead(head, form, own_embedding, declared)


def tap_readings(taps: tuple[int, ...], layers: int) -> list[tuple[int, ...]]:
    """Both meanings of published tap ids, as EAGLE-3 ids: i (input of layer i) and i+1 (its output).

    The second is left out where it would lie outside the verifier's layers.
    """
    shifted = tuple(t + 1 for t in taps)
    return [tuple(taps), shifted] if max(shifted) < layers else [tuple(taps)]


def names_taps_for_sglang_only(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json holds tap ids in `eagle_config` alone: SGLang adds 1 to them, vLLM takes its default instead."""
    return not raw.get(TAPS_KEY) and bool((raw.get("eagle_config") or {}).get(TAPS_KEY))


def read_config(
    raw: Mapping[str, Any], *, where: str, taps: tuple[int, int, int] | None = None, default_taps: tuple[int, int, int] | None = None
) -> tuple[str, HeadConfig, tuple[int, ...] | None]:
    """config.json of either form -> (form, our config, tap ids as written)."""
    form = "speculators" if "speculators_model_type" in raw else "llama"
    layer = dict(raw.get("transformer_layer_config", {}) if form == "speculators" else raw)
    _is_supported(form, raw, layer, where)
    from transformers import LlamaConfig

    try:  # transformers' class knows the defaults a shortened config leaves out
        llama = LlamaConfig(**{k: v for k, v in layer.items() if k not in ("architectures", "model_type", "torch_dtype", "dtype")})
    except (KeyError, TypeError, ValueError) as error:
        raise MustFix(f"The head's config.json is not a Llama layer: {error}", where=where, remedy=ANOTHER) from error
    declared = raw.get(TAPS_KEY) or (raw.get("eagle_config") or {}).get(TAPS_KEY)
    declared = tuple(int(t) for t in declared) if declared else None
    chosen = taps or declared or default_taps
    if chosen is None:
        raise MustFix("The head does not say which layers it taps", where=where, remedy="give its tap ids")
    if len(chosen) != 3:
        raise MustFix(f"The head taps {len(chosen)} layers, {list(chosen)}, and an EAGLE-3 head taps three", where=where, remedy=ANOTHER)
    theta, scaling = _rope(layer, llama)
    config = HeadConfig(
        vocab_size=llama.vocab_size,
        draft_vocab_size=raw.get("draft_vocab_size") or llama.vocab_size,
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        heads=llama.num_attention_heads,
        kv_heads=llama.num_key_value_heads,
        head_dim=llama.head_dim,
        rms_norm_eps=llama.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        taps=tuple(chosen),
        norm_before_residual=bool(raw.get("norm_before_residual", form == "speculators")),
        max_position_embeddings=max(llama.max_position_embeddings, EXPORTED_LENGTH),
    )
    return form, config, declared


def _is_supported(form: str, raw: Mapping[str, Any], layer: Mapping[str, Any], where: str) -> None:
    """Refuse what this head class would load and compute wrongly."""
    architectures = list(raw.get("architectures") or [])
    target_width = raw.get("target_hidden_size")
    problem = None
    if form == "speculators" and raw["speculators_model_type"] != "eagle3":
        problem = f"a speculators model of type {raw['speculators_model_type']}"
    elif form == "llama" and not any(a in LLAMA_FORM for a in architectures):
        problem = f"the architecture {architectures or 'unnamed'}"
    elif layer.get("kv_lora_rank") or layer.get("model_type", "llama") != "llama":
        problem = f"a layer of type {layer.get('model_type')}"
    if problem:
        raise MustFix(f"The head has {problem}, and only Llama-form EAGLE-3 heads are supported, no MLA draft", where=where, remedy=ANOTHER)
    if layer.get("num_hidden_layers", 1) != 1:
        problem = counted(layer["num_hidden_layers"], "layers")
    elif layer.get("hidden_act", "silu") != "silu":
        problem = f"the activation {layer['hidden_act']}"
    elif layer.get("attention_bias") or layer.get("mlp_bias"):
        problem = "biases in its layer"
    elif target_width not in (None, layer.get("hidden_size")):
        problem = f"width {layer.get('hidden_size')} for a verifier of width {target_width}"
    elif (raw.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        problem = "no auxiliary hidden states (it is an EAGLE-1 head)"
    if problem:
        raise MustFix(f"The head has {problem}, which is not supported", where=where, remedy=ANOTHER)


def _rope(layer: Mapping[str, Any], llama: Any) -> tuple[float, dict | None]:
    """theta and scaling; transformers 5 writes both into `rope_parameters`."""
    parameters = layer.get("rope_parameters")
    theta = (parameters or {}).get("rope_theta", llama.rope_theta)
    scaling = dict(parameters if parameters is not None else layer.get("rope_scaling") or {})
    scaling.pop("rope_theta", None)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return float(theta), None
    scaling.setdefault("rope_type", kind)
    scaling.pop("type", None)
    if kind == "yarn":
        scaling.setdefault("original_max_position_embeddings", llama.max_position_embeddings)
    return float(theta), scaling


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, by name, on CPU."""
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            files = sorted({folder / name for name in read_json(folder / index)["weight_map"].values()})
            break
    else:
        files = [folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file()][:1]
    if not files:
        raise MustFix("The head has no model.safetensors and no pytorch_model.bin", where=str(folder), remedy="fetch it again")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            part = load_file(file) if file.suffix == ".safetensors" else torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # safetensors, pickle and zip each have their own
            if not isinstance(error, (OSError, SafetensorError, RuntimeError, EOFError)) and "pickle" not in type(error).__module__:
                raise
            raise MustFix(f"{file.name} cannot be read: {error}", where=str(folder), remedy="fetch it again") from error
        tensors.update(part)
    return tensors


def _our_name(name: str) -> str:
    return OUR_PREFIX + name.removeprefix(LLAMA_PREFIX) if name.startswith(LLAMA_PREFIX) else name


def _fits_verifier(config: HeadConfig, verifier: VerifierWeights, where: str) -> None:
    vocab_size, hidden_size = verifier.embedding.shape
    if (config.vocab_size, config.hidden_size) != (vocab_size, hidden_size):
        raise MustFix(
            f"The head has vocabulary {config.vocab_size} and hidden size {config.hidden_size}, the verifier {vocab_size} and {hidden_size}",
            where=where,
            remedy="take a head made for this verifier",
        )


def _complete_maps(tensors: dict[str, Tensor], config: HeadConfig, where: str) -> dict[str, Tensor]:
    """Both vocabulary maps, derived where they follow from what is there."""
    tensors = dict(tensors)
    size, vocab_size = config.draft_vocab_size, config.vocab_size
    if "d2t" not in tensors:
        if size != vocab_size:
            raise MustFix(
                f"The head drafts {size} of {vocab_size} ids and has no d2t to tell which",
                where=where,
                remedy="take a checkpoint that has it",
            )
        tensors["d2t"] = torch.zeros(size, dtype=torch.int64)
    tensors["d2t"] = tensors["d2t"].to(torch.int64)
    if tensors["d2t"].shape != (size,) or tensors.get("t2d", torch.empty(vocab_size)).shape != (vocab_size,):
        raise MustFix(f"d2t {tuple(tensors['d2t'].shape)} or t2d do not fit {size} draft ids of {vocab_size}", where=where, remedy=ANOTHER)
    if "t2d" not in tensors:
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[draft_ids_of(tensors["d2t"]).clamp(0, vocab_size - 1)] = True
        tensors["t2d"] = mask
    tensors["t2d"] = tensors["t2d"].to(torch.bool)
    check_maps(tensors["d2t"], tensors["t2d"], where=where)
    return tensors


def _account(head: Eagle3Head, tensors: Mapping[str, Tensor], where: str) -> None:
    """Every tensor of the file has a place and every place a tensor of its shape."""
    wanted = {name: tuple(t.shape) for name, t in head.state_dict().items()}
    missing = sorted(set(wanted) - set(tensors))
    unknown = sorted(set(tensors) - set(wanted) - set(FROZEN_COPIES))
    if unknown:
        kind = "only Llama-form heads are supported, no MLA draft" if any("kv_a_proj" in n for n in unknown) else "no EAGLE-3 head has them"
        raise MustFix(
            f"The head holds {counted(len(unknown), 'unknown tensors')}, the first is {unknown[0]}; {kind}", where=where, remedy=ANOTHER
        )
    if missing:
        raise MustFix(
            f"The head lacks {counted(len(missing), 'tensors')}, the first is {missing[0]}",
            where=where,
            remedy="take a complete checkpoint or give the verifier",
        )
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise MustFix(
                f"{name} has shape {tuple(tensors[name].shape)} and its config.json asks for {shape}", where=where, remedy=ANOTHER
            )
