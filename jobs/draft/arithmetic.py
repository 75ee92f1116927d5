"""How much arithmetic a trained token is, how much the device can do (for MFU and the plan), and in which type."""

import contextlib
import time
from collections.abc import Iterator

import torch

from jobs.draft.model import HeadConfig


def flop_of_a_token(c: HeadConfig, ttt_steps: int) -> float:
    """Forward and backward of one trained token: 20.05 GFLOP for Kimi-K2.5's head at 3 TTT steps.

    Every product of the recipe, twice as much backward as forward, and the target's logits once. What
    the trainer saves by projecting the embedding once for all steps counts as done: rates of different
    trainers can be compared, and the figure can exceed what the matrix units really did.
    """
    width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attention = 2 * c.hidden_size * (width + 2 * kv_width) + width * c.hidden_size
    step = attention + 3 * c.hidden_size * c.intermediate_size + c.draft_vocab_size * c.hidden_size
    return 6.0 * (ttt_steps * step + 3 * c.hidden_size**2) + 2.0 * c.draft_vocab_size * c.hidden_size


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a large product, in bf16 on a GPU whatever `train.precision` is; a few hundredths of a second."""
    cuda = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (512, torch.float32)
    a, b = (torch.full((size, size), 0.01, dtype=dtype, device=device).normal_() if cuda else torch.ones(size, size) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        if cuda:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        a @ b
        if cuda:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


@contextlib.contextmanager
def products(precision: str) -> Iterator[None]:
    """fp32 products of a GPU are formed in TF32 meanwhile, or are not: PyTorch's setting is one for the whole process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
