"""One training in a process of its own, for tests that kill it or start several: not a test itself.

`start` forks it from a server process that has PyTorch imported and nothing else done, so a test that
needs a dozen processes does not pay for a dozen imports. The process trains on the store in `states`,
writes what is reported to `folder`/lines.jsonl, errors to `folder`.err, the trained weights to
`folder`.safetensors. SIGTERM is the way a run is asked to stop; exit code 75 then.
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from synthetic_states import Language, draft_ids, small_config

from jobs.draft.model import Eagle3Head
from jobs.draft.team import train_along
from jobs.draft.trainer import train
from jobs.errors import JobError
from jobs.settings import TrainSettings
from jobs.storage.states import StateStore

SETTINGS = dict(
    device="cpu", epochs=3, tokens_per_step=96, max_length=64, learning_rate=5e-3, warmup_share=0.1, ttt_steps=3,
    single_step_share=0.3, ttt_decay=0.9, weight_decay=0.01, log_every=1, checkpoint_every=4, accumulate=2,
)  # fmt: skip

PRELOADED = ["train_in_process", "torch.utils.tensorboard", "torch._inductor", "torch._dynamo"]  # what a training imports late


def start(states: Path, folder: Path, *, environment: dict[str, str] | None = None, **changes) -> multiprocessing.Process:
    """Starts a training with these changes to SETTINGS; `wait` for it or send it a signal by its pid."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    process = server.Process(target=_child, args=(states, folder, environment or {}, changes))
    process.start()
    return process


def wait(process: multiprocessing.Process, folder: Path, seconds: float = 120) -> tuple[int, str]:
    """(exit code, what it wrote to standard error)."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"the training in {folder} did not end in {seconds} s")
    return process.exitcode, Path(f"{folder}.err").read_text()


def lines(folder: Path) -> list[dict]:
    """What was reported so far, a line still being written left out."""
    path = folder / "lines.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")] if path.exists() else []


def _child(states: Path, folder: Path, environment: dict[str, str], changes: dict) -> None:
    os.environ.update(environment)
    if "SLOW_READS" in os.environ:
        _slow_reads(float(os.environ["SLOW_READS"]))
    if "DIE_AT" in os.environ:
        _die_at(*os.environ["DIE_AT"].rsplit(":", 1))
    descriptor = os.open(f"{folder}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 2)
    sys.exit(main(states, folder, changes))


def _slow_reads(seconds: float) -> None:
    """Reads from a store take so much longer, one after the other, as from a disk of this process alone."""
    read, disk = StateStore.copy, threading.Lock()

    def slowed(*arguments, **options):
        with disk:
            time.sleep(seconds)
        return read(*arguments, **options)

    StateStore.copy = slowed


def _die_at(file: str, line: str) -> None:
    """SIGKILL as soon as a thread that is started from now on comes to this line."""

    def trace(frame, event, argument):
        if event == "line" and frame.f_lineno == int(line):
            os.kill(os.getpid(), signal.SIGKILL)
        return trace if frame.f_code.co_filename == file else None

    threading.settrace(trace)


def main(states: Path, folder: Path, changes: dict) -> int:
    torch.use_deterministic_algorithms(True)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("RANK", 0)) % len(cores)]})
    elsewhere = changes.pop("elsewhere", None)  # the run directory of a process on another machine
    settings = TrainSettings(**SETTINGS | changes)
    if int(os.environ.get("RANK", 0)):
        try:
            train_along(settings.device, settings.accumulate, elsewhere and Path(elsewhere))
        except JobError as error:
            print(error.sentence(), file=sys.stderr)
            return error.exit_code
        return 0
    language, config = Language.make(), small_config()
    head = Eagle3Head.from_scratch(config, language.verifier, draft_ids(config), seed=1)
    store, stop = StateStore(states), []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    folder.mkdir(exist_ok=True)
    with (folder / "lines.jsonl").open("a") as log:

        def report(line):
            log.write(json.dumps(line) + "\n")
            log.flush()

        try:
            train(
                settings=settings, seed=7, head=head, verifier=language.verifier, store=store, sample_ids=store.ids(),
                folder=folder, warm=False, evaluate=None, should_stop=lambda: bool(stop), report=report,
            )  # fmt: skip
        except JobError as error:
            print(error.sentence(), file=sys.stderr)
            return error.exit_code
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, f"{folder}.safetensors")
    return 0
