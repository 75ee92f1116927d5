"""What makes the pinned versions fit each other: one file a shim, nothing else patches vLLM.

`apply_in_vllm` is registered as a `vllm.general_plugins` entry point (pyproject.toml), so vLLM
calls it in every process it starts: the driver, the engine core, each worker, the model
inspector. It must be cheap there and must import nothing heavy: importing vLLM's model runner
takes 7 s and, on a GPU machine, a driver that touches CUDA can no longer fork. So each shim
says which module it patches, and the patch is made when that module is first imported
(`compat.importing`), or at once if it is already there.

Nothing in this package imports vllm or speculators when it is imported itself: `doctor` has to
run on a machine where one of them is missing.
"""

from collections.abc import Sequence

__all__ = ["apply", "apply_in_vllm"]


def apply_in_vllm() -> None:
    """Prepare every shim. Idempotent; the entry point vLLM calls in each process it starts.

    The shims of speculators come along: its generator's workers are vLLM workers, and a patch that
    waits for a module nobody imports costs nothing.
    """
    apply()


def apply(names: Sequence[str] | None = None) -> list[str]:
    """Apply the shims called `names`, or all of them, and return the names of those now in place.

    Raises `jobs.errors.MustFix` for an unknown name and where a target that is already imported
    has a signature its shim does not know.
    """
    from compat.registry import apply_shims, shims

    return apply_shims([shim.name for shim in shims()] if names is None else list(names))
