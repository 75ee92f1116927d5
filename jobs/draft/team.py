"""The other processes of a training: one a GPU, started by the first and ended with it, or by `torchrun`.

The job is one process until it trains. `train` then starts as many more as there are GPUs. What they
are to do, weights, embedding, the verifier's head and the checkpoint come from the first one over the
process group, so nothing is needed on their side but the states. On several machines

    torchrun --nnodes 2 --nproc-per-node 8 … --no-python eagle3-job stage train --run-dir RUN

starts them, RUN being a copy of the run on each machine or a folder that all see; only the first
process writes there.

A process that dies is noticed within a second: the group is aborted and the training ends with
TryAgain, instead of waiting for an exchange that never comes. Signals are the first process's
business; the others hear of a stop with a step's outcome, and die with the first (PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
from torch import nn

from jobs.draft.model import Eagle3Head, VerifierWeights
from jobs.draft.ranks import joined, refuse_idle
from jobs.draft.work import Work, prepared
from jobs.errors import JobError, MustFix, TryAgain
from jobs.ports import free_port
from jobs.settings import TrainSettings
from jobs.storage.states import StateStore

PR_SET_PDEATHSIG = 1
PATIENCE = 20.0  # seconds that a process which broke an exchange off may take to end


def size(settings: TrainSettings) -> int:
    """How many processes this one starts or is among to share a step."""
    if "WORLD_SIZE" in os.environ:
        return 1  # they are there already
    return settings.processes_on(torch.cuda.device_count() if torch.cuda.is_available() else 0)


@contextlib.contextmanager
def together(settings: TrainSettings, folder: Path) -> Iterator[None]:
    """Starts the other processes, makes this one rank 0, and waits for them at the end.

    folder: of the training, for what is said of a process that died.
    """
    world = size(settings)
    if world == 1:
        with _lost_peer_named(folder):
            yield
        return
    refuse_idle(world, settings.accumulate)
    port = free_port()
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    spawn = multiprocessing.get_context("spawn")
    said = spawn.SimpleQueue()
    others = [
        spawn.Process(target=_started, args=(group, rank, settings.device, settings.accumulate, said), daemon=True)
        for rank in range(1, world)
    ]
    before = dict(os.environ)
    os.environ |= group | {"RANK": "0", "LOCAL_RANK": "0"}
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(others, ended), daemon=True)
    try:
        for process in others:
            process.start()
        watch.start()
        yield
    except JobError:
        raise
    except Exception as error:
        found = _cause(others, said, folder, PATIENCE if _is_lost_peer(error) else 0.5)
        if found is None:
            raise
        raise found from error
    finally:
        ended.set()
        for name in (*group, "RANK", "LOCAL_RANK"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        for process in others:
            if process.pid:
                process.join(60)
                if process.is_alive():
                    process.kill()


def _cause(others: Sequence[multiprocessing.Process], said: SimpleQueue, folder: Path, seconds: float) -> JobError | None:
    """What ended another process, if one ends within these seconds: its own MustFix where it said one, before the exit codes of those that only lost it."""
    until, ended = time.monotonic() + seconds, None
    while time.monotonic() < until:
        if not said.empty():
            rank, problem = said.get()
            return MustFix(f"training process {rank} of {len(others) + 1}: {problem.message}", where=problem.where, remedy=problem.remedy)
        if ended is None:
            ended = next(((rank, process.exitcode) for rank, process in enumerate(others, start=1) if process.exitcode), None)
            until = until if ended is None else min(until, time.monotonic() + 1)
        time.sleep(0.02)
    if ended is None:
        return None
    return TryAgain(
        f"training process {ended[0]} of {len(others) + 1} ended with exit code {ended[1]}", where=str(folder),
        remedy="run it again, training continues from its newest checkpoint; its own error stands above",
    )  # fmt: skip


def _watch(others: Sequence[multiprocessing.Process], ended: threading.Event) -> None:
    """Aborts the group when a process has died, so that this one does not wait for it for ever."""
    while not ended.wait(1.0):
        if any(process.exitcode for process in others) and not ended.wait(5.0):
            abort = getattr(torch.distributed.distributed_c10d, "_abort_process_group", None)
            if abort and torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
                abort()
            return


@contextlib.contextmanager
def _lost_peer_named(folder: Path) -> Iterator[None]:
    """What gloo and NCCL raise when a process that torchrun started is gone, as TryAgain."""
    try:
        yield
    except RuntimeError as error:
        if "WORLD_SIZE" not in os.environ or not _is_lost_peer(error):
            raise
        raise TryAgain(
            "another process of the training is gone",
            where=str(folder),
            remedy="start all of them again, training continues from its newest checkpoint; the other's own error says why",
        ) from error


def _is_lost_peer(error: Exception) -> bool:
    return isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _started(group: dict[str, str], rank: int, device: str, accumulate: int, said: SimpleQueue) -> None:
    """A process that `together` started; `said` takes (rank, MustFix) of one that cannot go on."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ |= group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        train_along(device, accumulate)
    except JobError as error:
        if isinstance(error, MustFix):
            said.put((rank, error))  # the first process says it
        sys.exit(error.exit_code)


def train_along(device: str, accumulate: int, run: Path | None = None) -> None:
    """What every process but the first does: the same training, silently. Ignores signals.

    device, accumulate: of the training's settings. run: this machine's run directory, where it is not
    the first process's. MustFix: this process or another one cannot train (no such states here, …).
    """
    from jobs.draft.trainer import train_on

    for sent in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sent, signal.SIG_IGN)
    with _lost_peer_named(run or Path(".")), joined(device, accumulate) as ranks:
        work: Work = ranks.of_first(lambda: None)
        if run is not None:
            work = replace(work, store=run / "states" / "train", folder=run / "checkpoints")
        c = work.config
        head = Eagle3Head(c).float()
        head.embed_tokens.weight = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size, dtype=work.embedding), requires_grad=False)
        head.set_vocabulary(torch.tensor(work.draft_ids))
        verifier = VerifierWeights(
            head.embed_tokens.weight.data, torch.ones(c.hidden_size), torch.empty(c.vocab_size, c.hidden_size, dtype=work.lm_head)
        )
        store = plan = problem = None
        try:
            store = StateStore(work.store)
            plan = prepared(work, store)
        except JobError as error:
            problem = error
        ranks.refuse_together(problem)
        train_on(
            ranks, work, plan, head, verifier, store,
            evaluate=(lambda _: {}) if work.evaluates else None, should_stop=lambda: False, report=lambda _: None,
        )  # fmt: skip
