"""A smoke run with small numbers, as a real process: what the tests of the run itself start.

Its head is not expected to be good; everything else is as in the full smoke run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SMALL = (
    "prompts.train_samples=24",
    "prompts.eval_samples=8",
    "generate.max_new_tokens=24",
    "verifier.max_num_seqs=8",
    "train.epochs=2",
    "train.checkpoint_every=2",
    "train.log_every=1",
    "vocab.min_coverage=0.2",
    "evaluate.min_gain_over_untrained=-9",
    "evaluate.min_gain_over_ngram=-9",
    "evaluate.bootstrap=100",
)


def start(
    run_dir: Path, *overrides: str, arguments: tuple[str, ...] = (), small: bool = True, environment: dict | None = None
) -> subprocess.Popen:
    settings = [part for item in ((SMALL if small else ()) + overrides) for part in ("--set", item)]
    command = [sys.executable, "-m", "entrypoints.cli", "smoke", "--run-dir", str(run_dir), "--json", *settings, *arguments]
    errors = open(run_dir.parent / f"{run_dir.name}.log", "a")  # noqa: SIM115  outlives this call
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | (environment or {}))


def finish(process: subprocess.Popen, timeout: float = 600) -> dict:
    """The JSON object the run printed; its exit code must be that of the process."""
    output, _ = process.communicate(timeout=timeout)
    lines = output.splitlines()
    assert len(lines) == 1, output
    result = json.loads(lines[0])
    assert result["exit_code"] == process.returncode
    return result


def run(run_dir: Path, *overrides: str, **options) -> dict:
    return finish(start(run_dir, *overrides, **options))


def wait_for(condition: Callable[[], bool], process: subprocess.Popen, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the run ended with {process.returncode} before the moment came"
        assert time.monotonic() < deadline, "the moment did not come"
        time.sleep(0.02)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill(process: subprocess.Popen, number: int = signal.SIGKILL) -> None:
    os.kill(process.pid, number)
