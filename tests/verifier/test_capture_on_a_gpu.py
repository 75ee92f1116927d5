"""What only a CUDA device can show of capture, each step in a process of its own (gpu_proof.py says what each does).

Compiled with CUDA graphs and asynchronous scheduling, the states of hundreds of answers of very unequal length equal
the independent reference and a prefill pass; two tap sets on one compile cache each give their own states; the draft
head is fed, bit for bit, what is stored; states rounded to FP8 are what a CPU rounds them to; two GPUs, tensor-parallel or with an attention each, give one GPU's states.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SCRIPT = Path(__file__).with_name("gpu_proof.py")


@pytest.fixture(scope="module")
def proved(tmp_path_factory):
    """proved(step) -> what it found, run once; the steps share a folder and a compile cache."""
    work = tmp_path_factory.mktemp("proof")
    environ = os.environ | {"VLLM_CACHE_ROOT": str(work / "cache")}

    def run(step: str) -> dict:
        done = subprocess.run([sys.executable, str(SCRIPT), step, str(work)], env=environ, capture_output=True, text=True, timeout=600)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, done.stderr[-4000:]
        found = json.loads(lines[-1].removeprefix("RESULT "))
        assert found["holds"], found
        return found

    return functools.cache(run)


@pytest.mark.parametrize("step", ["compiled", "exact32", "eager", "fp8", "served", "served-llama"])
def test_states_are_exact(proved, step):
    found = proved(step)
    if step in ("compiled", "exact32", "fp8"):
        assert found["num_cudagraph_captured"] > 0 and found["async"] and found["preemptions"] > 0, found


def test_two_tap_sets_share_a_compile_cache(proved):
    first = proved("taps-a")["num_inductor_compiles"]
    assert proved("taps-b")["num_inductor_compiles"] == first
    # The first set again: its graphs come from the cache, so the cache was in use when the second set was started.
    # An H200 compiled 6 of 11 again: what vLLM found equal to a graph before it has no entry of its own.
    assert proved("taps-a-again")["num_inductor_compiles"] < first


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("step", ["tp2", "tp2-experts", "dp2", "dp2-experts", "dp2-experts-compiled"])
def test_two_gpus_give_the_states_of_one(proved, step):
    """In fp32 where the step is eager: in bf16 a compiled engine and an eager one differ by more than two runs of one."""
    proved("compiled" if step.endswith("compiled") else "exact32")
    proved(step)
