"""Auxiliary hidden states without a drafter: taps named in `additional_config`.

`vllm_config.additional_config["eagle3_job_taps"] = [2, 30, 58]` (EAGLE-3 ids, ascending) makes
the target's forward return `(hidden [N, H], [aux [N, H], ...])`, one state a tap in ascending
order, on CPU and GPU, eager and compiled, with and without a speculative config; they are in
`model_runner.execute_model_state.aux_hidden_states` between execute_model and sample_tokens.

Why it needs a shim: vLLM 0.16.0 expects a tuple from the model only if an EAGLE-3 drafter is
configured (`GPUModelRunner.use_aux_hidden_state_outputs`), and the CPU runner does not even then
pass the ids on. Why `additional_config`: it is part of the compile-cache key, which otherwise
does not contain the tap ids, and a graph with other taps would be loaded from the cache without
a word. For the same reason a drafter's own ids are written there too (`eagle3_job_drafter_taps`).
With a drafter the model puts out the union, and the proposer is handed its own states only.
"""

import functools
import os
from types import ModuleType

from compat import kimi_k25_eagle3, registry
from compat.importing import when_imported
from jobs.errors import MustFix

NAME = "aux_capture"
KEY = "eagle3_job_taps"
DRAFTER_KEY = "eagle3_job_drafter_taps"
CONFIG = "vllm.config.vllm"
RUNNER = "vllm.v1.worker.gpu_model_runner"
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"


def capture_taps(vllm_config) -> tuple[int, ...]:
    """The EAGLE-3 ids asked for in `additional_config`, () for none.

    Raises `MustFix` unless they are ascending integers from 0.
    """
    extra = vllm_config.additional_config
    taps = (extra.get(KEY) or ()) if isinstance(extra, dict) else ()
    whole = all(isinstance(tap, int) and not isinstance(tap, bool) and tap >= 0 for tap in taps)
    if not whole or list(taps) != sorted(set(taps)):
        raise MustFix(
            f"Taps {list(taps)} are not ascending layer ids",
            where=f"additional_config[{KEY!r}]",
            remedy="name each id once, in ascending order, from 0 to the number of layers",
        )
    return tuple(taps)


def drafter_taps(vllm_config) -> tuple[int, ...]:
    """The ids an EAGLE-3 drafter reads: its config's top-level ids, else the target's default; () without one."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "eagle3":
        return ()
    named = getattr(speculative.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None)
    if named:
        return tuple(sorted(set(named)))
    model_type = vllm_config.model_config.hf_text_config.model_type
    if model_type in kimi_k25_eagle3.TARGET_TYPES:
        return kimi_k25_eagle3.default_taps(vllm_config.model_config.hf_text_config.num_hidden_layers)
    return ()  # another target's own default: known only once the model is there


def needed() -> bool:
    """Whether the runner gives out taps only with a drafter: no release does otherwise so far."""
    from importlib import import_module

    runner = import_module(RUNNER).GPUModelRunner
    return "aux_hidden_states" in registry.parameters(runner.propose_draft_token_ids)


def apply() -> None:
    when_imported(CONFIG, _patch_config)
    when_imported(RUNNER, _patch_runner)
    when_imported(CPU_RUNNER, _patch_cpu_runner)


def _check(vllm_config) -> None:
    """Refuse, in the driver and before anything is loaded, what would give wrong states or none."""
    parallel = vllm_config.parallel_config
    kimi_k25_eagle3.refuse_pipeline_parallelism(parallel.pipeline_parallel_size)
    if parallel.use_ubatching:
        raise MustFix(
            "EAGLE-3 taps cannot be read with micro-batches (enable_dbo, ubatch_size)", where="vLLM 0.16.0", remedy="switch them off"
        )
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("", "0"):
        raise MustFix("EAGLE-3 taps are read from vLLM's first model runner", where="VLLM_USE_V2_MODEL_RUNNER", remedy="unset it")
    text_config = vllm_config.model_config.hf_text_config
    if str(vllm_config.model_config.dtype) == "torch.float16" and text_config.model_type in kimi_k25_eagle3.TARGET_TYPES:
        raise MustFix("In float16 vLLM rescales DeepSeek's residual, and the taps with it", where="dtype", remedy="use bfloat16 or float32")


def _patch_config(module: ModuleType) -> None:
    registry.expect(NAME, module.VllmConfig.__post_init__, ["self"])
    finish = module.VllmConfig.__post_init__

    def __post_init__(self) -> None:
        if capture_taps(self):
            _check(self)
        if isinstance(self.additional_config, dict) and (taps := drafter_taps(self)):
            self.additional_config = self.additional_config | {DRAFTER_KEY: list(taps)}  # the caller's dict stays his
        finish(self)

    registry.replace(module.VllmConfig, "__post_init__", __post_init__, NAME)


def _patch_runner(module: ModuleType) -> None:
    runner = module.GPUModelRunner
    registry.expect(NAME, runner.__init__, ["self", "vllm_config", "device"])
    registry.expect(NAME, runner.load_model, ["self", "eep_scale_up"])
    registry.expect(NAME, runner._get_eagle3_aux_layers_from_config, ["self"])
    registry.expect(
        NAME,
        runner.propose_draft_token_ids,
        ["self", "scheduler_output", "sampled_token_ids", "sampling_metadata", "hidden_states", "sample_hidden_states"]
        + ["aux_hidden_states", "spec_decode_metadata", "common_attn_metadata", "slot_mappings"],
    )
    start, load, ids_of_drafter, propose = (
        runner.__init__,
        runner.load_model,
        runner._get_eagle3_aux_layers_from_config,
        runner.propose_draft_token_ids,
    )

    @functools.wraps(start)
    def __init__(self, vllm_config, device) -> None:
        start(self, vllm_config, device)
        self.eagle3_job_drafter_reads_taps = self.use_aux_hidden_state_outputs
        if capture_taps(vllm_config):
            self.use_aux_hidden_state_outputs = True

    @functools.wraps(load)
    def load_model(self, eep_scale_up: bool = False) -> None:
        if self.use_aux_hidden_state_outputs:
            kimi_k25_eagle3.ensure(self.model_config.hf_text_config.model_type)
        load(self, eep_scale_up)

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        """The union of captured and drafted taps; `load_model` hands it to the target."""
        captured = capture_taps(self.vllm_config)
        if not captured:
            return ids_of_drafter(self)
        drafted: tuple[int, ...] = ()
        if self.eagle3_job_drafter_reads_taps:
            drafted = ids_of_drafter(self) or self.get_model().get_eagle3_aux_hidden_state_layers()
        union = tuple(sorted({*captured, *drafted}))
        _refuse_ids_the_model_skips(self.get_model(), union)
        self.eagle3_job_drafter_places = [union.index(tap) for tap in sorted(set(drafted))]
        self.eagle3_job_capture_places = [union.index(tap) for tap in captured]
        return union

    @functools.wraps(propose)
    def propose_draft_token_ids(
        self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states, aux_hidden_states, *rest
    ):
        if not capture_taps(self.vllm_config):
            return propose(
                self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states, aux_hidden_states, *rest
            )
        reads = self.eagle3_job_drafter_reads_taps
        own = [aux_hidden_states[place] for place in self.eagle3_job_drafter_places] if reads else None  # [N, H] each
        self.use_aux_hidden_state_outputs = reads
        try:
            return propose(self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states, own, *rest)
        finally:
            self.use_aux_hidden_state_outputs = True

    for patch in (__init__, load_model, _get_eagle3_aux_layers_from_config, propose_draft_token_ids):
        registry.replace(runner, patch.__name__, patch, NAME)


def _patch_cpu_runner(module: ModuleType) -> None:
    runner = module.CPUModelRunner
    registry.expect(NAME, runner.load_model, ["self", "eep_scale_up"])
    load = runner.load_model

    @functools.wraps(load)
    def load_model(self, eep_scale_up: bool = False) -> None:
        if self.use_aux_hidden_state_outputs:
            kimi_k25_eagle3.ensure(self.model_config.hf_text_config.model_type)
        load(self, eep_scale_up)
        # Unlike the GPU runner's, this load_model does not tell the model which states to put out.
        if self.use_aux_hidden_state_outputs:
            taps = self._get_eagle3_aux_layers_from_config() or self.get_model().get_eagle3_aux_hidden_state_layers()
            _require_interface(self.get_model())
            self.get_model().set_aux_hidden_state_layers(taps)

    registry.replace(runner, "load_model", load_model, NAME)


def _require_interface(model) -> None:
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not supports_eagle3(model):
        raise MustFix(
            f"{type(model).__name__} gives out no auxiliary hidden states",
            where="vLLM 0.16.0, SupportsEagle3",
            remedy="use a Kimi-K2.5, DeepSeek-V3, Llama or Qwen verifier",
        )


def _refuse_ids_the_model_skips(model, taps: tuple[int, ...]) -> None:
    """vLLM's own models fail on id 0 and leave out id L without a word: only ours give both."""
    _require_interface(model)
    if hasattr(model.set_aux_hidden_state_layers, registry.MARK):
        return  # checks its own range
    language_model = model.get_language_model() if hasattr(model, "get_language_model") else model
    last = len(language_model.model.layers) - 1
    outside = [tap for tap in taps if not 1 <= tap <= last]
    if outside:
        raise MustFix(
            f"{type(model).__name__} gives out taps 1 to {last}, not {outside[0]}", where="EAGLE-3 taps", remedy="choose other layers"
        )


SHIM = registry.Shim(
    name=NAME,
    of="vllm",
    patches=(
        f"{CONFIG}.VllmConfig.__post_init__",
        f"{RUNNER}.GPUModelRunner.__init__",
        f"{RUNNER}.GPUModelRunner.load_model",
        f"{RUNNER}.GPUModelRunner._get_eagle3_aux_layers_from_config",
        f"{RUNNER}.GPUModelRunner.propose_draft_token_ids",
        f"{CPU_RUNNER}.CPUModelRunner.load_model",
    ),
    why="taps are to be read while generating, without a drafter; vLLM puts them out for a drafter only",
    upstream="none yet",
    needed=needed,
    apply=apply,
)
