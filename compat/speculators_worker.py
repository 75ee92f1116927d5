"""The worker extension of speculators 0.3.0 on a model whose decoder is nested.

0.3.0 looks for the decoder at `model.model`, which Kimi-K2.5 has at `get_language_model().model`,
and its replaced forward calls `get_input_embeddings`, which vLLM 0.16.0 has renamed to
`embed_input_ids`. 0.4.0 does both by itself. (It also demands SupportsEagle3, which
`compat.kimi_k25_eagle3` gives.)
"""

import functools
from types import ModuleType

from compat import registry
from compat.importing import when_imported

NAME = "speculators_worker"
EXTENSION = "speculators.data_generation.custom_worker"


def needed() -> bool:
    """Whether the installed worker extension looks at `model.model` only."""
    from importlib import import_module

    return _looks_at_top_only(import_module(EXTENSION))


def apply() -> None:
    when_imported(EXTENSION, _patch)


def _looks_at_top_only(module: ModuleType) -> bool:
    return "get_language_model" not in registry.source(module.HiddenStatesWorkerExtension._setup_hidden_states_capture)


def _patch(module: ModuleType) -> None:
    extension = module.HiddenStatesWorkerExtension
    if not _looks_at_top_only(module):
        return
    registry.expect(NAME, extension._setup_hidden_states_capture, ["self", "layer_ids"])
    registry.expect(NAME, module._patched_forward, ["self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds"])
    set_up = extension._setup_hidden_states_capture

    @functools.wraps(set_up)
    def _setup_hidden_states_capture(self, layer_ids: list[int]) -> None:
        runner, whole = self.model_runner, self.model_runner.model
        language_model = whole.get_language_model() if hasattr(whole, "get_language_model") else whole
        decoder = language_model.model
        if not hasattr(decoder, "get_input_embeddings"):
            decoder.get_input_embeddings = decoder.embed_input_ids
        runner.model = language_model
        try:
            set_up(self, layer_ids)
        finally:
            runner.model = whole

    registry.replace(extension, "_setup_hidden_states_capture", _setup_hidden_states_capture, NAME)


SHIM = registry.Shim(
    name=NAME,
    of="speculators",
    patches=(f"{EXTENSION}.HiddenStatesWorkerExtension._setup_hidden_states_capture",),
    why="the worker extension does not find Kimi-K2.5's nested decoder and calls a method vLLM has renamed",
    upstream="speculators 0.4.0",
    needed=needed,
    apply=apply,
)
