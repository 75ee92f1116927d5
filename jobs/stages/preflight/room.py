"""Room: what will lie on each file system, summed up, so that a full one is one sentence however many folders are on it.

Decision: a check only tells what it will put where (`need`, `failed`); whether that fits is asked when all have told.
Asked one by one, a run and its copy on the same disk would each find room enough, for itself.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.backup import existing
from jobs.storage.files import files_under

# What a run of any size needs beside its states: environment caches, checkpoints' temporary copies, reports.
SPARE_BYTES = 2 << 30
THE_RUN = "the run"


def need(measured: dict[str, Any], what: str, folder: Path, size: float) -> None:
    """`what` will put `size` bytes more on the file system of `folder`."""
    measured.setdefault("room", {})[what] = {"folder": str(folder), "bytes": max(size, 0)}


def failed(measured: dict[str, Any], what: str, folder: Path, why: str) -> None:
    """`what` could not be written now; why: the system's word for a full disk, for no inode or a used-up quota."""
    measured.setdefault("room", {})[what] = {"folder": str(folder), "failed": why}


def bytes_under(folder: Path) -> int:
    """Bytes on the disk, so that a preallocated shard counts for what is written of it."""
    return sum(found.st_blocks * 512 for _, found in files_under(folder))


def problems(measured: dict[str, Any]) -> Iterator[str]:
    """A sentence for each file system that has too little for all that will lie there."""
    on_one: dict[int, dict[str, dict[str, Any]]] = {}
    # The run, else the largest, names the file system, whatever check was the first to tell.
    for what, told in sorted(measured.get("room", {}).items(), key=lambda item: (item[0] != THE_RUN, -item[1].get("bytes", -1), item[0])):
        on_one.setdefault(existing(Path(told["folder"])).stat().st_dev, {})[what] = told
    for told in on_one.values():
        folder = next(iter(told.values()))["folder"]
        usage = shutil.disk_usage(existing(Path(folder)))
        sizes = {what: each["bytes"] for what, each in told.items() if "bytes" in each}
        failures = {what: each["failed"] for what, each in told.items() if "failed" in each}
        missing = sum(sizes.values()) + SPARE_BYTES if sizes else 0
        if usage.total and usage.free < missing or failures:  # /proc and its like have no size: whoever writes there says so
            yield f"{folder} has {usage.free / 1e9:.1f} GB free{_needs(sizes, missing)}{_not_written(failures)}: {_remedy(sizes)}"


def _needs(sizes: dict[str, float], missing: float) -> str:
    if not sizes:
        return ""
    if len(sizes) == 1:
        return f", {next(iter(sizes))} needs about {missing / 1e9:.1f} GB more there"
    parts = ", ".join(f"{size / 1e9:.1f} for {what}" for what, size in sizes.items())
    return f", about {missing / 1e9:.1f} GB more are needed there ({parts}, {SPARE_BYTES / 1e9:.1f} to spare)"


def _not_written(failures: dict[str, str]) -> str:
    if not failures:
        return ""
    return f", and {' and '.join(failures)} could not be written ({', '.join(dict.fromkeys(failures.values()))})"


def _remedy(sizes: dict[str, float]) -> str:
    if THE_RUN in sizes:
        return "take a larger disk or fewer samples, and states.dtype = fp8 where it is not yet"
    return "free space or remove files there, or take a larger disk"
