"""Preflight on GPUs: what each answer of the probe leads to, the probe itself where there are some, and a driver that fails."""

import os
import re
import time

import pytest

from jobs import run
from jobs.context import Context
from jobs.job_file import load
from jobs.reporting.display import Display
from jobs.stages import preflight
from jobs.stages.preflight import gpus


def box(count=8, **changes):
    """What the probe says of a healthy box of B300s in the image for them."""
    gpu = {"name": "NVIDIA B300", "capability": "10.3", "memory_bytes": 288e9, "free_bytes": 287e9, "kernel": None}
    found = {
        "cuda": "13.0", "architectures": ["sm_80", "sm_90", "sm_100", "sm_120"], "driver": "580.82.07", "ptxas": "/usr/local/cuda/bin/ptxas",
        "gpus": [{"index": index, **gpu} for index in range(count)], "reduce": {"ranks": 8, "bus_bytes_per_second": 400e9},
    }  # fmt: skip
    for key, value in changes.items():
        if key in gpu:
            found["gpus"][3][key] = value
        else:
            found[key] = value
    return found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        (
            {"kernel": "PTXASError: ptxas fatal: Value 'sm_103a' is not defined", "ptxas": None},
            "GPU 3 .*sm_103a.*TRITON_PTXAS_PATH is not set, it must be the ptxas of a CUDA 13",
        ),
        ({"kernel": "it computes something else"}, "GPU 3 .*computes something else"),
        ({"cuda": "12.8"}, r"10.3 \(B300\) needs CUDA 13, this image has 12.8"),
        ({"architectures": ["sm_80", "sm_90a"]}, "torch is built for sm_80, sm_90a, the GPUs have compute capability 10.3"),
        ({"driver": "570.10"}, "CUDA 13.0 needs 580 or newer"),
        ({"free_bytes": 100e9}, "GPU 3 has 100 of 288 GB free"),
        ({"gpus": [], "why": "no driver"}, r"torch sees no GPU \(no driver\): start the container with --gpus all"),
        ({"reduce": {"error": "timeout"}}, "all-reduce over 8 GPUs failed: timeout.*NCCL_P2P_DISABLE=1"),
        ({"reduce": {"ranks": 8, "bus_bytes_per_second": 0.3e9}}, "moves 0.30 GB/s"),
        ({"reduce": {"ranks": 8, "bus_bytes_per_second": 20e9}}, "moves 20 GB/s, that is PCIe and not the NVLink"),
        ({"error": "looking at the GPUs took over 115 s and was given up"}, "given up: see that nvidia-smi"),
    ],
)
def test_what_the_probe_says_of_a_box(changes, expected):
    sentences = list(gpus.judge(box(**changes), 8, 540e9, 8, nvlink=True))
    assert len(sentences) == (expected is not None), sentences
    if expected:
        assert re.search(expected, sentences[0]), sentences[0]


def test_too_few_gpus_and_too_little_memory():
    two = list(gpus.judge(box(count=4), 8, 540e9, 8))
    assert "tensor_parallel_size = 8 with 4 GPUs visible" in two[0] and "has 8 GPUs, 4 of them visible" in two[1]
    assert "540 GB do not fit into 288 GB on 1 GPU:" in next(gpus.judge(box(), 1, 540e9, None))


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [
        ("10.3", ["sm_100"], True), ("10.3", ["sm_100a"], False), ("10.3", ["sm_100f"], True), ("12.0", ["sm_90", "compute_90"], True),
        ("12.0", ["sm_100"], False), ("9.0", ["sm_90a"], True), ("8.6", ["sm_89"], False), ("9.0", [], False),
    ],
)  # fmt: skip
def test_which_code_runs_on_which_gpu(capability, architectures, expected):
    assert gpus.runs_on(capability, architectures) is expected


@pytest.mark.gpu
def test_a_kernel_and_a_sum_on_the_gpus_that_are_here():
    count = len(preflight.visible_gpus())
    if not count:
        pytest.skip("needs a CUDA device")
    sentences, found = gpus.problems(count, 0)
    assert sentences == [] and len(found["gpus"]) == count


@pytest.fixture
def driver_says(tmp_path, monkeypatch):
    """Puts a driver's tool of these shell lines on PATH."""

    def put(lines):
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        tool.write_text(f"#!/bin/sh\n{lines}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")

    return put


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "ended with 18: Failed to initialize NVML"),
        ("exec sleep 60", "did not answer within 0"),
    ],
)
def test_a_driver_that_fails_or_hangs_is_told_with_its_words(tmp_path, driver_says, monkeypatch, lines, said):
    """As after a GPU is lost or a driver was updated: the run begins, and preflight says it instead of `--gpus all`."""
    driver_says(lines)
    monkeypatch.setattr(run, "DRIVER_SECONDS", 0.5)
    settings = load("smoke", overrides=["train.device=cuda"], environment={})
    directory, began = run.RunDirectory(tmp_path / "run"), time.monotonic()
    directory.begin(settings)
    (sentence,) = preflight.CHECKS["gpus"](Context(settings, directory, Display.open("plain")), {})
    assert time.monotonic() - began < 10 and directory.ledger["machine"]["gpus"] == []
    assert f"no GPU is visible (nvidia-smi {said}" in sentence and "mend the driver" in sentence and "--gpus all" not in sentence


def test_a_gpu_that_the_driver_names_and_torch_cannot_open(driver_says):
    """The probe in its own process, with this machine's torch."""
    if preflight.visible_gpus():
        pytest.skip("torch opens the GPUs of this machine")
    driver_says('case "$*" in *driver_version*) echo 570.86.15 ;; *) echo "NVIDIA B300 SXM6 AC" ;; esac')
    assert preflight.visible_gpus() == ["NVIDIA B300 SXM6 AC"]
    (sentence,), found = gpus.problems(8, 540e9, 8)
    assert found["driver"] == "570.86.15" and found["gpus"] == []
    assert sentence.startswith("nvidia-smi is here but torch sees no GPU (") and "start the container with --gpus all" in sentence
