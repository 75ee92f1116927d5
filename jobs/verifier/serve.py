"""The verifier behind vLLM's own server, in a process of its own, and vLLM's own load on it.

Decision: `vllm serve` and `vllm bench serve` as a user would type them, not the engine of this
process. What is to be known is what deployment gives: HTTP, detokenization, scheduling and the
drafter on its real path. Both commands are kept beside their figures. `compat` reaches the server
through vLLM's plugin hook, as on any machine where this package is installed.

Prefix caching is off, so that the second concurrency does not find the first one's prompts computed.
"""

import contextlib
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.errors import TryAgain
from jobs.ports import free_port
from jobs.settings import VerifierSettings
from jobs.verifier.engine import prepare_environment
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.loading import load_arguments, read_ahead
from jobs.verifier.parallel import parallel

VLLM = ("-m", "vllm.entrypoints.cli.main")
# A server in a session of its own would outlive a run that is killed, and hold every GPU: the kernel sends it SIGTERM then.
WITH_THIS_PROCESS = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
POLL_SECONDS = 0.2
# Between SIGTERM and SIGKILL: the server ends its workers and gives the GPUs back.
END_SECONDS = 30
# Percentiles of latency that are kept beside mean and median.
PERCENTILES = "90,99"
DYING_SECONDS = 10  # of a process that frees gigabytes


@dataclass(frozen=True)
class Server:
    """A running server: its process, its address, the command it was started with, what it prints, and the load's process."""

    process: subprocess.Popen
    url: str
    command: str
    log: Path
    bench: subprocess.Popen

    def check(self) -> None:
        """Raise TryAgain if the process has ended."""
        if self.process.poll() is not None:
            raise TryAgain(
                f"The live server died with {_ending(self.process.returncode)}{last_error(self.log)}", where=str(self.log), remedy="run the same command again"
            )  # fmt: skip


@contextlib.contextmanager
def served(
    model: Path,
    settings: VerifierSettings,
    log: Path,
    *,
    speculative: dict[str, Any] | None,
    seed: int,
    start_seconds: float,
    should_stop: Callable[[], None],
) -> Iterator[Server]:
    """The verifier served for as long as the context lasts; every process it started has ended afterwards.

    Args:
        log: file of what the server prints.
        speculative: vLLM's speculative config, None for plain decoding.
        start_seconds: longest wait until it answers.
        should_stop: called while it waits; raises to break off.

    Raises:
        TryAgain: it ended, or did not answer in time.
    """
    port = free_port()
    command = [*VLLM, "serve", str(model), *serve_arguments(model, settings, speculative, seed), "--host", "127.0.0.1", "--port", str(port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A session of its own: Ctrl-C is for this process, which ends the server in order.
        process = start_with_this_process(
            command, stdout=output, stderr=subprocess.STDOUT, env=_environment(model, settings), start_new_session=True
        )
    with log.with_name(log.stem + "-load.log").open("wb") as output:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": output}
        bench = subprocess.Popen([sys.executable, "-m", "jobs.verifier.bench"], env=_environment(model, settings), **pipes)
    server = Server(process, f"http://127.0.0.1:{port}", shlex.join(("vllm", *command[len(VLLM) :])), log, bench)
    try:
        with read_ahead(model, settings) or contextlib.nullcontext():
            _wait_until_it_answers(server, start_seconds, should_stop)
        yield server
    finally:
        bench.kill()
        bench.wait()
        bench.stdin.close()
        bench.stdout.close()
        _end(process)


def start_with_this_process(arguments: list[str], **options: Any) -> subprocess.Popen:
    """Start Python with these arguments; it is told to end (SIGTERM) when this process ends, however that happens."""
    return subprocess.Popen([sys.executable, "-c", WITH_THIS_PROCESS, *arguments], **options)


def serve_arguments(model: Path, settings: VerifierSettings, speculative: dict[str, Any] | None, seed: int) -> list[str]:
    """The verifier's settings as options of `vllm serve`."""
    spread = parallel(model, settings)
    arguments = {
        "--dtype": settings.dtype,
        "--max-model-len": settings.max_model_len,
        "--max-num-seqs": spread.each(settings.max_num_seqs),
        "--max-num-batched-tokens": spread.each(settings.max_num_batched_tokens),
        "--tensor-parallel-size": settings.tensor_parallel_size // spread.replicas,
        "--gpu-memory-utilization": settings.gpu_memory_utilization,
        "--seed": seed,
    }
    if VerifierFacts.read(model).architecture == "KimiK25ForConditionalGeneration":
        arguments["--limit-mm-per-prompt"] = json.dumps({"vision_chunk": 0})
    for name, value in load_arguments(settings).items():
        arguments["--" + name.replace("_", "-")] = value if isinstance(value, str) else json.dumps(value)
    if spread.replicas > 1:
        arguments["--data-parallel-size"] = spread.replicas
    if speculative is not None:
        arguments["--speculative-config"] = json.dumps(speculative)
    flags = ["--no-enable-prefix-caching"]
    flags += (
        ["--trust-remote-code"] * settings.trust_remote_code
        + ["--enable-expert-parallel"] * spread.experts
        + ["--enforce-eager"] * settings.enforce_eager
    )
    return [*(part for name, value in arguments.items() for part in (name, str(value))), *flags]


def load(
    server: Server, model: Path, prompts: Path, out: Path, *, concurrency: int, requests: int, sampling: dict[str, float], seed: int, trust_remote_code: bool,
    stall_seconds: float, should_stop: Callable[[], None],
) -> dict[str, Any]:  # fmt: skip
    """One run of `vllm bench serve`; its result as it writes it, with the command.

    Args:
        prompts: JSONL of `prompt` (text, template applied) and `output_tokens`.
        out: file of the result, with every latency of every request.
        concurrency: requests in flight at once.
        requests: how many in all.
        sampling: temperature and top_p.
        stall_seconds: the server writes no token for so long: it hangs.

    Raises:
        TryAgain: the server died, hangs or failed requests, or the load ended without a result.
    """
    options = [
        "--backend", "openai", "--base-url", server.url, "--model", str(model), "--dataset-name", "custom", "--dataset-path", str(prompts),
        "--custom-output-len", "-1", "--skip-chat-template", "--disable-shuffle", "--num-prompts", str(requests), "--max-concurrency", str(concurrency),
        "--num-warmups", str(min(concurrency, requests)), "--seed", str(seed), "--temperature", str(sampling["temperature"]), "--top-p", str(sampling["top_p"]),
        "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", PERCENTILES, "--ready-check-timeout-sec", "0", "--save-result", "--save-detailed",
        "--result-filename", str(out), "--disable-tqdm", *(["--trust-remote-code"] if trust_remote_code else []),
    ]  # fmt: skip
    out.unlink(missing_ok=True)
    done = _watched(server, options, stall_seconds, should_stop)
    server.check()
    log = server.log.with_name(server.log.stem + "-load.log")
    if not done or not out.exists():
        raise TryAgain(
            f"The load at concurrency {concurrency} ended without a result{last_error(log)}",
            where=str(log),
            remedy="run the same command again",
        )
    result = json.loads(out.read_text())
    if result["failed"] or result["completed"] < requests:
        # A killed server's connections break before its end can be waited for: what failed is then its death, not its requests.
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(DYING_SECONDS)
        server.check()
        raise TryAgain(
            f"The live server failed {requests - result['completed']} of {requests} requests at concurrency {concurrency}{last_error(server.log)}",
            where=str(server.log), remedy="run the same command again",
        )  # fmt: skip
    return result | {"command": shlex.join(("vllm", "bench", "serve", *options))}


def _watched(server: Server, options: list[str], stall_seconds: float, should_stop: Callable[[], None]) -> bool:
    """Have the load made, broken off when the server is dead or its count of tokens stands still; False if the load died."""
    tokens, since, looked = -1.0, time.monotonic(), 0.0
    with contextlib.suppress(BrokenPipeError):
        server.bench.stdin.write(json.dumps(options).encode() + b"\n")
        server.bench.stdin.flush()
    while True:
        if select.select([server.bench.stdout], [], [], POLL_SECONDS)[0]:
            return server.bench.stdout.readline() == b"done\n"
        should_stop()
        server.check()
        if time.monotonic() - looked > max(1.0, stall_seconds / 20):
            looked, now = time.monotonic(), _generated_tokens(server.url)
            if now is not None and now != tokens:
                tokens, since = now, time.monotonic()
        if time.monotonic() - since > stall_seconds:
            raise TryAgain(
                f"The live server gave no token for {stall_seconds:g} s", where=str(server.log), remedy="run the same command again"
            )


def _generated_tokens(url: str) -> float | None:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return None
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def _wait_until_it_answers(server: Server, seconds: float, should_stop: Callable[[], None]) -> None:
    begun = time.monotonic()
    while True:
        should_stop()
        server.check()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        if time.monotonic() - begun > seconds:
            raise TryAgain(
                f"The live server did not answer within {seconds:g} s",
                where=str(server.log),
                remedy="raise evaluate.live.start_seconds, or see its log",
            )
        time.sleep(POLL_SECONDS)


def _end(process: subprocess.Popen) -> None:
    """End the server and whatever it started: nobody else is in its session."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(model: Path, settings: VerifierSettings) -> dict[str, str]:
    prepare_environment(settings, VerifierFacts.read(model))
    # This process' engine may run without a core process of its own, a server cannot.
    return {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last_error(log: Path) -> str:
    """`: …` with the last line of a log that names an error, or nothing."""
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        found = [line for line in lines if "Error" in line.split(" ")[0] or ("Error: " in line and "WARNING" not in line)]
        if found:
            # vLLM prefixes every line of a worker with its name, time and place.
            return ": " + found[-1].rpartition("] ")[2].strip()[:300]
    return ""
