"""Drawing the next tokens of a large batch: one uniform number a request instead of one a vocabulary entry.

vLLM 0.16.0 draws for requests with a seed of their own one after the other (`random_sample`, a kernel launch a
request and step), and finds the nucleus by sorting the whole vocabulary of every request. Here the nucleus is found by
bisection on the probability itself, which only reads, and the token by inverting the cumulative distribution at one
number that is a hash of the request's seed and the position. So an answer does not depend on its neighbours, on chunks
or on preemption, as before, and a step costs a few launches whatever the batch.
"""

import numpy as np
import torch
from torch import Tensor

# Bits of a probability's float32 pattern that are decided; the rest is 2^-8 of the threshold's own size.
BISECTIONS = 23


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[B] float64 in (0, 1): splitmix64 of `seeds` (uint64) at `positions`; equal for equal arguments, whatever the batch."""
    with np.errstate(over="ignore"):
        value = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return ((value >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def nucleus(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """`probabilities` [B, V] with zeros outside the smallest set of likeliest tokens whose sum reaches `top_p` [B].

    The set is {p >= t} for the largest t that reaches it, found on t's bit pattern (positive floats order as integers).
    """
    low = torch.zeros(len(probabilities), dtype=torch.int32, device=probabilities.device)  # [B] reaches top_p
    high = probabilities.amax(dim=-1).view(torch.int32) + 1  # [B] does not
    wanted = top_p.clamp(max=1 - 1e-6)
    for _ in range(BISECTIONS + 8):
        middle = low + (high - low) // 2
        threshold = middle.view(torch.float32)[:, None]  # [B, 1]
        reached = (probabilities * (probabilities >= threshold)).sum(dim=-1) >= wanted
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return probabilities * (probabilities >= low.view(torch.float32)[:, None])


def invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """[B] the token at which the cumulative sum of `probabilities` [B, V] first exceeds `uniform` [B] of its total."""
    cumulative = probabilities.cumsum(dim=-1)  # [B, V]
    return torch.searchsorted(cumulative, uniform.to(cumulative.dtype)[:, None] * cumulative[:, -1:], right=True)[:, 0].clamp(max=probabilities.shape[-1] - 1)
