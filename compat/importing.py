"""Run a patch when a module is first imported, so that preparing it costs nothing before.

Why not import the module and patch it: `compat.apply_in_vllm` runs in vLLM's driver too, where
the model runner and the models are never used, take 7 s to import and may initialise CUDA before
the workers are forked. A meta-path finder that lets the real finders do their work and runs the
patch after the module's own code is the smallest thing that reaches every process.
"""

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType

Patch = Callable[[ModuleType], None]

_waiting: dict[str, list[Patch]] = {}
_searching: set[str] = set()


def when_imported(module: str, patch: Patch) -> None:
    """Call `patch(module object)` now if `module` is imported, else right after its import.

    What `patch` raises ends the import (or this call). Patches of one module run in the order in
    which they were registered.
    """
    if module in sys.modules:
        patch(sys.modules[module])
        return
    _waiting.setdefault(module, []).append(patch)
    if not any(isinstance(finder, _PatchingFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PatchingFinder())


class _PatchingFinder(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname not in _waiting or fullname in _searching:
            return None
        _searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            _searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            _run_patches_after(spec.loader, fullname)
        return spec


def _run_patches_after(loader, fullname: str) -> None:
    """Shadow `exec_module` on this one loader object: a path loader is made anew for each module."""
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        for patch in _waiting.pop(fullname, []):
            patch(module)

    loader.exec_module = exec_module
