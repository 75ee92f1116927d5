"""What a person wants to see of training: lines for the log and the display, and TensorBoard files.

Figures are means over the optimizer steps since the last line, weighted by loss positions; sums stay
on the device until a line is due, so that logging does not make the GPU wait.
"""

import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.draft.loss import Unrolled

DATA_WAIT = 0.02  # share of the time over which waiting for data is worth a word


class Window:
    """Sums over the optimizer steps since the last line of the log."""

    def __init__(self, ttt_steps: int, decay: float, device: torch.device):
        self.decay = decay ** torch.arange(ttt_steps, dtype=torch.float64)  # [K]
        self.sums = torch.zeros(4, ttt_steps, dtype=torch.float64, device=device)
        self.disk = torch.zeros(2, 1, dtype=torch.float64, device=device)  # [2, world] from the first step on
        self.began = time.perf_counter()
        self.used = self.rows = self.steps = 0
        self.flop = 0.0
        self.stood = 0.0  # seconds that training stood still for a checkpoint

    def add(self, sums: Tensor, used: int, rows: int, flop: float, disk: Tensor) -> None:
        """One optimizer step of ALL ranks: `Unrolled` as `[4, k]`, rows without and with padding, arithmetic, and
        `[2, world]` of the seconds that each rank waited for data and the bytes it read."""
        self.sums[:, : sums.shape[1]] += sums
        self.disk = self.disk + disk
        self.used, self.rows, self.steps, self.flop = self.used + used, self.rows + rows, self.steps + 1, self.flop + flop

    def line(self, world: int, flops: float | None) -> dict[str, Any]:
        """The figures so far; NaN never appears (a share of nothing is None). flops: what one device can do a second.

        `data_wait` is that of the rank that waited longest, which all others wait for; of several ranks,
        `data_wait_rank` says which one. Bytes are those that all ranks read.
        """
        seconds = max(time.perf_counter() - self.began, 1e-9)
        sums = Unrolled(*self.sums.cpu())
        asked = sums.count > 0
        total = float((self.decay * sums.count).sum())
        chain = sums.chain / sums.count.clamp(min=1)
        waited, read = self.disk.cpu()  # [world] each
        return {
            "loss": float((self.decay * sums.loss).sum()) / total if total else None,
            "loss_by_step": _listed(sums.loss / sums.count, asked),
            "accuracy_by_step": _listed(sums.correct / sums.count, asked),
            # Greedy, over all positions: an indication while training runs, not the walk of the replay.
            "acceptance_estimate": 1 + float(chain.sum()),
            "loss_positions": int(sums.count.sum()),
            "tokens_per_second": self.used / seconds,
            "steps_per_second": self.steps / seconds,
            "mfu": self.flop / seconds / world / flops if flops else None,
            "memory_gib": _memory(self.sums.device) / 2**30,
            "data_wait": min(1.0, float(waited.max()) / seconds),  # another rank's clock began a little earlier
            **({"data_wait_rank": int(waited.argmax())} if world > 1 else {}),
            "checkpoint_wait": self.stood / seconds,
            "read_bytes_per_second": float(read.sum()) / seconds,
            "padding": 1 - self.used / self.rows if self.rows else None,
        }


def _memory(device: torch.device) -> int:
    """Most bytes that were in use at once: of the device, or of this process where it is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _listed(values: Tensor, asked: Tensor) -> list[float | None]:
    return [float(value) if there else None for value, there in zip(values, asked, strict=True)]


class Reporter:
    """Hands lines on: to the caller's `report` and to TensorBoard. Silent on all ranks but the first."""

    def __init__(self, report: Callable[[dict[str, Any]], None], folder: Path | None):
        self._report = report if folder else lambda line: None
        self._board = None
        self._disk_named = False
        if folder:
            from torch.utils.tensorboard import SummaryWriter  # a second to import

            self._board = SummaryWriter(str(folder))

    def note(self, text: str) -> None:
        """A remark without figures: `{"note": text}`."""
        self._report({"note": text})

    def line(self, line: dict[str, Any]) -> None:
        """A line with its `step`; numbers, lists of numbers and one level of mappings go to TensorBoard."""
        self._report(line)
        if self._board:
            for name, value in _flat(line):
                self._board.add_scalar(name, value, line["step"])

    def name_a_slow_disk(self, figures: Mapping[str, Any]) -> None:
        """Says once that the disk cannot deliver what the step would take, with both rates; figures: `Window.line`."""
        wait, read, rank = figures["data_wait"], figures["read_bytes_per_second"], figures.get("data_wait_rank")
        if wait > DATA_WAIT and not self._disk_named:
            self._disk_named = True
            slowest, ranks = ("", "") if rank is None else (f", rank {rank} the longest", " to all ranks")
            self.note(
                f"training waits for data {wait:.0%} of the time{slowest}: the disk delivers {read / 1e9:.2f} GB/s{ranks}, the step would take "
                f"{read / 1e9 / max(0.01, 1 - wait):.2f} GB/s; more RAM, a faster disk or states.dtype = fp8 would help"
            )

    def close(self) -> None:
        if self._board:
            self._board.close()


def _flat(line: Mapping[str, Any], prefix: str = "train/"):
    for name, value in line.items():
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int | float):
            yield prefix + name, value
        elif isinstance(value, list):
            yield from _flat({str(number): item for number, item in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{name}/")
