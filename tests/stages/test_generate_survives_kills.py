"""A run killed at any moment, stopped, or short of disk continues: nothing finished is lost or repeated.

Real processes and SIGKILL; what an unbroken run leaves is the reference.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from generate_in_process import prepare, prompt

from jobs.storage.states import StateStore

SCRIPT = Path(__file__).with_name("generate_in_process.py")
ROWS = [prompt(i, f"Explain the function number {i}.", *(["And why?", "Really?"] if i % 4 == 0 else [])) for i in range(24)]
CHANGES = {"generate": {"max_new_tokens": 60}}


def start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), "eval"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def lines(folder: Path) -> list[str]:
    path = folder / "states/eval/responses.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def kill_after(folder: Path, committed: int) -> list[str]:
    process = start(folder)
    while len(lines(folder)) < committed:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
    return lines(folder)


def finish(folder: Path) -> dict:
    out, err = start(folder).communicate(timeout=280)
    assert out.strip(), err
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_result(tmp_path):
    unbroken, broken = prepare(tmp_path / "unbroken", ROWS, **CHANGES), prepare(tmp_path / "broken", ROWS, **CHANGES)
    counts = finish(unbroken)
    first = kill_after(broken, 5)
    second = kill_after(broken, len(first) + 5)
    assert second[: len(first)] == first, "a committed answer was touched"
    assert finish(broken)["turns"] == counts["turns"] == 36
    assert lines(broken)[: len(second)] == second
    a, b = StateStore(unbroken / "states/eval"), StateStore(broken / "states/eval")
    ids = [json.loads(line)["id"] for line in lines(broken)]
    assert len(ids) == len(set(ids)) == 36 and a.ids() == b.ids()
    assert b.verify().problems == []
    for sample_id in a.ids():
        assert a.response(sample_id) == b.response(sample_id)
        one, other = a.read(sample_id), b.read(sample_id)
        assert ((one.taps - other.taps).norm(dim=-1) / one.taps.norm(dim=-1)).max() < 1e-4
