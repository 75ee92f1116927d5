"""vLLM's executor as speculators 0.3.0 calls it.

- `collective_rpc(unique_reply_rank=0)` returns the one reply in 0.16.0, no longer a list of one;
  0.3.0 takes `[0]` of it, which then is the first layer instead of the list of layers.
- `execute_model` returns None in 0.16.0 and the step must be ended by `sample_tokens`, or the next
  one is refused; 0.3.0 does not know `sample_tokens`.

0.4.0 does both by itself. The executor class is replaced in the generator's module only.
"""

from types import ModuleType

from compat import registry
from compat.importing import when_imported

NAME = "speculators_executor"
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"


def needed() -> bool:
    """Whether the installed generator calls the executor in the old way."""
    from importlib import import_module

    module = import_module(GENERATOR)
    return _indexes_reply(module) or _leaves_step_open(module)


def apply() -> None:
    when_imported(GENERATOR, _patch)


def _indexes_reply(module: ModuleType) -> bool:
    return "captured_states_list[0]" in registry.source(module.VllmHiddenStatesGenerator.generate)


def _leaves_step_open(module: ModuleType) -> bool:
    return "sample_tokens" not in registry.source(module.VllmHiddenStatesGenerator.generate)


def _patch(module: ModuleType) -> None:
    indexes_reply, leaves_step_open = _indexes_reply(module), _leaves_step_open(module)
    if not (indexes_reply or leaves_step_open):
        return
    executor = module.MultiprocExecutor
    registry.expect(
        NAME,
        executor.collective_rpc,
        ["self", "method", "timeout", "args", "kwargs", "non_block", "unique_reply_rank", "kv_output_aggregator"],
    )
    registry.expect(NAME, executor.execute_model, ["self", "scheduler_output", "non_block"])
    registry.expect(NAME, executor.sample_tokens, ["self", "grammar_output", "non_block"])

    class MultiprocExecutor(executor):
        def collective_rpc(self, method, *args, **options):
            reply = super().collective_rpc(method, *args, **options)
            return [reply] if indexes_reply and method == "_get_captured_states" else reply

        def execute_model(self, scheduler_output, non_block=False):
            output = super().execute_model(scheduler_output, non_block)
            return self.sample_tokens(None) if leaves_step_open and output is None else output

    registry.replace(module, "MultiprocExecutor", MultiprocExecutor, NAME)


SHIM = registry.Shim(
    name=NAME,
    of="speculators",
    patches=(f"{GENERATOR}.MultiprocExecutor",),
    why="the generator takes [0] of a bare reply and does not end a step with sample_tokens",
    upstream="speculators 0.4.0",
    needed=needed,
    apply=apply,
)
