"""Two real vLLM servers answer, one of them is killed in mid-run: what is kept is what both of them give.

The servers are `vllm serve` of the tiny verifier, as a person would start them on other machines; the states are made
by the engine of this process and compared with an independent forward pass in plain PyTorch. Greedy answers are
compared with this project's own engine. Drawn ones are a server's own, because capture seeds every position anew
(jobs/verifier/capture.py) and a plain server does not; on CPU the two kinds may not mix, or vLLM 0.16.0 ignores the seeds.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from generate_in_process import SMALL, context_of, prepare, prompt, small_engine

sys.path.insert(0, str(Path(__file__).parents[1] / "verifier"))
from captured import assert_equals_reference  # noqa: E402
from deepseek_reference import Reference  # noqa: E402

from jobs.errors import TryAgain  # noqa: E402
from jobs.ports import free_port  # noqa: E402
from jobs.settings import VerifierSettings  # noqa: E402
from jobs.stages import answering, generate  # noqa: E402
from jobs.storage.states import StateStore  # noqa: E402
from jobs.verifier.engine import VerifierEngine, VerifierFacts, prepare_environment  # noqa: E402
from jobs.verifier.remote import RemoteAnswers  # noqa: E402
from jobs.verifier.serve import VLLM, serve_arguments, start_with_this_process  # noqa: E402
from jobs.verifier.tiny import CHECKPOINT  # noqa: E402

pytestmark = pytest.mark.slow
START_SECONDS = 240
# Of the servers: a prompt that is split over two steps and has a seed ends vLLM 0.16.0's engine on CPU (NOTES.md).
UNSPLIT = 4096
GREEDY = {"max_new_tokens": 24, "thinking": {"temperature": 0.0}, "instant": {"temperature": 0.0}}
ROWS = [prompt(i, f"What does the function number {i} return?", "And why?", thinking=i % 2 == 0) for i in range(16)]


class Served:
    """A `vllm serve` of the tiny verifier that is starting."""

    def __init__(self, folder: Path, number: int):
        port = free_port()
        settings = VerifierSettings(**SMALL["verifier"] | {"max_num_batched_tokens": UNSPLIT})
        prepare_environment(settings, VerifierFacts.read(CHECKPOINT))
        environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"} | {
            "OMP_NUM_THREADS": "1"
        }
        command = [
            *VLLM,
            "serve",
            str(CHECKPOINT),
            *serve_arguments(CHECKPOINT, settings, None, seed=100 + number),
            "--port",
            str(port),
            "--host",
            "127.0.0.1",
        ]
        # A name of its own, and for one of them chunks of several tokens, as README advises.
        command += ["--served-model-name", "tiny", *(["--stream-interval", "7"] if number else [])]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"server-{number}.log"
        with self.log.open("wb") as output:
            self.process = start_with_this_process(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            time.sleep(0.2)
        raise AssertionError(f"no answer from {self.url}: {self.log.read_text()[-2000:]}")

    def answered(self) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers, and while they load the engine of this process: (servers, engine)."""
    folder = tmp_path_factory.mktemp("servers")
    started = [Served(folder, number) for number in range(2)]
    try:
        with small_engine() as engine:
            for server in started:
                server.wait()
            yield started, engine
    finally:
        for server in started:
            server.kill()


def run_from(folder: Path, engine: VerifierEngine, urls: list[str]) -> tuple[dict, list[str]]:
    """The eval split of `folder` with its answers from `urls`, and what the person was told."""
    values = json.loads((folder / "settings.json").read_text())
    values["generate"] |= {"endpoints": urls, "endpoint_connections": 6}
    (folder / "settings.json").write_text(json.dumps(values))
    context = context_of(folder)
    context.start_engine = lambda context: RemoteAnswers(engine, context.settings, context.note) if urls else engine
    try:
        counts = generate.stage("eval").run(context)
    finally:
        context.run.close()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return counts, [event["text"] for event in events if event["kind"] == "note"]


def kill_after(server: Served, log: Path, answers: int) -> threading.Thread:
    def wait_and_kill() -> None:
        while not log.exists() or len(log.read_bytes().splitlines()) < answers:
            time.sleep(0.005)
        server.kill()

    thread = threading.Thread(target=wait_and_kill, daemon=True)
    thread.start()
    return thread


def responses(folder: Path) -> dict:
    store = StateStore(folder / "states/eval")
    return {sample_id: store.response(sample_id) for sample_id in store.ids()}


def test_servers_that_die_change_nothing_that_is_kept(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(answering, "CAPTURE_WAIT", 1.0)  # what is said of a machine with other work on it is not the subject
    (first, second), engine = servers
    whole, killed, stopped = (prepare(tmp_path / name, ROWS) for name in ("whole", "killed", "stopped"))
    greedy, alone = (prepare(tmp_path / name, ROWS[:6], generate=GREEDY) for name in ("greedy", "alone"))

    counts, said = run_from(whole, engine, [first.url, second.url + "/v1"])
    assert (counts["turns"], counts["dropped"], said) == (32, {}, [])
    assert min(first.answered(), second.answered()) > 3, "both had their share"
    store = StateStore(whole / "states/eval")
    store.verify()
    assert_equals_reference(store, Reference(CHECKPOINT))
    run_from(greedy, engine, [first.url, second.url])
    run_from(alone, engine, [])
    assert responses(greedy) == responses(alone) and len(responses(alone)) == 12

    killing = kill_after(first, killed / "states/eval/responses.jsonl", 5)
    counts, said = run_from(killed, engine, [first.url, second.url])
    killing.join()
    assert counts["turns"] == 32 and len(said) == 1 and first.url in said[0] and "go to the other servers" in said[0]
    assert responses(killed) == responses(whole)
    again = StateStore(killed / "states/eval")
    for sample_id in store.ids():
        a, b = again.read(sample_id), store.read(sample_id)
        assert ((a.taps - b.taps).norm(dim=-1) / b.taps.norm(dim=-1)).max() < 1e-4
        torch.testing.assert_close(a.logprob, b.logprob, rtol=0, atol=1e-3)

    killing = kill_after(second, stopped / "states/eval/responses.jsonl", 5)
    with pytest.raises(TryAgain, match="answers any more") as error:
        run_from(stopped, engine, [first.url, second.url])
    killing.join()
    assert error.value.exit_code == 75 and "\n" not in str(error.value)
    kept = responses(stopped)
    assert 5 <= len(kept) < 32 and kept.items() <= responses(whole).items()
    assert run_from(stopped, engine, [])[0]["turns"] == 32, "where the answers come from may change in mid-run"
    assert kept.items() <= responses(stopped).items()
