"""Matrix products of training in FP8: twice the rate of bf16 on Hopper and Blackwell, where acceptance allows it.

A setting (`train.fp8`), off by default. Weights and activations are float8_e4m3fn, gradients float8_e5m2
(arXiv 2209.05433), each tensor with one scale, its largest value, found anew every time; sums are fp32 in
the matrix unit, weights and optimizer state stay what they were. Only PyTorch is needed (`torch._scaled_mm`).

Decisions:
* The layer's and `fc`'s products, forward and both backward. Not the two output heads: their logits are
  differences of large numbers, and the loss is made of them.
* One scale a tensor, not a row: a row's scale belongs to one dimension, and of the three products each
  sums over another, so every tensor would be quantized twice.
* Only while training: evaluation and what is published run as the head is served.
* A matrix is in memory before it is turned (`_kept`). Where PyTorch 2.9.1's compiler quantized and turned gradients in
  one kernel, every fourth row came out wrong, mostly as NaN (NOTES.md); the copy costs 3 % of a step.
"""

import torch
from torch import Tensor

from jobs.errors import MustFix

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
CAPABILITY = (8, 9)  # the first GPUs that have it


def check(device: torch.device) -> None:
    """MustFix for a GPU without FP8 matrix units; on a CPU the products are right and slow."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise MustFix(f"{torch.cuda.get_device_name(device)} has no FP8 matrix units", where="train.fp8", remedy="set it to false")


def _quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in FP8, and the fp32 scalar that it has to be multiplied with."""
    scale = x.detach().abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


@torch.library.custom_op("eagle3_job::kept", mutates_args=())
def _kept(x: Tensor) -> Tensor:
    """A copy of a matrix in FP8, which the compiler has to have in memory."""
    return x.view(torch.uint8).clone().view(x.dtype)


@_kept.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _turned(x: Tensor) -> Tensor:
    """The transposed matrix, its rows one behind the other."""
    return (_kept(x) if torch.compiler.is_compiling() else x).t().contiguous()


class _Product(torch.autograd.Function):
    """x `[R, K]` times a weight `[N, K]`, transposed -> `[R, N]` in the type of the matmuls."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        x8, x_scale = _quantized(x, FORWARD)
        weight8, weight_scale = _quantized(weight, FORWARD)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.types = x.dtype, weight.dtype
        return torch._scaled_mm(x8, weight8.t(), scale_a=x_scale, scale_b=weight_scale, out_dtype=dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        g8, g_scale = _quantized(gradient, BACKWARD)
        wide = gradient.dtype
        of_x = torch._scaled_mm(g8, _turned(weight8).t(), scale_a=g_scale, scale_b=weight_scale, out_dtype=wide)  # [R, K]
        of_weight = torch._scaled_mm(_turned(g8), _turned(x8).t(), scale_a=g_scale, scale_b=x_scale, out_dtype=wide)  # [N, K]
        return of_x.to(ctx.types[0]), of_weight.to(ctx.types[1]), None


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`torch.nn.functional.linear` of rows `[R, K]` in FP8; the result has the type that autocast would give it."""
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return _Product.apply(x, weight, dtype)
