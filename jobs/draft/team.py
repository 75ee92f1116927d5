"""The other processes of a training on one machine: one a GPU, started by the first and ended with it.

The job is one process until it trains. `train` then starts as many more as there are GPUs, which find
the states on the disk themselves and take weights, embedding and the verifier's head from the first
over the process group, so nothing large is pickled. Under `torchrun` (several machines) nothing is
started: RANK and WORLD_SIZE say who is who.

A process that dies is noticed within a second: the group is aborted and the training ends with
TryAgain, instead of waiting for an exchange that never comes. Signals are the first process's
business; the others hear of a stop with a step's outcome, and die with the first (PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from jobs.draft.model import Eagle3Head, HeadConfig, VerifierWeights
from jobs.draft.ranks import refuse_idle
from jobs.errors import JobError, TryAgain
from jobs.settings import TrainSettings
from jobs.storage.states import StateStore

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Work:
    """What a process needs to know to train along; everything else comes from the first one."""

    settings: TrainSettings
    seed: int
    config: HeadConfig
    draft_ids: tuple[int, ...]
    embedding: torch.dtype
    lm_head: torch.dtype
    store: Path
    sample_ids: tuple[str, ...]
    folder: Path
    warm: bool
    evaluates: bool


def size(settings: TrainSettings) -> int:
    """How many processes this one starts or is among to share a step."""
    if "WORLD_SIZE" in os.environ:
        return 1  # they are there already
    return settings.processes_on(torch.cuda.device_count() if torch.cuda.is_available() else 0)


@contextlib.contextmanager
def together(work: Work) -> Iterator[None]:
    """Starts the other processes, makes this one rank 0, and waits for them at the end."""
    world = size(work.settings)
    if world == 1:
        yield
        return
    refuse_idle(world, work.settings.accumulate)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=_train_along, args=(work, group, rank), daemon=True) for rank in range(1, world)]
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
        dead = _dead(others)
        if dead is None:
            raise
        raise TryAgain(
            f"training process {dead[0]} of {world} ended with exit code {dead[1]}",
            where=str(work.folder),
            remedy="run it again, training continues from its newest checkpoint; its own error stands above",
        ) from error
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


def _dead(others: Sequence[multiprocessing.Process]) -> tuple[int, int] | None:
    """(rank, exit code) of a process that ended badly."""
    for rank, process in enumerate(others, start=1):
        process.join(0.5)
        if process.exitcode:
            return rank, process.exitcode
    return None


def _watch(others: Sequence[multiprocessing.Process], ended: threading.Event) -> None:
    """Aborts the group when a process has died, so that this one does not wait for it for ever."""
    while not ended.wait(1.0):
        if any(process.exitcode for process in others) and not ended.wait(5.0):
            abort = getattr(torch.distributed.distributed_c10d, "_abort_process_group", None)
            if abort and torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
                abort()
            return


def _train_along(work: Work, group: dict[str, str], rank: int) -> None:
    """What another process does: the same training, silently."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for sent in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sent, signal.SIG_IGN)
    os.environ |= group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    from jobs.draft.trainer import train

    c = work.config
    head = Eagle3Head(c).float()
    head.embed_tokens.weight = nn.Parameter(torch.empty(c.vocab_size, c.hidden_size, dtype=work.embedding), requires_grad=False)
    head.set_vocabulary(torch.tensor(work.draft_ids))
    verifier = VerifierWeights(
        head.embed_tokens.weight.data, torch.ones(c.hidden_size), torch.empty(c.vocab_size, c.hidden_size, dtype=work.lm_head)
    )
    try:
        train(
            settings=work.settings, seed=work.seed, head=head, verifier=verifier, store=StateStore(work.store), sample_ids=work.sample_ids,
            folder=work.folder, warm=work.warm, evaluate=(lambda _: {}) if work.evaluates else None, should_stop=lambda: False, report=lambda _: None,
        )  # fmt: skip
    except JobError as error:
        sys.exit(error.exit_code)  # the first process says it
