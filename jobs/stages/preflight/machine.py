"""The machine below the GPUs: disk, memory limits, write permission, clock. Each check yields sentences."""

import contextlib
import email.utils
import errno
import os
import resource
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jobs.backup import existing
from jobs.context import Context
from jobs.settings import Settings
from jobs.stages import hub
from jobs.stages.preflight import room
from jobs.storage import read_ahead
from jobs.wording import counted

PROBED_BYTES = 256 << 20
PROBE_SECONDS = 15.0
SHM_PER_GPU = 1 << 30  # NCCL and vLLM's workers exchange tensors there; Docker's default of 64 MB ends in a bus error
LEAST_MEMLOCK = 8 << 30  # pinned host buffers of the states on their way to the disk
LARGEST_SKEW = 240.0  # seconds; S3 refuses a signature from 15 minutes on, and clocks drift further
SHM = Path("/dev/shm")
FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_rate(folder: Path, least: float | None, measured: dict[str, Any]) -> tuple[list[str], dict[str, float]]:
    """(sentences, bytes a second written and read) of a file of PROBED_BYTES, past the page cache where the disk allows it.

    measured: hears of a full disk, which is told once, with all that is wanted there.
    """
    block, sizes = os.urandom(1 << 22), PROBED_BYTES >> 22
    rates: dict[str, float] = {}
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-") as file:
            began = time.monotonic()
            done = 0
            for _ in range(sizes):
                file.write(block)
                done += len(block)
                if time.monotonic() - began > PROBE_SECONDS:
                    break
            file.flush()
            os.fsync(file.fileno())
            rates["written"] = done / (time.monotonic() - began)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began = time.monotonic()
            while file.read(1 << 22) and time.monotonic() - began < PROBE_SECONDS:
                pass
            rates["read"] = file.tell() / (time.monotonic() - began)
    except OSError as error:
        if error.errno in FULL:
            room.failed(measured, f"a test file of {PROBED_BYTES >> 20} MiB", folder, error.strerror)
            return [], rates
        return [f"a test file of {PROBED_BYTES >> 20} MiB in {folder} failed ({error.strerror}): take another disk"], rates
    if least and rates["written"] < least:
        return [
            f"{folder} writes {rates['written'] / 1e6:.0f} MB/s, the states come at up to {least / 1e6:.0f} MB/s: put the run directory on local NVMe, or states.dtype = fp8"
        ], rates  # fmt: skip
    return [], rates


def read_rate(files: Sequence[Path], threads: int) -> float | None:
    """Bytes a second that the verifier's own files are read with, as they will be: several ranges at once. None where there are too few.

    The end of the largest files is taken out of the page cache first: that it was there once says nothing about the disk.
    """
    probed, left = [], PROBED_BYTES
    for file in sorted(files, key=lambda file: file.stat().st_size, reverse=True):
        size = min(file.stat().st_size, left)
        if size:
            probed.append((file, file.stat().st_size - size, size))
            left -= size
    if left:  # a verifier this small is loaded in a moment
        return None
    for file, begin, length in probed:
        with file.open("rb") as handle:
            os.posix_fadvise(handle.fileno(), begin, length, os.POSIX_FADV_DONTNEED)
    until = time.monotonic() + PROBE_SECONDS
    done = read_ahead.read_ranges(probed, threads, lambda: time.monotonic() > until)
    return done.bytes / done.seconds if done.bytes else None


def memory_limits(gpus: int, shm: Path = SHM) -> Iterator[str]:
    """/dev/shm and memlock, which containers start with far too little of. Only with GPUs they matter."""
    if not gpus:
        return
    with contextlib.suppress(FileNotFoundError):
        size = shutil.disk_usage(shm).total
        if size < gpus * SHM_PER_GPU:
            yield f"{shm} has {size / 1e9:.1f} GB, {gpus * SHM_PER_GPU / 1e9:.0f} GB are needed for {counted(gpus, 'GPUs')}: start the container with --shm-size 32g"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft not in (resource.RLIM_INFINITY, -1) and soft < LEAST_MEMLOCK and os.geteuid() != 0:
        yield f"memlock is limited to {soft / 1e6:.0f} MB, pinned buffers need {LEAST_MEMLOCK / 1e9:.0f} GB: start the container with --ulimit memlock=-1"


def writable(context: Context, measured: dict[str, Any]) -> Iterator[str]:
    """Every folder that is written to, those of a read-only file system in one sentence. measured: hears of a full one."""
    folders = {
        "run directory": context.path,
        "temporary folder": Path(tempfile.gettempdir()),
        "HOME": Path.home(),
        "hub's cache (HF_HUB_CACHE)": Path(hub.cache_folder()),
    }
    for name in ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
        if os.environ.get(name):
            folders[name] = Path(os.environ[name])
    refused: dict[tuple[str | int, str], list[str]] = {}
    for name, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in FULL:
                room.failed(measured, f"the {name} {folder}", folder, error.strerror)
            else:
                place = existing(folder).stat().st_dev if error.errno == errno.EROFS else name
                refused.setdefault((place, error.strerror), []).append(f"the {name} {folder}")
    for (_, why), named in refused.items():
        yield f"{' and '.join(named)} cannot be written by user {os.getuid()} ({why}): mount {'it' if len(named) == 1 else 'them'} writable"


def clock_servers(settings: Settings) -> list[str]:
    """Who is asked for the time: the bucket's endpoint, which would refuse a wrong clock, else the hub."""
    push = settings.push
    if push.uri and push.uri.startswith("s3://"):
        return [push.endpoint_url or "https://s3.amazonaws.com"]
    if settings.verifier.model != "tiny" and "/" in settings.verifier.model and os.environ.get("HF_HUB_OFFLINE") != "1":
        return [hub.address()]
    return []


def clock(servers: list[str]) -> Iterator[str]:
    """This clock against the Date header of a server; one that does not answer is another check's business."""
    for url in servers:
        before = time.time()
        try:
            headers: Any = urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10).headers
        except urllib.error.HTTPError as error:
            headers = error.headers
        except (OSError, ValueError):
            continue
        said = headers.get("Date")
        if not said:
            continue
        with contextlib.suppress(ValueError, TypeError):
            skew = (before + time.time()) / 2 - email.utils.parsedate_to_datetime(said).timestamp()
            if abs(skew) > LARGEST_SKEW:
                yield f"this machine's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} {url}: set it (chrony, ntpdate), S3 refuses signatures and certificates look expired"
