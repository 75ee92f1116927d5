"""Memory for the KV cache of speculators' generator on a machine without an accelerator.

0.3.0 asks `torch.cuda.mem_get_info`, which raises without a device; 0.4.0.1 asks its own
`mem_get_info`, which does the same under a CUDA build of torch (PyPI's, ours on CPU too) and
answers (0, 0) under a CPU build, so that the cache gets no block. The answer here is the space vLLM's CPU backend is given (`VLLM_CPU_KVCACHE_SPACE`, in GiB), of which
the generator takes a fifth of its utilisation.
"""

from types import ModuleType, SimpleNamespace

from compat import registry
from compat.importing import when_imported

NAME = "speculators_memory"
GENERATOR = "speculators.data_generation.vllm_hidden_states_generator"
GIB = 1 << 30


def needed() -> bool:
    """Whether there is no accelerator, and the installed generator asks one for its memory."""
    from importlib import import_module

    return _no_accelerator() and bool(_asks(import_module(GENERATOR)))


def apply() -> None:
    when_imported(GENERATOR, _patch)


def mem_get_info(device: object = None) -> tuple[int, int]:
    """(free, total) bytes of the space given to vLLM's CPU backend, in the form of torch.cuda.mem_get_info."""
    from vllm import envs

    space = (envs.VLLM_CPU_KVCACHE_SPACE or 4) * GIB
    return space, space


def _no_accelerator() -> bool:
    import torch

    return torch.accelerator.current_accelerator(check_available=True) is None


def _asks(module: ModuleType) -> str:
    """How the generator asks: "cuda" (0.3.0), "own" (0.4.0.1) or "" for not at all."""
    source = registry.source(module.VllmHiddenStatesGenerator.__init__)
    if "torch.cuda.mem_get_info()" in source:
        return "cuda"
    return "own" if " mem_get_info()" in source else ""


def _patch(module: ModuleType) -> None:
    if not _no_accelerator():
        return
    asks = _asks(module)
    if asks == "own":
        registry.expect(NAME, module.mem_get_info, [])
        registry.replace(module, "mem_get_info", lambda: mem_get_info(), NAME)
    elif asks == "cuda":
        # In the generator's own namespace: the rest of the process keeps torch as it is.
        torch = module.torch
        cuda = SimpleNamespace(mem_get_info=mem_get_info, empty_cache=torch.cuda.empty_cache)
        view = SimpleNamespace(Tensor=torch.Tensor, as_tensor=torch.as_tensor, long=torch.long, cuda=cuda)
        registry.replace(module, "torch", view, NAME)


SHIM = registry.Shim(
    name=NAME,
    of="speculators",
    patches=(f"{GENERATOR}.mem_get_info (0.4)", f"{GENERATOR}.torch (0.3)"),
    why="the generator asks an accelerator for free memory, without one it raises or gets 0 bytes",
    upstream="none yet; needed only without an accelerator",
    needed=needed,
    apply=apply,
)
