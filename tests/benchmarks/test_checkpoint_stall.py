"""Training stands still for under 1 % of the time between two checkpoints, and their writing does not hold its thread up."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("checkpoint_stall.py")


def test_a_checkpoint_costs_next_to_nothing():
    command = [sys.executable, str(SCRIPT), "--size", "tiny", "--megabytes", "192"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    training, pause = (json.loads(line) for line in done.stdout.splitlines())
    assert training["share_at_200_steps"] < 0.01, training
    assert pause["ours_seconds"] < pause["save_file_seconds"], pause
