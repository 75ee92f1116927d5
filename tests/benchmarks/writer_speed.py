"""Rows a second of the worker's writer, without an engine: decoding steps against prefill-like ones, as a ratio of one run.

    python writer_speed.py [FOLDER] [--gib 2] [--dtype bfloat16|float8_e4m3fn] [--hidden 7168] [--samples 1024] [--joined 8] [--rounds 2]

FOLDER lies on a tmpfs (default /dev/shm), so that the disk is not what is measured. Steps are made up and handed over
as they lie in host memory after the copy from the device: decoding gives one row of each sample a step, eight steps
joined (on a GPU that happens there), prefill spans of 512 rows. Both write the same bytes, from the first `put` to the end of `finish(wait=True)`. One line of JSON:
rates and processor seconds by thread, round by round, and of the last one the ratio prefill / decode.
"""

import argparse
import contextlib
import json
import resource
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from jobs.storage.shards import encode
from jobs.storage.states import StateLayout, StateWriter
from jobs.verifier.state_thread import Ended, Span, Spans, Step, StoreThread

SPAN, PREFILL_ROWS = 512, 4096
BEGIN = 16  # steps in which the samples begin


def made_up(layout: StateLayout, rows: int) -> dict[str, torch.Tensor]:
    """Rows as stored, of random values."""
    taps = torch.randn(64, len(layout.taps), layout.hidden_size).bfloat16().repeat(-(-rows // 64), 1, 1)[:rows]
    return encode(layout, taps, taps[:, 0].contiguous(), torch.zeros(rows))


def decode_steps(name: str, rows: dict, samples: int, total: int) -> Iterator[Step]:
    """One row of every sample a step; they begin in turn, as answers do, so that not all reach the end of a page in one step."""
    for step in range(total // samples + BEGIN - 1):
        alive = [i for i in range(samples) if 0 <= step - i % BEGIN < total // samples]
        spans = Spans.of(Span(f"{name}{i}#0", place, 1, step - i % BEGIN, place, 0, True, -1) for place, i in enumerate(alive))
        yield Step(spans, {key: value[: len(alive)] for key, value in rows.items()}, torch.zeros(len(alive), 1), None)


def prefill_steps(name: str, rows: dict, total: int) -> Iterator[Step]:
    spans = PREFILL_ROWS // SPAN
    for step in range(total // PREFILL_ROWS):
        yield Step(Spans.of(Span(f"{name}{step * spans + i}#0", i * SPAN, SPAN, 0, i, 0, False, 5) for i in range(spans)), rows, None, None)


def joined_by(several: int, steps: Iterable[Step]) -> list[Step]:
    """So many steps in one, as they come from a GPU."""
    listed = list(steps)
    return [Step.joined(listed[begin : begin + several]) for begin in range(0, len(listed), several)]


def touch(folder: Path, size: int) -> None:
    """Both kinds find memory that was used a moment ago: what a virtual machine has to get from its host costs several times as much."""
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(size >> 20):
            file.write(bytes(1 << 20))


def cpu_by_thread() -> dict[str, float]:
    """Processor seconds of this process's threads that Python started."""
    found = {}
    for thread in threading.enumerate():
        fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
        found[thread.name] = (int(fields[11]) + int(fields[12])) / 100
    return found


def measure(thread: StoreThread, steps: list[Step], ended: list[Ended]) -> dict:
    """Seconds from the first step to the last durable sample, and where the processor time went."""
    cpu, begun, longest = cpu_by_thread(), time.monotonic(), 0.0
    for step in steps:
        before = time.monotonic()
        thread.put(step)
        longest = max(longest, time.monotonic() - before)
    done = thread.finish(ended, wait=True)
    seconds = time.monotonic() - begun
    spent = {name: round(value - cpu.get(name, 0), 2) for name, value in cpu_by_thread().items()}
    assert thread.failure is None and list(done.values()) == [None] * len(ended), thread.failure
    return {"seconds": seconds, "longest_put_s": round(longest, 2), "cpu_s": spent}


def scheduling(folder: Path, joined: Sequence[int], rounds: int, samples: int = 256) -> dict[int, float]:
    """Milliseconds of a step in a thread that computes as vLLM's does, with rows of 32 KB taken in beside it: by so many steps joined; 0: none.

    The threads share the interpreter. Joining itself, on a GPU a few launches, is left out. The least of the rounds, which take turns.
    """
    torch.set_num_threads(1)
    layout, best = StateLayout((2, 30, 58), 4096, "bfloat16", "made up", "0" * 40, "0" * 64), dict.fromkeys(joined, float("inf"))
    rows = made_up(layout, samples)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        threads = {several: StoreThread(StateWriter(work / str(several), layout), join_bytes=1) for several in joined if several}
        for number in range(rounds + 1):
            for several in joined:
                steps = list(decode_steps(f"{number}-", rows, samples, 64 * samples))
                given = joined_by(several, steps) if several else []
                begun = time.monotonic()
                for place in range(len(steps)):
                    sum(range(150_000))
                    for _ in range(200):
                        torch.zeros(8)  # lets go of the interpreter, as each operation does
                    if several and place % several == 0:
                        threads[several].put(given[place // several])
                if number:  # the first touches the memory
                    best[several] = min(best[several], 1e3 * (time.monotonic() - begun) / len(steps))
                if several:
                    threads[several].discard([f"{number}-{i}#0" for i in range(samples)])
        for thread in threads.values():
            thread.close()
            assert thread.failure is None, thread.failure
    return best


def main(given: argparse.Namespace) -> dict:
    torch.set_num_threads(1)  # as in a worker: the other cores belong to other ranks
    layout = StateLayout((2, 30, 58), given.hidden, given.dtype, "made up", "0" * 40, "0" * 64)
    total = int(given.gib * 2**30) // layout.row_bytes // PREFILL_ROWS * PREFILL_ROWS
    small, large = made_up(layout, given.samples), made_up(layout, PREFILL_ROWS)
    kinds = {
        "decode": lambda name: (decode_steps(name, small, given.samples, total), given.samples, total // given.samples),
        "prefill": lambda name: (prefill_steps(name, large, total), total // SPAN, SPAN),
    }
    found: dict = {}
    for kind, make in kinds.items():
        touch(given.folder, given.rounds * total * layout.row_bytes)
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            thread = StoreThread(StateWriter(Path(folder) / "states", layout), join_bytes=1)  # they are
            # The first round touches the writer's memory for the first time, which a run does once.
            for number in range(given.rounds):
                steps, samples, rows = make(f"{number}-")
                measured = measure(
                    thread,
                    joined_by(given.joined if kind == "decode" else 1, steps),
                    [Ended(f"{number}-{i}#0", rows + 1) for i in range(samples)],
                )
                measured |= {
                    "rows_per_s": round(total / measured["seconds"]),
                    "mb_per_s": round(total * layout.row_bytes / measured["seconds"] / 1e6),
                }
                found.setdefault(kind, []).append(measured | {"seconds": round(measured["seconds"], 2)})
            thread.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    ratio = round(found["prefill"][-1]["rows_per_s"] / found["decode"][-1]["rows_per_s"], 2)
    return {
        "row_bytes": layout.row_bytes,
        "rows": total,
        "samples": given.samples,
        **found,
        "prefill_against_decode": ratio,
        "peak_mib": peak,
    }


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("folder", type=Path, nargs="?", default=Path("/dev/shm"))
    made.add_argument("--gib", type=float, default=2)
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--hidden", type=int, default=7168)
    made.add_argument("--samples", type=int, default=1024)
    made.add_argument("--joined", type=int, default=8, help="steps of decoding that come together")
    made.add_argument("--rounds", type=int, default=2)
    return made


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(parser().parse_args())), flush=True)
