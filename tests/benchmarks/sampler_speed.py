"""Milliseconds a step for drawing the next tokens at top-p 0.95, ours beside vLLM's own way with a generator a request.

    python tests/benchmarks/sampler_speed.py [--rows 256 1024] [--tokens 163840]

One line of JSON for each number of rows. Without a GPU ours finds the limit by sorting, as in a run.
"""

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample

from jobs.verifier.seeded_sampler import draw, draw_compiled, halves, nucleus_by_sorting, seeds_at


def milliseconds(call: Callable[[], object], seconds: float = 0.5) -> float:
    """The mean of as many calls as fit, after one that is not counted."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    call()
    wait()
    began, number = time.perf_counter(), 0
    while number < 3 or time.perf_counter() - began < seconds:
        call()
        wait()
        number += 1
    return 1e3 * (time.perf_counter() - began) / number


def measure(rows: int, tokens: int) -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, top_p = torch.randn(rows, tokens, device=device) * 3, torch.full((rows,), 0.95, device=device)
    seeds = np.arange(rows, dtype=np.uint64)
    generators = {row: torch.Generator(device=device) for row in range(rows)}

    def ours() -> torch.Tensor:
        given = halves(seeds_at(seeds, seeds))
        if device == "cpu":
            return draw(logits, given, top_p, nucleus_by_sorting)
        return draw_compiled(logits, given.pin_memory().to(device, non_blocking=True), top_p)

    def theirs() -> torch.Tensor:
        for row, generator in generators.items():
            generator.manual_seed(row)
        return random_sample(apply_top_k_top_p(logits.clone(), None, top_p).softmax(-1, dtype=torch.float32), generators)

    found = {"ours_ms": milliseconds(ours), "vllm_ms": milliseconds(theirs)}
    return found | {"ratio": found["vllm_ms"] / found["ours_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 256, 16])
    parser.add_argument("--tokens", type=int, default=163_840)
    options = parser.parse_args()
    for rows in options.rows:
        figures = {name: float(f"{value:.4g}") for name, value in measure(rows, options.tokens).items()}
        print(
            json.dumps(
                {
                    "what": "sampler",
                    "rows": rows,
                    "tokens": options.tokens,
                    "device": "cuda" if torch.cuda.is_available() else "cpu",
                    **figures,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
