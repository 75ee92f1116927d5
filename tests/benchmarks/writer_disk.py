"""What states cost on a real disk, in one run: bytes a token, our write rate beside `dd`'s, and memory at 1,000 requests at once.

    python tests/benchmarks/writer_disk.py FOLDER [--gib 2] [--samples 1024] [--hidden 7168] [--dtype bfloat16|float8_e4m3fn]

FOLDER is on the disk to be measured. Decoding steps are handed to the worker's writer as in writer_speed.py, one row of every
sample a step, until they are durable; `dd conv=fdatasync` writes as many bytes before and after it. Memory is the growth of
this process from the open store to its peak. One line of JSON.
"""

import argparse
import json
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import torch
from writer_speed import decode_steps, made_up, measure

from jobs.storage.row_pages import LIMIT_BYTES
from jobs.storage.states import StateLayout, StateWriter
from jobs.verifier.state_thread import Ended, StoreThread


def dd(folder: Path, size: int) -> float:
    """Bytes a second of `dd` with 4 MiB blocks, synced at its end."""
    file, began = folder / "dd", time.monotonic()
    subprocess.run(["dd", "if=/dev/zero", f"of={file}", "bs=4M", f"count={size >> 22}", "conv=fdatasync"], check=True, capture_output=True)
    seconds = time.monotonic() - began
    file.unlink()
    return (size >> 22 << 22) / seconds


def resident() -> int:
    """Bytes of anonymous memory of this process: file pages are the kernel's to give back."""
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))


class Peak:
    """The largest `resident()` while it lasts."""

    def __enter__(self) -> "Peak":
        self.bytes, self._end = resident(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            self.bytes = max(self.bytes, resident())


def main(given: argparse.Namespace) -> dict:
    torch.set_num_threads(1)
    layout = StateLayout((2, 30, 58), given.hidden, given.dtype, "made up", "0" * 40, "0" * 64)
    rows = int(given.gib * 2**30) // layout.row_bytes // given.samples
    size = rows * given.samples * layout.row_bytes
    step = made_up(layout, given.samples)
    limit = given.memory_mib << 20
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder = Path(made)
        before = dd(folder, size)
        thread = StoreThread(StateWriter(folder / "states", layout, memory_bytes=limit), join_bytes=1)  # on a GPU they are joined there
        open_bytes = resident()
        with Peak() as peak:
            steps = list(decode_steps("s", step, given.samples, rows * given.samples))
            measured = measure(thread, steps, [Ended(f"s{i}#0", rows + 1) for i in range(given.samples)])
        thread.close()
        written = sum(path.stat().st_blocks * 512 for path in (folder / "states").iterdir())
        subprocess.run(["rm", "-r", folder / "states"], check=True)
        after = dd(folder, size)
    return {
        "samples": given.samples, "rows": rows * given.samples, "row_bytes": layout.row_bytes,
        "bytes_a_row": round(written / (rows * given.samples), 1), "of_the_rows": round(written / size, 4),
        "mb_per_s": round(size / measured["seconds"] / 1e6), "cpu_s": measured["cpu_s"], "dd_mb_per_s": [round(before / 1e6), round(after / 1e6)], "of_dd": round(size / measured["seconds"] / ((before + after) / 2), 3),
        "memory_mib": (peak.bytes - open_bytes) >> 20,
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("folder", type=Path)
    made.add_argument("--gib", type=float, default=2)
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--hidden", type=int, default=7168)
    made.add_argument("--samples", type=int, default=1024)
    made.add_argument("--memory-mib", type=int, default=LIMIT_BYTES >> 20, help="the most that the writer buffers")
    return made


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(parser().parse_args())), flush=True)
