"""How long training stands still for a checkpoint, in one run and as ratios.

    python tests/benchmarks/checkpoint_stall.py                # a head of 7 million parameters on a CPU, half a minute
    python tests/benchmarks/checkpoint_stall.py --size real    # the real head, on a GPU with 45 GiB and a disk with 50 GB

Two figures: `steps_a_checkpoint`, the seconds that the loop stands still for one checkpoint in units of a step (hero
makes one every 200 steps: two of them are 1 %); and the longest time for which a thread that only wants to go on is
held up while a file is written, by our writer and by `safetensors.torch.save_file`, which needs the interpreter's lock.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "draft"), str(Path(__file__).parents[2])]

from safetensors.torch import save_file  # noqa: E402
from synthetic_states import Language, make_store  # noqa: E402

from jobs.draft.model import Eagle3Head, HeadConfig  # noqa: E402
from jobs.draft.snapshot import write_tensors  # noqa: E402
from jobs.draft.trainer import train  # noqa: E402
from jobs.settings import TrainSettings  # noqa: E402

SIZES = {  # hidden, FFN, heads, vocabulary, tokens a step, optimizer steps
    "tiny": (64, 96, 2, 256, 128, 24),
    "middle": (512, 1536, 8, 4096, 128, 24),
    "real": (7168, 18_432, 64, 32_000, 4096, 60),
}


def trained(size: str, every: int, folder: Path, steps: int | None = None) -> dict[str, float]:
    """A training with a checkpoint every so many steps: what the trainer itself says of it."""
    hidden, ffn, heads, vocabulary, tokens, usual = SIZES[size]
    steps = steps or usual
    language = Language.make(vocabulary=vocabulary, hidden=hidden)
    store = make_store(folder / "states", [(4, tokens // 2 - 3)] * 8, language=language, dtype="bfloat16")
    config = HeadConfig(vocabulary, vocabulary, hidden, ffn, heads, heads, hidden // heads, 1e-6, 1e6, None, store.layout.taps, True)
    head = Eagle3Head.from_scratch(config, language.verifier, torch.arange(vocabulary), seed=0)
    settings = TrainSettings(
        tokens_per_step=tokens, max_length=tokens, epochs=1000, max_steps=steps, checkpoint_every=every, log_every=1, warmup_share=0.0
    )
    lines: list[dict] = []
    result = train(
        settings=settings, seed=0, head=head, verifier=language.verifier, store=store, sample_ids=store.ids(), folder=folder / "run", warm=False,
        evaluate=None, should_stop=lambda: False, report=lines.append,
    )  # fmt: skip
    logged = [line for line in lines if "loss" in line][2:]
    step = sorted(tokens / line["tokens_per_second"] for line in logged)[len(logged) // 2]
    saves = -(-steps // every)
    return {
        "parameters": sum(p.numel() for p in head.parameters() if p.requires_grad),
        "checkpoint_bytes": sum(file.stat().st_size for file in (folder / "run" / result.checkpoint).iterdir()),
        "step_seconds": step, "seconds_a_checkpoint": result.checkpoint_seconds / saves, "steps_a_checkpoint": result.checkpoint_seconds / saves / step,
        "share_at_200_steps": result.checkpoint_seconds / saves / step / 200, "share_here": result.checkpoint_seconds / result.seconds, "every": every,
    }  # fmt: skip


def held_up(write: Callable[[], object]) -> float:
    """Longest pause, in seconds, of a thread that runs beside `write` and asks for nothing."""
    done, longest = threading.Event(), 0.0
    writing = threading.Thread(target=lambda: (write(), done.set()))
    writing.start()
    before = time.perf_counter()
    while not done.is_set():
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
        time.sleep(0.0005)
    writing.join()
    return longest


def pauses(megabytes: int, folder: Path, rounds: int = 3) -> dict[str, float]:
    """The least of several rounds each, in turn: another process may take the core away at any time."""
    tensors = {f"part{number}": torch.ones(megabytes << 16) for number in range(4)}  # fp32
    ways = {"ours": lambda: write_tensors(folder / "ours", tensors), "save_file": lambda: save_file(tensors, folder / "theirs")}
    told = {name: [] for name in ways}
    for _ in range(rounds):
        for name, write in ways.items():
            told[name].append(held_up(write))
    return {"megabytes": megabytes, **{f"{name}_seconds": min(values) for name, values in told.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="middle")
    parser.add_argument("--every", type=int, default=8, help="optimizer steps between checkpoints")
    parser.add_argument(
        "--steps", type=int, help="optimizer steps in all; a checkpoint that is due before the last one is written holds training up"
    )
    parser.add_argument("--megabytes", type=int, default=512, help="of the file whose writing is watched")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint-stall-") as folder:
        print(json.dumps({"what": "training", **trained(options.size, options.every, Path(folder), options.steps)}), flush=True)
        print(json.dumps({"what": "pause", **pauses(options.megabytes, Path(folder))}), flush=True)


if __name__ == "__main__":
    main()
