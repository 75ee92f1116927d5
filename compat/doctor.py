"""What is installed, what hardware is there, and what each shim does about it: `eagle3-job doctor`."""

import logging
import platform
from typing import Any

from compat import apply, registry

PACKAGES = ("vllm", "speculators", "torch", "transformers", "triton", "numpy", "safetensors", "boto3", "eagle3-job")


def report() -> dict[str, Any]:
    """Versions, devices and shims of this machine.

    `{"versions": {name: version or None}, "devices": [{kind, name, ...}], "shims": [{name, of,
    patches, needed, applied, why, upstream, note}]}`. `applied` says that the shim is in place in
    this process; `note` is None, or why nothing can be said (vLLM not installed) or the sentence
    with which the shim refused. Imports vLLM and speculators: takes about 10 s.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: registry.installed(name) for name in PACKAGES}
    return {"versions": versions, "devices": devices(), "shims": [examine(shim) for shim in registry.shims()]}


def examine(shim: registry.Shim) -> dict[str, Any]:
    """One row of the table of shims; never raises for what is missing or unknown."""
    row: dict[str, Any] = {"name": shim.name, "of": shim.of, "patches": list(shim.patches), "needed": False, "applied": False}
    row |= {"why": shim.why, "upstream": shim.upstream, "note": None}
    try:
        apply([shim.name])
        row["needed"] = shim.needed()
        registry.require(shim.name)
    except Exception as error:  # whatever a broken installation raises on import
        row["note"] = f"{type(error).__name__}: {error}"
        logging.getLogger(__name__).debug("shim %s", shim.name, exc_info=True)
    row["applied"] = registry.in_place(shim.name)
    return row


def render(report: dict[str, Any]) -> str:
    """The report for a person: versions, devices, then a line a shim with its reason below."""
    lines = [f"{name:14} {found or 'not installed'}" for name, found in report["versions"].items()]
    lines += [f"{device['kind']:14} {device['name']}" for device in report["devices"]]
    lines += ["", f"{'shim':22} {'needed':7} {'applied':8} needless from"]
    for shim in report["shims"]:
        yes_no = ["yes" if shim[key] else "no" for key in ("needed", "applied")]
        lines.append(f"{shim['name']:22} {yes_no[0]:7} {yes_no[1]:8} {shim['upstream']}")
        lines.append(f"  {shim['why']}")
        if shim["note"]:
            lines.append(f"  ! {shim['note']}")
    return "\n".join(lines)


def devices() -> list[dict[str, Any]]:
    """GPUs as CUDA sees them, else the CPU, with memory in bytes."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return [{"kind": "cpu", "name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}]
    found = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"{gpu.major}.{gpu.minor}"
        found.append({"kind": "cuda", "index": index, "name": gpu.name, "memory_bytes": gpu.total_memory, "compute_capability": capability})
    return found
