"""Kimi-K2.5 and the DeepSeek-V3 family as EAGLE-3 targets.

vLLM 0.16.0 has the EAGLE-3 proposer, but its DeepSeek models do not implement `SupportsEagle3`,
`SpeculativeConfig` has a list of target types without them, and the proposer looks for
`config.image_token_index`, which Kimi-K2.5 calls `media_placeholder_token_id`. Upstream has all
of it from 0.18.

Tap ids: id i is the residual stream at the INPUT of decoder layer i, 0 <= i <= L. vLLM's own
models (Llama and others) give ids 1 to L-1 only; `compat.aux_capture` refuses the rest there.
"""

import contextlib
import functools
from types import ModuleType

from compat import registry
from compat.importing import when_imported
from jobs.errors import MustFix

NAME = "kimi_k25_eagle3"
CONFIG = "vllm.config.vllm"
SPECULATIVE_CONFIG = "vllm.config.speculative"
DECODER = "vllm.model_executor.models.deepseek_v2"
MULTIMODAL = "vllm.model_executor.models.kimi_k25"
MULTIMODAL_CONFIG = "vllm.transformers_utils.configs.kimi_k25"

# Text model types whose decoder is DeepseekV2Model and whose targets are accepted. DeepSeek-V3.2
# and its relatives (sparse attention) share the class; nobody has tried them here.
TARGET_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")


class AcceptedTargetType(str):
    """A model type that also answers to `"llama" in model_type`, the test of vLLM's whitelist.

    It stands in the configuration only while a config validates itself (`VllmConfig` validates the
    speculative config inside it once more). Module level and reducible, so that a copy that got
    into a pickle on its way to a worker still loads.
    """

    def __contains__(self, part: object) -> bool:
        return part == "llama" or super().__contains__(part)  # type: ignore[arg-type]

    def __reduce__(self):
        return AcceptedTargetType, (str(self),)


def default_taps(layers: int) -> tuple[int, int, int]:
    """The three EAGLE-3 ids for a target of `layers` decoder layers, always three different ones.

    (2, L//2, L-3) as everywhere, which from 7 layers on is ascending; below that two of them
    coincide and the head's fusion layer would get two states instead of three.
    """
    if layers >= 7:
        return 2, layers // 2, layers - 3
    if layers >= 4:
        return 1, layers // 2, layers - 1
    raise MustFix(
        f"A target of {layers} layers has no three separate taps", where="EAGLE-3 taps", remedy="use a verifier of 4 or more layers"
    )


def refuse_pipeline_parallelism(stages: int) -> None:
    """Raise `MustFix` for more than one pipeline stage: 0.16.0 gives taps to the last one only."""
    if stages > 1:
        raise MustFix(
            f"EAGLE-3 taps cannot be read under pipeline parallelism (pipeline_parallel_size={stages})",
            where="vLLM 0.16.0 hands auxiliary states to the last stage only",
            remedy="set pipeline_parallel_size to 1 and use tensor or expert parallelism",
        )


def needed() -> bool:
    """Whether one of the patched places still lacks EAGLE-3 for these targets."""
    from importlib import import_module

    decoder = import_module(DECODER)
    try:
        multimodal = import_module(MULTIMODAL)
    except ImportError:
        multimodal = None
    classes = [decoder.DeepseekV2ForCausalLM] + ([multimodal.KimiK25ForConditionalGeneration] if multimodal else [])
    return any(_lacks_interface(model) for model in classes)


def apply() -> None:
    when_imported(SPECULATIVE_CONFIG, _patch_speculative_config)
    when_imported(CONFIG, _patch_config)
    when_imported(DECODER, _or_refuse_later(_patch_decoder))
    when_imported(MULTIMODAL, _or_refuse_later(_patch_multimodal))
    when_imported(MULTIMODAL_CONFIG, _patch_multimodal_config)


def ensure(model_type: str) -> None:
    """In a worker, before a model is loaded for taps: raise what the import of its module kept back."""
    if model_type in TARGET_TYPES:
        from importlib import import_module

        import_module(DECODER)
        registry.require(NAME)


def _lacks_interface(model: type) -> bool:
    """True if the class has no `set_aux_hidden_state_layers` but ours."""
    method = getattr(model, "set_aux_hidden_state_layers", None)
    return method is None or hasattr(method, registry.MARK)


def _or_refuse_later(patch):
    """Model modules: keep a refusal for the process that depends on it, see `registry.refuse_later`."""

    def patch_or_remember(module: ModuleType) -> None:
        try:
            patch(module)
        except MustFix as refusal:
            registry.refuse_later(NAME, refusal)

    return patch_or_remember


@contextlib.contextmanager
def _accepted(target):
    """While inside, the target's model type passes vLLM's whitelist, if it is one of `TARGET_TYPES`."""
    text_config = getattr(target, "hf_text_config", None)
    model_type = getattr(text_config, "model_type", None)
    if text_config is None or model_type not in TARGET_TYPES:
        yield
        return
    text_config.model_type = AcceptedTargetType(model_type)
    try:
        yield
    finally:
        text_config.model_type = model_type


def _patch_speculative_config(module: ModuleType) -> None:
    registry.expect(NAME, module.SpeculativeConfig.__post_init__, ["self"])
    validate = module.SpeculativeConfig.__init__

    @functools.wraps(validate)
    def __init__(self, *args, **fields):
        if fields.get("method") == "eagle3" and (parallel := fields.get("target_parallel_config")) is not None:
            refuse_pipeline_parallelism(parallel.pipeline_parallel_size)  # before vLLM says the draft cannot do it
        with _accepted(fields.get("target_model_config")):
            validate(self, *args, **fields)

    registry.replace(module.SpeculativeConfig, "__init__", __init__, NAME)


def _patch_config(module: ModuleType) -> None:
    validate = module.VllmConfig.__init__

    @functools.wraps(validate)
    def __init__(self, *args, **fields):
        with _accepted(getattr(fields.get("speculative_config"), "target_model_config", None)):
            validate(self, *args, **fields)

    registry.replace(module.VllmConfig, "__init__", __init__, NAME)


def _patch_decoder(module: ModuleType) -> None:
    if not _lacks_interface(module.DeepseekV2ForCausalLM):
        return
    registry.expect(NAME, module.DeepseekV2Model.forward, ["self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds"])
    registry.expect(NAME, module.DeepseekV2DecoderLayer.forward, ["self", "positions", "hidden_states", "residual", "llama_4_scaling"])
    registry.expect(NAME, module._get_llama_4_scaling, ["original_max_position_embeddings", "scaling_beta", "positions"])
    from compat.deepseek_v2_forward import forward

    module.DeepseekV2Model.aux_hidden_state_layers = ()
    registry.replace(module.DeepseekV2Model, "forward", forward, NAME)
    _implement_interface(module.DeepseekV2ForCausalLM, lambda model: model.model)


def _patch_multimodal(module: ModuleType) -> None:
    if _lacks_interface(module.KimiK25ForConditionalGeneration):
        _implement_interface(module.KimiK25ForConditionalGeneration, lambda model: model.language_model.model)


def _patch_multimodal_config(module: ModuleType) -> None:
    # A class property, not a value on the object: the configuration is pickled on its way to the workers.
    if not hasattr(module.KimiK25Config, "image_token_index"):
        module.KimiK25Config.image_token_index = property(lambda config: config.media_placeholder_token_id)


def _implement_interface(model_class: type, decoder_of) -> None:
    """Make `model_class` pass vLLM's `supports_eagle3` (interfaces.py): three flags, two methods."""

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Put out the residual stream at the input of these layers (0 to L, L being the last output)."""
        from vllm.distributed import get_pp_group

        refuse_pipeline_parallelism(get_pp_group().world_size)
        decoder = decoder_of(self)
        last = len(decoder.layers)
        outside = [layer for layer in layers if not 0 <= layer <= last]
        if outside:
            raise MustFix(
                f"Tap {outside[0]} lies outside the verifier's {last} layers", where="EAGLE-3 taps", remedy=f"use ids from 0 to {last}"
            )
        decoder.aux_hidden_state_layers = tuple(layers)

    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """The default taps, three different ones."""
        return default_taps(len(decoder_of(self).layers))

    for method in (set_aux_hidden_state_layers, get_eagle3_aux_hidden_state_layers):
        setattr(method, registry.MARK, NAME)
        setattr(model_class, method.__name__, method)
    registry.mark_in_place(NAME)
    model_class.supports_eagle3 = True
    for flag in ("has_own_lm_head", "has_own_embed_tokens"):
        if not hasattr(model_class, flag):
            setattr(model_class, flag, False)


SHIM = registry.Shim(
    name=NAME,
    of="vllm",
    patches=(
        f"{SPECULATIVE_CONFIG}.SpeculativeConfig.__init__",
        f"{CONFIG}.VllmConfig.__init__",
        f"{DECODER}.DeepseekV2Model.forward",
        f"{DECODER}.DeepseekV2ForCausalLM",
        f"{MULTIMODAL}.KimiK25ForConditionalGeneration",
        f"{MULTIMODAL_CONFIG}.KimiK25Config.image_token_index",
    ),
    why="Kimi-K2.5 and DeepSeek-V3 do not implement SupportsEagle3, so no EAGLE-3 head can be served and no taps read",
    upstream="vllm 0.18",
    needed=needed,
    apply=apply,
)
