"""The processes of one training: alone, or several started by `torchrun`.

`jobs.draft.team` or `torchrun` sets RANK, WORLD_SIZE and LOCAL_RANK; without them training runs alone.
NCCL between GPUs, gloo between CPUs.
"""

import contextlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from jobs.errors import JobError, MustFix
from jobs.wording import counted


@dataclass(frozen=True)
class Ranks:
    """This process among all: `rank` of `world`, computing on `device`."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Summed over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def agree(self, tensors: Iterable[Tensor]) -> None:
        """Every rank takes the first one's values, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def of_first(self, find: Callable[[], Any]) -> Any:
        """What the first rank finds, on every rank (pickled, so nothing large); a JobError it meets is raised on every rank."""
        if self.world == 1:
            return find()
        found: list[Any] = [None]
        if self.first:
            try:
                found = [find()]
            except JobError as error:
                found = [error]
        dist.broadcast_object_list(found, 0)
        if isinstance(found[0], JobError):
            raise found[0]
        return found[0]

    def tensors_of_first(self, read: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors by name that the first rank reads from its disk, on every rank's device: each byte is read once."""
        if self.world == 1:
            return read()
        held: dict[str, Tensor] = {}

        def shapes() -> dict[str, tuple[torch.Size, torch.dtype]]:
            held.update(read())
            return {name: (tensor.shape, tensor.dtype) for name, tensor in held.items()}

        received = {}
        for name, (shape, dtype) in self.of_first(shapes).items():
            received[name] = held.pop(name).to(self.device) if self.first else torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(received[name], 0)
        return received

    def refuse_together(self, problem: JobError | None) -> None:
        """Raises the first rank's problem on every rank, where one has any: nobody waits for a process that cannot train."""
        if self.world == 1:
            problems = [problem]
        else:
            problems = [None] * self.world
            dist.all_gather_object(
                problems,
                problem
                and type(problem)(f"rank {self.rank} on {platform.node()}: {problem.message}", where=problem.where, remedy=problem.remedy),
            )
        for found in problems:
            if found is not None:
                raise found


class StepSums:
    """What the ranks tell each other in an optimizer step: everything in the one exchange that its sums need anyway.

    sums: `Unrolled` as [4, k]; asked: [1], ranks that were asked to stop; disk: [2, world], seconds that each
    rank waited for data and bytes it read. All of this rank until `exchange`, of all ranks afterwards.
    """

    def __init__(self, ranks: Ranks, ttt_steps: int):
        self._ranks = ranks
        self._shared = torch.zeros(4 * ttt_steps + 1 + 2 * ranks.world, dtype=torch.float64, device=ranks.device)
        sums, self.asked, disk = self._shared.tensor_split((4 * ttt_steps, 4 * ttt_steps + 1))
        self.sums, self.disk = sums.view(4, ttt_steps), disk.view(2, ranks.world)

    def exchange(self, asked_to_stop: bool, waited: float, read: int) -> None:
        """Sums everything over all ranks, in place; nothing here waits for the device."""
        for place, value in ((self.asked, asked_to_stop), (self.disk[0, self._ranks.rank], waited), (self.disk[1, self._ranks.rank], read)):
            place.fill_(value)  # an assignment would wait for the device
        self._ranks.sum(self._shared)


class HostCopy:
    """A tensor on its way to the host, without making the device wait, or the host before `get`."""

    def __init__(self, tensor: Tensor):
        tensor = tensor.detach()
        self._done = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._host = tensor.clone()

    def ready(self) -> bool:
        return self._done is None or self._done.query()

    def get(self) -> Tensor:
        """The values; waits for what was queued before the copy, not for what came after."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


def device_of(wanted: Literal["auto", "cpu", "cuda"], local_rank: int = 0) -> torch.device:
    """The device of one process; MustFix where CUDA is asked for and there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.cuda.device_count() <= local_rank:
        raise MustFix(
            f"no CUDA device for local rank {local_rank}, {torch.cuda.device_count()} are there",
            where="train.device",
            remedy="start as many processes as there are GPUs, or set train.device to auto or cpu",
        )
    return torch.device("cuda", local_rank)


def refuse_idle(world: int, accumulate: int) -> None:
    """MustFix where a step has fewer packed rows than there are ranks."""
    if world > accumulate:
        raise MustFix(
            f"{world} ranks cannot share {counted(accumulate, 'packed rows')} a step",
            where="train.accumulate",
            remedy=f"set train.accumulate to a multiple of {world}, or start fewer processes",
        )


@contextlib.contextmanager
def joined(wanted: Literal["auto", "cpu", "cuda"], accumulate: int) -> Iterator[Ranks]:
    """Joins the process group where there is one to join and leaves it at the end.

    accumulate: packed rows of an optimizer step; more ranks than that would leave some idle: MustFix.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = device_of(wanted, int(os.environ.get("LOCAL_RANK", 0)))
    refuse_idle(world, accumulate)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ours = world > 1 and not dist.is_initialized()
    if ours:
        # An evaluation on the first rank may take long, and the others wait for it in an exchange.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=4))
    try:
        yield Ranks(rank, world, device)
    finally:
        if ours:
            dist.destroy_process_group()


@contextlib.contextmanager
def out_of_memory_named() -> Iterator[None]:
    """A GPU whose memory is used up as MustFix: the same command again would end there again."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MustFix(
            f"the GPU's memory is used up: {str(error).splitlines()[0]}", where=f"training on {platform.node()}",
            remedy="lower train.tokens_per_step, or verifier.gpu_memory_utilization where the verifier is loaded beside it (the trial of the gate)",
        ) from error  # fmt: skip


@contextlib.contextmanager
def threads(ranks: Ranks, before_the_kill: int | None) -> Iterator[None]:
    """The threads of a training on CPU: as many as before the kill, else all cores of this process, but
    one where OpenMP waits actively (its default).

    A thread that spins for another one, which some other process has pushed off its core, makes the
    step of a small head 20 to 60 times slower; with OMP_WAIT_POLICY=PASSIVE it sleeps. OpenMP reads
    the policy when torch is imported, so it can only be looked at here.
    """
    before = torch.get_num_threads()
    if ranks.device.type == "cpu":
        passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
        here = max(1, len(os.sched_getaffinity(0)) // ranks.world) if passive else 1
        torch.set_num_threads(before_the_kill or here)
    try:
        yield
    finally:
        torch.set_num_threads(before)
