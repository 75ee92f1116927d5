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

import psutil
import pytest
from generate_in_process import prepare, prompt

from jobs.storage.extents import read_index
from jobs.storage.states import StateStore

SCRIPT = Path(__file__).with_name("generate_in_process.py")
ROWS = [prompt(i, f"Explain the function number {i}.", *(["And why?", "Really?"] if i % 4 == 0 else [])) for i in range(24)]
CHANGES = {"generate": {"max_new_tokens": 60}}


def start(folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), "eval"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"},  # else each process compiles vLLM's sampler
    )  # fmt: skip


def lines(folder: Path) -> list[str]:
    path = folder / "states/eval/responses.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def kill_after(folder: Path, committed: int) -> list[str]:
    """What is committed after the driver was killed; none of its processes lives on, or it would keep GPUs and locks."""
    process = start(folder)
    while len(lines(folder)) < committed:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, orphans = psutil.wait_procs(started, timeout=30)
    assert [orphan.cmdline() for orphan in orphans if orphan.status() != psutil.STATUS_ZOMBIE] == []
    process.stdout.close()
    process.stderr.close()
    return lines(folder)


def finish(folder: Path) -> dict:
    out, err = start(folder).communicate(timeout=1200)
    assert out.strip(), err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> tuple[Path, dict]:
    """A run that nothing happens to, and its counts."""
    folder = prepare(tmp_path_factory.mktemp("runs") / "unbroken", ROWS, **CHANGES)
    return folder, finish(folder)


def loads(folder: Path) -> int:
    return json.loads((folder / "run.json").read_text())["verifier_loads"]


@pytest.mark.slow
def test_a_killed_run_continues_to_the_same_result(unbroken, tmp_path):
    unbroken, counts = unbroken
    broken = prepare(tmp_path / "broken", ROWS, **CHANGES)
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


@pytest.mark.slow
def test_a_killed_run_of_two_replicas_continues_to_the_same_result(unbroken, tmp_path):
    """Data-parallel attention: two engines write one store; that they load the verifier together is one load."""
    unbroken, counts = unbroken
    broken = prepare(tmp_path / "broken", ROWS, **CHANGES)
    settings = json.loads((broken / "settings.json").read_text())
    settings["verifier"] |= {"tensor_parallel_size": 2, "parallel": "dp"}
    (broken / "settings.json").write_text(json.dumps(settings))
    first = kill_after(broken, 5)
    assert loads(broken) == 1
    done = finish(broken)
    assert loads(broken) == 2 and {name: done[name] for name in ("asked", "turns", "dropped")} == {
        name: counts[name] for name in ("asked", "turns", "dropped")
    }
    assert lines(broken)[: len(first)] == first, "a committed answer was touched"
    a, b = StateStore(unbroken / "states/eval"), StateStore(broken / "states/eval")
    ids = [json.loads(line)["id"] for line in lines(broken)]
    assert len(ids) == len(set(ids)) == 36 and a.ids() == b.ids()
    assert b.verify().problems == []
    assert {extent.shard % 2 for extent in read_index(broken / "states/eval/index.jsonl")} == {0, 1}, "each replica writes a share"
    # Sums over the experts' halves round otherwise, and a token drawn on the edge may fall to the other side; its conversation then differs.
    equal = [i for i in ids if a.response(i) == b.response(i)]
    assert len(equal) >= 30
    for sample_id in equal:
        one, other = a.read(sample_id), b.read(sample_id)
        assert ((one.taps - other.taps).norm(dim=-1) / one.taps.norm(dim=-1)).max() < 1e-4
        assert ((one.final - other.final).norm(dim=-1) / one.final.norm(dim=-1)).max() < 1e-4
        assert (one.logprob - other.logprob).nan_to_num().abs().max() < 1e-3
