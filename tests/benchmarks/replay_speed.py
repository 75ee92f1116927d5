"""Scored positions a second of replay: `python tests/benchmarks/replay_speed.py [--device cuda] [--shape tiny|real]`.

One position scored is one row of an answer with all its drafted tokens, counted over every head judged.
`real` is the head of Kimi-K2.5's shape (hidden 7168, 64 heads, FFN 18,432, 32,000 draft ids) in bf16 on
states of random values: the arithmetic and the bytes do not depend on what the numbers say.
"""

import argparse
import json
import time

import torch

from jobs.draft.drafting import draft_chains
from jobs.draft.model import Eagle3Head, HeadConfig

SHAPES = {
    # vocabulary, draft vocabulary, hidden, FFN, heads, KV heads, head_dim
    "tiny": (1536, 1024, 128, 384, 4, 4, 32),
    "real": (163_840, 32_000, 7168, 18_432, 64, 64, 128),
}


def random_head(shape: str, device: str, dtype: torch.dtype) -> Eagle3Head:
    vocab, drafted, hidden, ffn, heads, kv_heads, head_dim = SHAPES[shape]
    config = HeadConfig(vocab, drafted, hidden, ffn, heads, kv_heads, head_dim, 1e-6, 1e6, None, (2, 5, 7), False)
    with torch.device(device):
        head = Eagle3Head(config).to(dtype)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter.data, std=parameter.shape[-1] ** -0.5)
    return head


def measure(shape: str, device: str, *, rows: int, answers: int, heads: int, draft_tokens: int = 3, seed: int = 0) -> dict[str, float]:
    """{scored positions a second, seconds, positions, identical}: all heads over the same answers, twice, the second time measured.

    identical: both times every head drafted the same.
    """
    torch.manual_seed(seed)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    hidden, vocab = SHAPES[shape][2], SHAPES[shape][0]
    judged = [random_head(shape, device, dtype) for _ in range(heads)]
    ids = torch.randint(vocab, (rows + 1,), device=device)
    taps = torch.randn(rows, 3, hidden, device=device, dtype=dtype)
    chains, seconds = [], 0.0
    for _ in range(2):
        if device != "cpu":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        chains.append([draft_chains(head, ids, taps, draft_tokens).cpu() for _ in range(answers) for head in judged])
        seconds = time.perf_counter() - begun
    positions = rows * answers * heads
    same = all(torch.equal(one, two) for one, two in zip(*chains, strict=True))
    return {"positions_a_second": positions / seconds, "seconds": seconds, "positions": positions, "identical": same}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=2)
    asked = parser.parse_args()
    print(
        json.dumps(
            {
                "shape": asked.shape,
                "rows": asked.rows,
                "heads": asked.heads,
                **measure(asked.shape, asked.device, rows=asked.rows, answers=asked.answers, heads=asked.heads),
            }
        )
    )
