"""One look at the real vLLM a process: `probes.py NAME ARGUMENTS…` prints what it saw as one JSON line at the end."""

import json
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace


def outcome(call) -> str:
    """ "ok", or the type and first lines of what the call raised."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:600]}"
    return "ok"


def start_up() -> dict:
    """What applying every shim costs a process that needs none of them."""
    begun = time.monotonic()
    import compat

    compat.apply_in_vllm()
    compat.apply_in_vllm()
    seconds = time.monotonic() - begun
    return {"seconds": seconds, "heavy": sorted({"torch", "vllm", "speculators", "transformers"} & sys.modules.keys())}


def refusals(folder: str) -> dict:
    """Signatures no shim knows, in modules that are loaded before compat is applied."""
    import vllm.config.scheduler
    import vllm.model_executor.models.deepseek_v2 as decoder
    import vllm.v1.core.block_pool as pool

    def changed(self, max_model_len, is_encoder_decoder, novelty):
        raise AssertionError("must not be called")

    import compat
    from compat import doctor, kimi_k25_eagle3, registry
    from jobs.stages import preflight

    before = {
        "scheduler": vllm.config.scheduler.SchedulerConfig.__init__,
        "decoder": decoder.DeepseekV2Model.forward,
    }
    vllm.config.scheduler.SchedulerConfig.__post_init__ = changed
    decoder.DeepseekV2DecoderLayer.forward = lambda self, positions, hidden_states: None
    cache = pool.BlockPool.cache_full_blocks
    return {
        "scheduler_config": outcome(lambda: compat.apply(["scheduler_config"])),
        "kv_cache_helpers": outcome(lambda: compat.apply(["kv_cache_helpers"])),
        "kimi_applied": outcome(lambda: compat.apply(["kimi_k25_eagle3"])),
        "kimi_used": outcome(lambda: kimi_k25_eagle3.ensure("kimi_k2")),
        "unpatched": before["scheduler"] is vllm.config.scheduler.SchedulerConfig.__init__
        and before["decoder"] is decoder.DeepseekV2Model.forward,
        "known_patched": registry.original(pool.BlockPool.cache_full_blocks) is cache and pool.BlockPool.cache_full_blocks is not cache,
        "unknown_name": outcome(lambda: compat.apply(["scheduler_confg"])),
        "doctor": {shim.name: doctor.examine(shim)["note"] for shim in registry.shims()[:3]},
        "preflight": list(preflight.CHECKS["shims"](SimpleNamespace(path=Path(folder)), {})),
    }


def vllm_calls(head: str) -> dict:
    """The calls that the shims of vLLM are about; with plugins switched off none of them is patched."""
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    if envs.VLLM_PLUGINS is None:
        import compat

        compat.apply_in_vllm()
    from jobs.verifier.tiny import CHECKPOINT

    def config(**changes):
        arguments = {"model": str(CHECKPOINT), "trust_remote_code": True, "max_model_len": 128, "enforce_eager": True}
        arguments |= {"dtype": "float32", "limit_mm_per_prompt": {"vision_chunk": 0}, "max_num_seqs": 4}
        return EngineArgs(**(arguments | changes)).create_engine_config()

    speculation = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    return scheduling(config()) | eagle3_interface() | _doctor_or_bare_taps(envs.VLLM_PLUGINS is None) | {
        "speculation": outcome(lambda: _check_speculation(config(speculative_config=speculation))),
        "pipeline_taps": outcome(lambda: config(pipeline_parallel_size=2, additional_config={"eagle3_job_taps": [2]})),
        "pipeline_speculation": outcome(lambda: config(pipeline_parallel_size=2, speculative_config=speculation)),
        "float16_taps": outcome(lambda: config(dtype="float16", additional_config={"eagle3_job_taps": [2]})),
        "unordered_taps": outcome(lambda: config(additional_config={"eagle3_job_taps": [5, 2]})),
        "hash_has_taps": len({config(additional_config={"eagle3_job_taps": taps}).compute_hash() for taps in ([2, 5, 7], [2, 5, 7], [3, 5, 7])}),
    }  # fmt: skip


def _doctor_or_bare_taps(cured: bool) -> dict:
    """The doctor's report of a process with shims; of one without, whether the runner has the taps it was asked for."""
    if cured:
        from compat.doctor import render, report

        found = report()
        return {"doctor": found, "rendered": render(found)}
    from engine_probe import taps_without_shims

    return taps_without_shims()


def _check_speculation(config) -> None:
    """The whole config reaches a worker by pickle, and the target's type is its own again."""
    again = pickle.loads(pickle.dumps(config))
    assert type(again.model_config.hf_text_config.model_type) is str
    assert again.model_config.hf_text_config.model_type == "kimi_k2"
    assert again.model_config.hf_config.image_token_index == again.model_config.hf_config.media_placeholder_token_id
    assert again.additional_config["eagle3_job_drafter_taps"] == [2, 5, 7]


def scheduling(config) -> dict:
    """SchedulerConfig and the KV-cache helpers, called as speculators 0.3.0 calls them."""
    import torch
    from vllm.config import SchedulerConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=config.cache_config.block_size, num_kv_heads=4, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec([f"layer{i}" for i in range(2)], spec)]
    old_call = outcome(
        lambda: get_kv_cache_config_from_groups(vllm_config=config, kv_cache_groups=groups, kv_cache_specs={}, available_memory=1 << 24)
    )
    cache = get_kv_cache_config_from_groups(vllm_config=config, kv_cache_groups=groups, available_memory=1 << 24)
    config.cache_config.num_gpu_blocks = cache.num_blocks
    assert config.cache_config.enable_prefix_caching
    parts = {"vllm_config": config, "kv_cache_config": cache, "structured_output_manager": StructuredOutputManager(config)}

    def schedule(**block_size) -> None:
        scheduler = Scheduler(**parts, **block_size)
        tokens = 3 * config.cache_config.block_size // 2  # a full block and a half
        scheduler.add_request(
            Request(
                request_id="a",
                prompt_token_ids=[1] * tokens,
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                eos_token_id=0,
            )
        )
        assert scheduler.schedule().num_scheduled_tokens == {"a": tokens}

    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    return {
        "scheduler_config": outcome(lambda: SchedulerConfig(**limits, max_model_len=32)),
        "scheduler_config_bare": outcome(lambda: SchedulerConfig(**limits)),
        "scheduler_config_given": outcome(lambda: SchedulerConfig(**limits, max_model_len=32, is_encoder_decoder=False)),
        "kv_cache_specs": old_call,
        "no_block_size": outcome(schedule),
        "no_block_hasher": outcome(lambda: schedule(block_size=config.cache_config.block_size)),
    }


def eagle3_interface() -> dict:
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.kimi_k25 import KimiK25ForConditionalGeneration

    classes = (KimiK25ForConditionalGeneration, DeepseekV2ForCausalLM, DeepseekV3ForCausalLM)
    return {"supports_eagle3": [supports_eagle3(model) for model in classes]}


def report_of_generator(release: str) -> dict:
    """speculators' generator on the tiny verifier against transformers; see test_speculators_generator_*.py."""
    from generator_probe import look

    return look(release)


def engine(name: str, *arguments: str) -> dict:
    import engine_probe

    return getattr(engine_probe, name)(*arguments)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "verifier")]
    print("\n" + json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
    sys.stdout.flush()
    import os

    os._exit(0)  # vLLM's own shutdown takes seconds
