"""The GPUs: what they are, whether a kernel compiles and runs on each, whether they can sum together.

Looked at in a process of its own (`python -m jobs.stages.preflight.gpus`, one more for each GPU below it):
a process that has touched CUDA can no longer fork vLLM's workers, and a collective that hangs, as it does
on boxes with IOMMU or ACS switched on, has to be given up on from outside.
"""

import json
import multiprocessing
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from jobs.ports import free_port
from jobs.run import asked_driver
from jobs.wording import counted

PROBE_SECONDS = 100  # compiling for a new architecture and NCCL's start take up to half a minute on a busy box
REDUCE_SECONDS = 45
REDUCED_BYTES = 256 << 20
LEAST_BUS_BYTES = 1e9  # a second; PCIe 4 reaches 10 to 20 GB/s
LEAST_NVLINK_BYTES = 60e9  # a second, more than PCIe 5 reaches; 2 x H200 over NVLink measured 290e9
LEAST_DRIVER = {13: 580, 12: 525}  # the driver's major version that a CUDA version needs (CUDA's release notes)


def problems(
    tensor_parallel_size: int, memory_needed: float, wanted_gpus: int | None = None, nvlink: bool = False
) -> tuple[list[str], dict[str, Any]]:
    """(sentences, what was measured). memory_needed: bytes over all GPUs; nvlink: the machine is rented for it. Nothing to say where there is no GPU."""
    if not shutil.which("nvidia-smi"):
        return [], {}
    found = probe(tensor_parallel_size)
    return list(judge(found, tensor_parallel_size, memory_needed, wanted_gpus, nvlink)), found


def probe(together: int) -> dict[str, Any]:
    """What `measure` says, from a process that is ended if it takes too long."""
    command = [sys.executable, "-m", "jobs.stages.preflight.gpus", str(together)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, errors = child.communicate(timeout=PROBE_SECONDS + 15)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, 9)
        output, errors = child.communicate()
        return {"error": f"looking at the GPUs took over {PROBE_SECONDS + 15} s and was given up"}
    try:
        return json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"looking at the GPUs ended with {child.returncode}: {(errors.strip().splitlines() or ['no output'])[-1]}"}


def judge(found: dict[str, Any], together: int, memory_needed: float, wanted_gpus: int | None, nvlink: bool = False) -> Iterator[str]:
    """Sentences about what `measure` found; a pure function, so that each is tested without the GPU it is about."""
    if "error" in found:
        yield f"{found['error']}: see that nvidia-smi and `python3 -c 'import torch; torch.zeros(1).cuda()'` work in the container"
        return
    gpus = found["gpus"]
    count = len(gpus)
    if not count:
        yield f"nvidia-smi is here but torch sees no GPU ({found.get('why', 'no reason given')}): start the container with --gpus all, with a driver for CUDA {found['cuda']}"
        return
    if together > count:
        yield f"verifier.tensor_parallel_size = {together} with {counted(count, 'GPUs')} visible: lower it or rent more"
    if wanted_gpus is not None and count < wanted_gpus:
        yield f"rental.machine has {counted(wanted_gpus, 'GPUs')}, {count} of them visible: start the container with --gpus all, or name the machine this is"
    memory = sum(gpu["memory_bytes"] for gpu in gpus[:together])
    if memory_needed > memory:
        yield f"the verifier's {memory_needed / 1e9:.0f} GB do not fit into {memory / 1e9:.0f} GB on {counted(together, 'GPUs')}: raise verifier.tensor_parallel_size or rent larger ones"
    yield from _versions(found)
    for gpu in gpus:
        if gpu["free_bytes"] < 0.9 * gpu["memory_bytes"]:
            yield f"GPU {gpu['index']} has {gpu['free_bytes'] / 1e9:.0f} of {gpu['memory_bytes'] / 1e9:.0f} GB free: end what else runs there (nvidia-smi names it)"
        if gpu.get("kernel") is not None:
            yield f"GPU {gpu['index']} ({gpu['name']}, compute capability {gpu['capability']}) does not run a Triton kernel: {gpu['kernel']}{_remedy(gpu, found)}"
    yield from _reduction(found.get("reduce"), min(together, count), nvlink)


def _versions(found: dict[str, Any]) -> Iterator[str]:
    cuda = int(str(found["cuda"]).partition(".")[0])
    driver = int((re.match(r"\d+", found.get("driver") or "") or ["0"])[0])
    if driver and driver < LEAST_DRIVER.get(cuda, 0):
        yield f"the driver is {found['driver']}, CUDA {found['cuda']} needs {LEAST_DRIVER[cuda]} or newer: rent a machine with a newer driver, or take an image of CUDA {cuda - 1}"
    for capability in sorted({gpu["capability"] for gpu in found["gpus"]}):
        if not runs_on(capability, found["architectures"]):
            yield f"torch is built for {', '.join(found['architectures'])}, the GPUs have compute capability {capability}: take an image made for them"
        if capability == "10.3" and cuda < 13:
            yield f"compute capability 10.3 (B300) needs CUDA 13, this image has {found['cuda']}: take vllm/vllm-openai:v0.16.0-cu130 as the base"


def runs_on(capability: str, architectures: list[str]) -> bool:
    """sm_X.Y code runs on X.Y and later minor versions of X; compute_ code (PTX) on anything newer; `a` variants nowhere else."""
    major, minor = (int(part) for part in capability.split("."))
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if not match:
            continue
        kind, m, n, special = match[1], int(match[2]), int(match[3]), match[4]
        if (
            (m, n) == (major, minor)
            or (special != "a" and m == major and n <= minor)
            or (kind == "compute" and not special and (m, n) <= (major, minor))
        ):
            return True
    return False


def _remedy(gpu: dict[str, Any], found: dict[str, Any]) -> str:
    if "sm_103" in gpu["kernel"] or "ptxas" in gpu["kernel"]:
        return f": TRITON_PTXAS_PATH is {found.get('ptxas') or 'not set'}, it must be the ptxas of a CUDA 13 toolkit (the -cu130 image)"
    return ": take the image made for this GPU, and look with `eagle3-job doctor`"


def _reduction(reduce: dict[str, Any] | None, ranks: int, nvlink: bool) -> Iterator[str]:
    if reduce is None or ranks < 2:
        return
    if reduce.get("error"):
        yield f"an NCCL all-reduce over {ranks} GPUs failed: {reduce['error']}: with IOMMU or ACS on (RTX PRO 6000 boxes), set NCCL_P2P_DISABLE=1; else see NCCL_DEBUG=INFO, and --shm-size"
    elif reduce["bus_bytes_per_second"] < LEAST_BUS_BYTES:
        yield f"an NCCL all-reduce over {ranks} GPUs moves {reduce['bus_bytes_per_second'] / 1e9:.2f} GB/s: see `nvidia-smi topo -m`, something stands between the GPUs"
    elif nvlink and reduce["bus_bytes_per_second"] < LEAST_NVLINK_BYTES:
        yield f"an NCCL all-reduce over {ranks} GPUs moves {reduce['bus_bytes_per_second'] / 1e9:.0f} GB/s, that is PCIe and not the NVLink this machine is paid for: see `nvidia-smi nvlink --status`, NCCL_P2P_DISABLE must not be set"


# In a process of its own ---------------------------------------------------------------------------


def measure(together: int) -> dict[str, Any]:
    """GPUs, versions, a kernel on each, a sum over the first `together`."""
    import torch

    found: dict[str, Any] = {
        "cuda": str(torch.version.cuda),
        "architectures": torch.cuda.get_arch_list(),
        "driver": next(iter(asked_driver("driver_version")[0]), None),
        "ptxas": os.environ.get("TRITON_PTXAS_PATH"),
        "gpus": [],
    }
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return found | {"why": str(error).splitlines()[0]}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found["gpus"].append(
            {"index": index, "name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory_bytes": total, "free_bytes": free}
        )
    together = min(together, len(found["gpus"]))
    answers = _ranks(len(found["gpus"]), together)
    for gpu in found["gpus"]:
        gpu["kernel"] = answers.get((gpu["index"], "kernel"), f"no answer within {PROBE_SECONDS} s")
    if together > 1:
        sums = [
            answers.get((index, "reduce"), {"error": f"GPU {index} did not answer within {PROBE_SECONDS} s"}) for index in range(together)
        ]
        found["reduce"] = next((answer for answer in sums if answer.get("error")), sums[0])
    return found


def _ranks(count: int, together: int) -> dict[tuple[int, str], Any]:
    """Answers of one process a GPU, as far as they came in time."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    port = free_port()
    ranks = [context.Process(target=_rank, args=(index, together, port, answers), daemon=True) for index in range(count)]
    for rank in ranks:
        rank.start()
    found: dict[tuple[int, str], Any] = {}
    wanted, end = count + (together if together > 1 else 0), time.monotonic() + PROBE_SECONDS
    while len(found) < wanted and time.monotonic() < end:
        try:
            index, what, value = answers.get(timeout=1)
            found[index, what] = value
        except queue.Empty:
            if not any(rank.is_alive() for rank in ranks):
                break
    for rank in ranks:
        rank.kill()
    return found


def _rank(index: int, together: int, port: int, answers: Any) -> None:
    import torch

    torch.cuda.set_device(index)
    try:
        from jobs.stages.preflight.kernel import doubled

        values = torch.arange(1000, device="cuda", dtype=torch.float32)
        wrong = not torch.equal(doubled(values), 2 * values)
        answers.put((index, "kernel", "it computes something else" if wrong else None))
    except Exception as error:  # whatever Triton, its compiler and the driver raise
        lines = [line for line in str(error).splitlines() if line.strip()]
        answers.put((index, "kernel", f"{type(error).__name__}: {lines[-1] if lines else ''}".strip()))
    if index < together and together > 1:
        try:
            answers.put((index, "reduce", _reduce(index, together, port)))
        except Exception as error:
            answers.put((index, "reduce", {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}))
    time.sleep(PROBE_SECONDS)  # the queue's thread has to send; the parent ends this process


def _reduce(index: int, together: int, port: int) -> dict[str, Any]:
    """Bus bytes a second as nccl-tests counts them: 2 (n-1)/n of the message for each all-reduce."""
    import torch
    import torch.distributed as dist

    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=store, rank=index, world_size=together, timeout=timedelta(seconds=REDUCE_SECONDS))
    values = torch.ones(REDUCED_BYTES // 4, device="cuda")
    for _ in range(2):
        dist.all_reduce(values)
        torch.cuda.synchronize()
    if values[0].item() != together**2:
        return {"error": f"the sum is {values[0].item()} instead of {together**2}"}
    began, times = time.perf_counter(), 5
    for _ in range(times):
        dist.all_reduce(values)
    torch.cuda.synchronize()
    rate = times * REDUCED_BYTES * 2 * (together - 1) / together / (time.perf_counter() - began)
    return {"ranks": together, "bytes": REDUCED_BYTES, "bus_bytes_per_second": rate}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
