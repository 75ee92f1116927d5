"""vLLM's KV-cache helpers as code written for vLLM up to 0.15 calls them.

Three calls of speculators 0.3.0 fail on 0.16.0, one after the other:

- `get_kv_cache_config_from_groups(kv_cache_specs=…)`: the argument is gone; it is dropped.
- `Scheduler(…)` without `block_size`: the engine core's own value is filled in, the cache's block
  size times the context-parallel sizes (vllm/v1/engine/core.py).
- a `Request` made without a block hasher while prefix caching is on (the default since 0.16):
  `BlockPool.cache_full_blocks` asserts that the request has hashes. Such a request cannot be
  found in the cache again, so its blocks are not put there.
"""

import functools
import inspect
from types import ModuleType

from compat import registry
from compat.importing import when_imported

NAME = "kv_cache_helpers"
HELPERS = "vllm.v1.core.kv_cache_utils"
SCHEDULER = "vllm.v1.core.sched.scheduler"
POOL = "vllm.v1.core.block_pool"


def needed() -> bool:
    """Whether the installed vLLM refuses one of the three calls."""
    from importlib import import_module

    return (
        _lacks_specs(import_module(HELPERS).get_kv_cache_config_from_groups)
        or _demands_block_size(import_module(SCHEDULER).Scheduler)
        or _demands_hashes(import_module(POOL).BlockPool)
    )


def apply() -> None:
    when_imported(HELPERS, _patch_helpers)
    when_imported(SCHEDULER, _patch_scheduler)
    when_imported(POOL, _patch_pool)


def _lacks_specs(function) -> bool:
    return "kv_cache_specs" not in registry.parameters(function)


def _demands_block_size(scheduler: type) -> bool:
    parameter = inspect.signature(registry.original(scheduler.__init__), follow_wrapped=False).parameters.get("block_size")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _demands_hashes(pool: type) -> bool:
    return "assert len(request.block_hashes) >= num_full_blocks" in registry.source(pool.cache_full_blocks)


def _patch_helpers(module: ModuleType) -> None:
    present = module.get_kv_cache_config_from_groups
    if not _lacks_specs(present):
        return
    registry.expect(NAME, present, ["vllm_config", "kv_cache_groups", "available_memory"])

    def get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, available_memory=None, *, kv_cache_specs=None):
        return present(vllm_config, kv_cache_groups, available_memory)

    registry.replace(module, "get_kv_cache_config_from_groups", get_kv_cache_config_from_groups, NAME)


def _patch_scheduler(module: ModuleType) -> None:
    scheduler = module.Scheduler
    if not _demands_block_size(scheduler):
        return
    registry.expect(
        NAME,
        scheduler.__init__,
        [
            "self",
            "vllm_config",
            "kv_cache_config",
            "structured_output_manager",
            "block_size",
            "mm_registry",
            "include_finished_set",
            "log_stats",
        ],
    )
    start = scheduler.__init__

    @functools.wraps(start)
    def __init__(self, vllm_config, kv_cache_config, structured_output_manager, *args, **options):
        if not args and "block_size" not in options:
            parallel = vllm_config.parallel_config
            options["block_size"] = (
                vllm_config.cache_config.block_size * parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
            )
        start(self, vllm_config, kv_cache_config, structured_output_manager, *args, **options)

    registry.replace(scheduler, "__init__", __init__, NAME)


def _patch_pool(module: ModuleType) -> None:
    pool = module.BlockPool
    if not _demands_hashes(pool):
        return
    registry.expect(
        NAME,
        pool.cache_full_blocks,
        ["self", "request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id"],
    )
    cache = pool.cache_full_blocks

    @functools.wraps(cache)
    def cache_full_blocks(self, request, *args, **options) -> None:
        if request._block_hasher is not None:
            cache(self, request, *args, **options)

    registry.replace(pool, "cache_full_blocks", cache_full_blocks, NAME)


SHIM = registry.Shim(
    name=NAME,
    of="vllm",
    patches=(
        f"{HELPERS}.get_kv_cache_config_from_groups",
        f"{SCHEDULER}.Scheduler.__init__",
        f"{POOL}.BlockPool.cache_full_blocks",
    ),
    why="code written for vLLM up to 0.15 passes kv_cache_specs, no block_size and requests without a block hasher",
    upstream="speculators 0.4.0 calls them in the new way; no vLLM release takes the old calls again",
    needed=needed,
    apply=apply,
)
