"""speculators' VllmHiddenStatesGenerator on the tiny verifier: with every shim, and what fails where one is taken away.

One start of its worker processes serves all looks: a shim's original is called on the running engine.
"""

import torch
from deepseek_reference import Reference, largest_error
from probes import outcome

from jobs.verifier.tiny import CHECKPOINT

LAYERS = [1, 4, 6, 9]  # the generator's ids: OUTPUT of a layer, so EAGLE-3's 2, 5, 7 and 10


def look(release: str) -> dict:
    import vllm  # noqa: F401  (its own set-up before speculators')

    import compat

    seen = before_any_shim()
    compat.apply()
    import speculators.data_generation.vllm_hidden_states_generator as module

    from compat.doctor import examine
    from compat.registry import installed, original, shims

    class Generator(module.VllmHiddenStatesGenerator):
        def _create_vllm_config(self, **arguments):
            config = super()._create_vllm_config(**arguments)
            config.model_config.dtype = torch.float32
            return config

    generator = Generator(str(CHECKPOINT), layer_ids=LAYERS, max_model_len=512)
    reference = Reference(CHECKPOINT)
    random = torch.Generator().manual_seed(1)

    def sequences(*lengths: int) -> list[list[int]]:
        return [torch.randint(0, 1500, (length,), generator=random).tolist() for length in lengths]

    def worst(given: list[list[int]], results: list[dict]) -> float:
        errors = []
        for ids, result in zip(given, results, strict=True):
            states = torch.stack(result["hidden_states"][:3], dim=1)  # [n, 3, H]
            if result["input_ids"].tolist() != ids or len(states) != len(ids):
                return float("inf")
            errors.append(largest_error(states, reference.states(ids, (2, 5, 7))[0]))
        return max(errors)

    # 34 sequences of 300 tokens: more than 32 running requests, and a pass of 8192 tokens ends inside the 28th.
    few, many, long = sequences(30, 7, 100), sequences(*range(10, 24)), sequences(*[300] * 34)
    unordered = original(module.VllmHiddenStatesGenerator.generate)
    seen |= {
        "release": release,
        "few": worst(few, generator.generate(few)),
        "fourteen": worst(many, generator.generate(many)),
        "two_passes_and_over_32": worst(long, generator.generate(long)),
        "fourteen_without_shim": worst(many, unordered(generator, many)),
        "versions": [installed("speculators"), installed("vllm")],
        "shims": {shim.name: examine(shim) for shim in shims()},
        "limit": generator.vllm_config.model_config.multimodal_config.limit_per_prompt["vision_chunk"].count,
    }
    seen["thirty_four_without_shim"] = outcome(lambda: wrong_rows(worst(long, unordered(generator, long))))
    if seen["shims"]["speculators_worker"]["applied"]:
        seen["nested_decoder_without_shim"] = generator.executor.collective_rpc(set_up_as_released)[0]
    if seen["shims"]["speculators_executor"]["applied"]:
        generator.executor.__class__ = original(module.MultiprocExecutor)
        seen["executor_without_shim"] = outcome(lambda: [unordered(generator, few) for _ in range(2)])
    else:
        generator.executor.shutdown()
    return seen


def wrong_rows(worst: float) -> None:
    if worst > 1e-3:
        raise ValueError(f"wrong rows: relative error {worst}")


def set_up_as_released(worker) -> str:
    """Runs in the worker process: the extension's own set-up on the real model."""
    from compat.registry import original

    extension = worker.worker
    return outcome(lambda: original(type(extension)._setup_hidden_states_capture)(extension, LAYERS))


def before_any_shim() -> dict:
    """What the generator does first, on this checkpoint and machine, without help."""
    from transformers import AutoConfig, AutoTokenizer

    return {
        "config_without_shim": outcome(lambda: AutoConfig.from_pretrained(str(CHECKPOINT), trust_remote_code=True)),
        "tokenizer_without_shim": outcome(lambda: AutoTokenizer.from_pretrained(str(CHECKPOINT), trust_remote_code=False)),
        "memory_without_shim": outcome(lambda: torch.cuda.mem_get_info()),
    }
