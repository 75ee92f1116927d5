"""An engine that does not start ends with 78 where the same settings would fail again, else with 75, and leaves nobody behind.

The core is a process of its own, as on GPUs: the driver is only told that it failed.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
import torch

from jobs.errors import MustFix, TryAgain
from jobs.verifier.start_failures import Raised, judged
from jobs.verifier.tiny import CHECKPOINT

SAID = "eagle3-job: "  # as in start_faults.py, which imports vLLM
SCRIPT = Path(__file__).with_name("start_faults.py")


def start(tmp_path: Path, worker: str = "-", folder: Path = CHECKPOINT, **settings) -> tuple[int, str, float, Path]:
    """(exit code, its sentence, seconds, log) of a process that starts an engine; none of its processes lives on."""
    mark, log, begun = uuid.uuid4().hex, tmp_path / "log.txt", time.monotonic()
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1", "MARK_OF_TEST": mark}
    with open(log, "w") as output:
        ended = subprocess.run(
            [sys.executable, str(SCRIPT), str(folder), json.dumps(settings), worker],
            stderr=output,
            stdout=output,
            env=environment,
            timeout=420,
        )
    seconds = time.monotonic() - begun
    time.sleep(1)  # multiprocessing's own helper ends when it sees that nobody is left
    assert not [process for process in psutil.process_iter() if marked(process, mark)], "processes were left behind"
    [said] = [line.removeprefix(SAID) for line in log.read_text().splitlines() if line.startswith(SAID)]
    return ended.returncode, said, seconds, log


def marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("MARK_OF_TEST") == mark
    except psutil.Error:
        return False


@pytest.fixture
def long_context(tmp_path):
    """The tiny verifier with 262,144 positions: their cache is larger than the GiB that a CPU engine takes by default."""
    folder = tmp_path / "verifier"
    shutil.copytree(CHECKPOINT, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 1 << 18
    config["text_config"]["rope_scaling"]["original_max_position_embeddings"] = 1 << 16
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_a_cache_that_holds_no_request_is_to_be_fixed(tmp_path, long_context):
    code, said, _, _ = start(tmp_path, folder=long_context, max_model_len=1 << 18)
    assert code == 78, said
    assert said.startswith("The KV cache cannot hold one request of verifier.max_model_len tokens") and "262144" in said
    assert str(long_context) in said and "lower verifier.max_model_len" in said and "http" not in said


@pytest.mark.slow
def test_memory_that_one_of_two_workers_lacks_is_to_be_fixed(tmp_path):
    code, said, _, _ = start(tmp_path, "OutOfMemory", tensor_parallel_size=2)
    assert code == 78, said
    assert (
        said.startswith("The verifier does not fit: CUDA out of memory; Tried to allocate 2.19 GiB (")
        and "verifier.tensor_parallel_size" in said
    )


@pytest.mark.slow
def test_a_core_that_is_killed_while_it_loads_is_a_passing_fault(tmp_path):
    code, said, _, log = start(tmp_path, "Killed")
    assert code == 75, said
    assert "ended and did not say why" in said and "run the same command again" in said and str(log) in said


@pytest.mark.slow
def test_a_load_that_hangs_ends_at_its_limit(tmp_path):
    code, said, seconds, log = start(tmp_path, "Hangs", tensor_parallel_size=2, start_minutes=1.5)
    assert code == 75, said
    assert "not up after 1.5 minutes" in said and "verifier.start_minutes" in said and str(log) in said
    assert 90 < seconds < 240


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing"), MustFix, "tokens: No available memory for the cache blocks ("),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), MustFix, "does not fit"),
        (RuntimeError("CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try lowering"), MustFix, "1024 dummy requests ("),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), MustFix, "does not fit"),
        (ValueError("Free memory on device cuda:0 (3/80 GiB) on startup is less than desired GPU memory utilization (0.9, 72 GiB)."), MustFix, "nvidia-smi"),
        (KeyError("model.layers.3.mlp.experts.w13_weight"), MustFix, "refuses the verifier: KeyError"),
        (ModuleNotFoundError("No module named 'fastsafetensors'"), MustFix, "No module named"),
        (OSError(errno.ENOSPC, "No space left on device"), MustFix, "--shm-size"),
        (MustFix("Taps are wrong", where="verifier.taps", remedy="name others"), MustFix, "Taps are wrong (verifier.taps): name others."),
        (TryAgain("The disk does not answer"), TryAgain, "The disk does not answer."),
        (AssertionError("Error in memory profiling. Initial free memory 3 GiB, current free memory 4 GiB."), TryAgain, "memory profiling"),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), TryAgain, "network error"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), TryAgain, "ECC"),
        (OSError(errno.EIO, "Input/output error"), TryAgain, "Input/output error"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), TryAgain, "reset by peer"),
        (Exception("WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."), TryAgain, "did not say why"),
    ],
)  # fmt: skip
def test_what_would_fail_again_is_told_from_what_may_pass(error, kind, said):
    given = Raised(**json.loads(json.dumps(Raised.of(error).__dict__)))  # as it comes from another process
    for noted in (False, True):
        told = judged(given, Path("/verifier"), noted=noted)
        assert type(told) is kind
        assert said in told.sentence() and "\n" not in told.sentence()
