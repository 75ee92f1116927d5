"""Rotary positions of the draft head: plain, linear and YaRN, as transformers' Llama computes them.

Decision: the cosines are computed from the positions at every use, in fp32, not looked up in a
table. A table would fix a longest position; the head is trained on short pieces and served up to
262,144 tokens, and the positions of a split sample go on counting where the cut was.

Trap: vLLM's plain `yarn` (0.16.0, `YaRNScalingRotaryEmbedding`) knows `attn_factor` but ignores
`mscale`, `mscale_all_dim` and `attention_factor`. A rope_scaling in which these change the factor
is computed here as transformers does, and served differently by vLLM: the baseline says so by `served_alike`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jobs.errors import MustFix

SUPPORTED = ("default", "linear", "yarn")


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The kind of scaling: `rope_type`, or `type` in older configurations; MustFix for an unknown one."""
    if not scaling:
        return "default"
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SUPPORTED:
        raise MustFix(
            f"rope_scaling of type {kind!r} is not supported",
            where="the head's config.json",
            remedy=f"use a head with one of {', '.join(SUPPORTED)}",
        )
    return kind


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """What cosines and sines are multiplied with (1 except under YaRN)."""
    if rope_type(scaling) != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, mscale, all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
    return _yarn_mscale(factor)


def served_alike(scaling: Mapping[str, Any] | None) -> bool:
    """Whether vLLM 0.16.0 scales cosines by the same factor as transformers (see the module's trap)."""
    if rope_type(scaling) != "yarn":
        return True
    served = _yarn_mscale(scaling["factor"]) * scaling.get("attn_factor", 1.0)
    return math.isclose(served, attention_factor(scaling), rel_tol=1e-6)


def inverse_frequencies(
    head_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None,
    max_position_embeddings: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Angles per position, fp32 `[head_dim / 2]`; `transformers.modeling_rope_utils` is the source."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1.0 / theta**exponents  # [D/2]
    kind = rope_type(scaling)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / scaling["factor"]

    trained = scaling.get("original_max_position_embeddings") or max_position_embeddings

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(scaling.get("beta_fast") or 32)
    high = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of width zero would divide by it
    ramp = (torch.arange(head_dim // 2, device=device, dtype=torch.float32) - low) / (high - low)
    interpolated = ramp.clamp(0, 1)  # [D/2], 1 where the frequency is stretched by the full factor
    return frequencies / scaling["factor"] * interpolated + frequencies * (1 - interpolated)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Llama's rotation (first half against second half): x `[heads, R, D]`, cosine and sine `[R, D]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
