"""Logits in fp32 from bf16 factors: what a matrix unit sums up in fp32 anyway leaves it unrounded.

A setting (`train.fp32_logits`). A logit of 20 has no bf16 neighbour nearer than 0.125, so target and draft distributions of
a bf16 training are noisy. On a CPU, with a real verifier, a bf16 step cost 0.012 of acceptance length; output heads in
fp32 gave all of it back, this about half, each to within 0.01 (NOTES.md). Factors and gradients stay in bf16, so the
arithmetic is the same; the logits are twice as large in memory. Off until a GPU has measured both.
"""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x `[M, H]` times weight `[N, H]`, transposed -> fp32 `[M, N]`; the factors have the type that autocast would give them."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return _Product.apply(x, weight, dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        narrow_x, narrow_weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(narrow_x, narrow_weight)
        ctx.types = x.dtype, weight.dtype
        return _unrounded(narrow_x, narrow_weight)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        narrow = gradient.to(x.dtype)
        return (narrow @ weight).to(ctx.types[0]), (narrow.t() @ x).to(ctx.types[1]), None


def _unrounded(x: Tensor, weight: Tensor) -> Tensor:
    if x.device.type == "cuda" and x.dtype != torch.float32:
        # `mm` takes an out_dtype too, but torch 2.9's inductor lowers only `bmm`'s.
        return torch.bmm(x[None], weight.t()[None], out_dtype=torch.float32)[0]
    with torch.autocast(x.device.type, enabled=False):
        return x.float() @ weight.float().t()
