"""vLLM's engine core in a process of its own, as on GPUs: it is killed or it hangs, and the same command finishes the rest.

On a CPU the engine is this very process, unless vLLM is told otherwise, so no other test loses a core that answers
requests. What is finished stands in the store, whose lock the lost process held.
"""

import json
import os
import signal
import time

import pytest
from captured import answer_into, requests
from engine_processes import ends_with_75, engine_and_processes

from jobs.settings import VerifierSettings
from jobs.storage.responses import RESPONSES

pytestmark = pytest.mark.slow

ASKED = 24
STALL = 8  # seconds
SETTINGS = VerifierSettings(
    dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=64, enforce_eager=True, stall_seconds=STALL
)


@pytest.fixture(autouse=True)
def core_in_its_own_process(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # else the core compiles vLLM's sampler


@pytest.mark.parametrize(("sent", "soonest"), [(signal.SIGKILL, 0), (signal.SIGSTOP, STALL / 2)], ids=["killed", "hung"])
def test_the_same_command_finishes_the_rest(tmp_path, sent, soonest):
    """soonest: seconds; a core that hangs is not told from a slow one before `stall_seconds`."""
    asked, struck = requests(ASKED), []
    with engine_and_processes(SETTINGS) as (engine, processes):
        [core] = engine._llm.llm_engine.engine_core.resources.engine_manager.processes
        assert core.pid in {process.pid for process in processes}

        def after_a_few(answers: int) -> None:
            if answers == 5:
                struck.append(time.monotonic())
                os.kill(core.pid, sent)

        with ends_with_75():
            answer_into(engine, tmp_path, asked, on_commit=after_a_few)
        assert soonest <= time.monotonic() - struck[0] < 60
    kept = (tmp_path / RESPONSES).read_text().splitlines()
    finished = {json.loads(line)["id"] for line in kept}
    assert 5 <= len(finished) < ASKED

    with engine_and_processes(SETTINGS) as (again, _):
        store = answer_into(again, tmp_path, [request for request in asked if request.id not in finished])
    lines = (tmp_path / RESPONSES).read_text().splitlines()
    assert lines[: len(kept)] == kept, "a finished answer was touched"
    assert len(lines) == ASKED and store.ids() == sorted(request.id for request in asked)
    assert store.verify().problems == []
