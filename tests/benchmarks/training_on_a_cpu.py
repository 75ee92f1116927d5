"""A training step on a CPU, with most rows of the prompts as context only against computing every row of them, in one run.

    python tests/benchmarks/training_on_a_cpu.py

A head of the miniature's size, samples of 100 prompt and 100 answer tokens, 512 tokens a step; processor seconds of a step,
the least of many, in turn: other processes may share the cores.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "draft"), str(Path(__file__).parents[2])]

from synthetic_states import Language, make_store  # noqa: E402

from jobs.draft.attention import Documents  # noqa: E402
from jobs.draft.data import context_of, cut_store, load  # noqa: E402
from jobs.draft.loss import TargetHead, Unroll  # noqa: E402
from jobs.draft.model import Eagle3Head, HeadConfig  # noqa: E402
from jobs.draft.packing import Plan  # noqa: E402

ROWS = 512


def measure(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """TTT steps -> milliseconds of forward and backward pass both ways, and their ratio."""
    torch.set_num_threads(1)
    language = Language.make(vocabulary=1536, hidden=128)
    store = make_store(folder, [(100, 100)] * 5, language=language)
    config = HeadConfig(1536, 1024, 128, 384, 4, 4, 32, 1e-6, 1e6, None, store.layout.taps, True)
    head = Eagle3Head.from_scratch(config, language.verifier, torch.arange(1024), seed=0)
    unroll = Unroll(head, TargetHead(language.verifier.lm_head, head.draft_ids, torch.float32), "forward_kl")
    plan = Plan(cut_store(store, store.ids(), config, ROWS), rows=ROWS, accumulate=1, epochs=1, max_steps=None, seed=0)
    row = load(store, plan.step_rows(0)[0], ROWS, config.taps)
    ways = {"every_row": Documents(row.lengths, ROWS), "context": Documents(row.lengths, ROWS, context=context_of(row))}
    told = {}
    for steps in (1, 3):
        seconds = {name: [] for name in ways}
        for number in range(rounds * len(ways)):
            name = list(ways)[number % len(ways)]
            began = time.process_time()
            unroll(row, ways[name], steps).loss.sum().backward()
            seconds[name].append(time.process_time() - began)
        least = {name: 1e3 * min(values) for name, values in seconds.items()}
        told[f"ttt_steps_{steps}"] = least | {"ratio": least["every_row"] / least["context"]}
    return told


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps(measure(Path(made) / "states", rounds=30)))
