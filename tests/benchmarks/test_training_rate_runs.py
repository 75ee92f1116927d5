"""The training benchmark itself runs from end to end at its tiny size: a GPU's time must not go into its mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("training_rate.py")


@pytest.mark.slow
def test_every_part_that_needs_no_gpu(tmp_path):
    command = [
        sys.executable,
        str(SCRIPT),
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--parts",
        "rate,forms,disk",
        "--rows",
        "1024",
        "--samples",
        "8",
        "--measure",
        "0.1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [line for line in lines if "error" in line or "skipped" in line], lines
    told = {line["what"] for line in lines}
    assert {
        "ours",
        "ours.packed_503_token_samples",
        "ours.first_epoch_a_quarter_undecided",
        "ours.one_document",
        "ours.tf32",
        "disk.ours.bfloat16",
        "disk.ours.float8_e4m3fn",
        "end",
    } <= told
    assert all(line["tokens_per_second"] > 0 for line in lines if line["what"].startswith(("ours", "disk")))
