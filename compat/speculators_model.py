"""speculators' `VllmHiddenStatesGenerator` on a Kimi-K2.5 checkpoint.

Three things stand in the way in 0.3.0 and in 0.4.0.1:

- `AutoConfig` does not know the model type `kimi_k25`, and a checkpoint need not ship code for it;
  vLLM has the class and it is registered.
- the tokenizer, Python code in the checkpoint, is loaded without `trust_remote_code`.
- start-up profiles the vision tower with the largest images (3000 x 3000) although the generator
  is given token ids only: the limit for `vision_chunk` is set to 0.
"""

from types import ModuleType

from compat import registry
from compat.importing import when_imported

NAME = "speculators_model"
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
MODEL_TYPE = "kimi_k25"


def needed() -> bool:
    """Whether one of the three still stands in the way of the installed generator."""
    from importlib import import_module

    module = import_module(GENERATOR)
    return _unknown_to_transformers() or _profiles_images(module) or _distrusts_tokenizer(module)


def apply() -> None:
    when_imported(GENERATOR, _patch)


def _unknown_to_transformers() -> bool:
    """True unless transformers itself brings a class for the model type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return MODEL_TYPE not in CONFIG_MAPPING_NAMES


def _profiles_images(module: ModuleType) -> bool:
    return "limit_mm_per_prompt" not in registry.source(module.VllmHiddenStatesGenerator._create_vllm_config)


def _distrusts_tokenizer(module: ModuleType) -> bool:
    return "AutoTokenizer.from_pretrained(model_path)" in registry.source(module.VllmHiddenStatesGenerator.__init__)


def _patch(module: ModuleType) -> None:
    generator = module.VllmHiddenStatesGenerator
    arguments = ["self", "model_path", "layer_ids", "max_model_len", "gpu_memory_utilization", "tensor_parallel_size"]
    registry.expect(NAME, generator.__init__, arguments, [*arguments, "max_num_batched_tokens"])
    if _unknown_to_transformers():
        from transformers import AutoConfig
        from vllm.transformers_utils.configs import KimiK25Config

        AutoConfig.register(MODEL_TYPE, KimiK25Config, exist_ok=True)
        registry.mark_in_place(NAME)
    if _distrusts_tokenizer(module):
        registry.replace(module, "AutoTokenizer", _trusting(module.AutoTokenizer), NAME)
    if _profiles_images(module):
        registry.replace(module, "ModelConfig", _without_images(module.ModelConfig), NAME)


def _trusting(auto_tokenizer: type) -> type:
    class AutoTokenizer(auto_tokenizer):
        """The generator trusts the model's code already when it reads the config; so also the tokenizer's."""

        @classmethod
        def from_pretrained(cls, *args, **options):
            return auto_tokenizer.from_pretrained(*args, **({"trust_remote_code": True} | options))

    return AutoTokenizer


def _without_images(model_config: type):
    def ModelConfig(**fields):
        from transformers import AutoConfig

        if AutoConfig.from_pretrained(fields["model"], trust_remote_code=True).model_type == MODEL_TYPE:
            fields.setdefault("limit_mm_per_prompt", {"vision_chunk": 0})
        return model_config(**fields)

    return ModelConfig


SHIM = registry.Shim(
    name=NAME,
    of="speculators",
    patches=(f"{GENERATOR}.AutoTokenizer", f"{GENERATOR}.ModelConfig", "transformers.AutoConfig (registration)"),
    why="the generator cannot read a Kimi-K2.5 checkpoint: model type, tokenizer code, image profiling",
    upstream="none yet; later releases of speculators drop the generator",
    needed=needed,
    apply=apply,
)
