"""EAGLE-3 speculation on vLLM 0.16.0's CPU runner, verified greedily.

The CPU runner asserts that there is no speculative config. What stands behind the assertion is
little: it loads no drafter, a padded drafter batch needs Triton kernels, the draft ids travel
through a CUDA stream, and the rejection sampler is a Triton kernel. With those replaced the engine
drafts and verifies on CPU and counts what it accepts, so that a replay can be compared with the
engine's own counters on a machine without a GPU. That is what it is for: it makes nothing faster.

Greedy only: a request with a temperature is refused, not verified wrongly. The draft must have
the target's head counts: the CPU attention plans its work once, with the target's.
"""

import functools
from types import ModuleType

from compat import registry
from compat.importing import when_imported
from jobs.errors import MustFix

NAME = "cpu_speculation"
CONFIG = "vllm.config.speculative"
SAMPLER = "vllm.v1.sample.rejection_sampler"
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"
METHODS = ("eagle", "eagle3")


def needed() -> bool:
    """Whether vLLM runs on CPU here and its CPU runner still refuses a speculative config."""
    from importlib import import_module

    return _on_cpu() and _refuses_speculation(import_module(CPU_RUNNER))


def apply() -> None:
    when_imported(CONFIG, _patch_config)
    when_imported(SAMPLER, _patch_sampler)
    when_imported(CPU_RUNNER, _patch_runner)


def rejection_sample(draft_token_ids, num_draft_tokens, max_spec_len, target_argmax, bonus_token_ids, placeholder):
    """Greedy verification in plain torch: accept drafts while they equal the target's argmax.

    draft_token_ids [N], target_argmax [N] (all requests one after the other), num_draft_tokens: a
    list of B counts, bonus_token_ids [B, 1]. Returns [B, max_spec_len + 1] int32: the accepted
    drafts, then the target's own token (the bonus where all were accepted), then `placeholder`.
    Source: rejection_greedy_sample_kernel, vllm/v1/sample/rejection_sampler.py.
    """
    import torch

    output = torch.full((len(num_draft_tokens), max_spec_len + 1), placeholder, dtype=torch.int32)  # [B, K+1]
    first = 0
    for request, count in enumerate(num_draft_tokens):
        drafts = draft_token_ids[first : first + count].tolist()
        truth = target_argmax[first : first + count].tolist()
        accepted = next((place for place in range(count) if drafts[place] != truth[place]), count)
        emitted = truth[: accepted + 1] if accepted < count else truth + [int(bonus_token_ids[request, 0])]
        output[request, : len(emitted)] = torch.tensor(emitted, dtype=torch.int32)
        first += count
    return output


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def _refuses_speculation(module: ModuleType) -> bool:
    return "assert self.speculative_config is None" in registry.source(module.CPUModelRunner.__init__)


def _patch_config(module: ModuleType) -> None:
    if not _on_cpu():
        return
    registry.expect(NAME, module.SpeculativeConfig.__post_init__, ["self"])
    validate = module.SpeculativeConfig.__init__

    @functools.wraps(validate)
    def __init__(self, *args, **fields):
        validate(self, *args, **fields)
        if self.method in METHODS:
            self.disable_padded_drafter_batch = True  # the padded batch is prepared by Triton kernels
            _refuse_other_head_counts(self)

    registry.replace(module.SpeculativeConfig, "__init__", __init__, NAME)


def _refuse_other_head_counts(config) -> None:
    target, draft, parallel = config.target_model_config, config.draft_model_config, config.target_parallel_config
    if target is None or draft is None or parallel is None:
        return
    for what, count in (("attention heads", "get_num_attention_heads"), ("KV heads", "get_num_kv_heads")):
        of_target, of_draft = getattr(target, count)(parallel), getattr(draft, count)(parallel)
        if of_target != of_draft:
            raise MustFix(
                f"The draft has {of_draft} {what} and the verifier {of_target}",
                where="speculation on CPU plans its attention with the verifier's",
                remedy="draft with the verifier's head counts, or run this on a GPU",
            )


def _patch_sampler(module: ModuleType) -> None:
    if not _on_cpu():
        return
    registry.expect(
        NAME,
        module.rejection_sample,
        ["draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs", "target_logits"]
        + ["bonus_token_ids", "sampling_metadata"],
    )

    registry.expect(NAME, module.RejectionSampler.forward, ["self", "metadata", "draft_probs", "logits", "sampling_metadata"])
    sample = module.RejectionSampler.forward

    @functools.wraps(sample)
    def forward(self, metadata, draft_probs, logits, sampling_metadata):
        # Before the sampler's own kernels, which are Triton's too.
        if not sampling_metadata.all_greedy:
            raise MustFix(
                "Speculation on CPU verifies greedily only",
                where="sampling temperature above 0",
                remedy="set the temperature to 0, or run this on a GPU",
            )
        return sample(self, metadata, draft_probs, logits, sampling_metadata)

    def verify_greedily(
        draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits, bonus_token_ids, sampling_metadata
    ):
        truth = target_logits.argmax(dim=-1)  # [N]
        return rejection_sample(draft_token_ids, num_draft_tokens, max_spec_len, truth, bonus_token_ids, module.PLACEHOLDER_TOKEN_ID)

    registry.replace(module, "rejection_sample", verify_greedily, NAME)
    registry.replace(module.RejectionSampler, "forward", forward, NAME)


def _patch_runner(module: ModuleType) -> None:
    runner = module.CPUModelRunner
    if not (_on_cpu() and _refuses_speculation(module)):
        return
    registry.expect(NAME, runner.__init__, ["self", "vllm_config", "device"])
    registry.expect(NAME, runner.load_model, ["self", "eep_scale_up"])
    registry.expect(NAME, runner._copy_draft_token_ids_to_cpu, ["self", "scheduler_output", "zeros_only"])
    start, load = runner.__init__, runner.load_model

    @functools.wraps(start)
    def __init__(self, vllm_config, device) -> None:
        if vllm_config.speculative_config is None:
            return start(self, vllm_config, device)
        # The function that stands here upstream, without its assertion.
        with module._torch_cuda_wrapper():
            module.GPUModelRunner.__init__(self, vllm_config, device)
        self.use_cuda_graph = False
        self.cascade_attn_enabled = False
        self._postprocess_tensors()

    @functools.wraps(load)
    def load_model(self, eep_scale_up: bool = False) -> None:
        load(self, eep_scale_up)
        if hasattr(self, "drafter"):
            self.drafter.load_model(self.model)

    def _copy_draft_token_ids_to_cpu(self, scheduler_output, zeros_only: bool = False) -> None:
        """The drafts are in host memory already: a list instead of an event and a stream."""
        import torch

        self._draft_token_req_ids = self.input_batch.req_ids.copy()
        drafts = self._draft_token_ids  # [B, K] or a list of lists
        if torch.is_tensor(drafts):
            self._draft_token_ids = (torch.zeros_like(drafts) if zeros_only else drafts).tolist()

    for patch in (__init__, load_model, _copy_draft_token_ids_to_cpu):
        registry.replace(runner, patch.__name__, patch, NAME)


SHIM = registry.Shim(
    name=NAME,
    of="vllm",
    patches=(
        f"{CONFIG}.SpeculativeConfig.__init__",
        f"{SAMPLER}.rejection_sample",
        f"{SAMPLER}.RejectionSampler.forward",
        f"{CPU_RUNNER}.CPUModelRunner.__init__",
        f"{CPU_RUNNER}.CPUModelRunner.load_model",
        f"{CPU_RUNNER}.CPUModelRunner._copy_draft_token_ids_to_cpu",
    ),
    why="the CPU runner refuses a drafter, so the engine's acceptance counters cannot be had without a GPU",
    upstream="none yet",
    needed=needed,
    apply=apply,
)
