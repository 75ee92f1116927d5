"""The arithmetic of a step with nothing around it: its matrix products, the clipping and a fused AdamW."""

import time

import torch

from jobs.draft.model import HeadConfig


def products(c: HeadConfig, steps: int, once: bool) -> list[tuple[int, int, int, bool, bool]]:
    """(inputs, outputs, times, input needs a gradient, weight needs one) of every matrix of the step.

    once: the embedding's half of query, key and value for all steps together, as in `jobs.draft.model.Attention`.
    """
    h, width = c.hidden_size, c.heads * c.head_dim
    halves = [(h, width, 3, True, True), (h, width, 3 * steps, True, True)] if once else [(2 * h, width, 3 * steps, True, True)]
    return [
        (3 * h, h, 1, False, True), *halves, (width, h, steps, True, True), (h, c.intermediate_size, 2 * steps, True, True),
        (c.intermediate_size, h, steps, True, True), (h, c.draft_vocab_size, steps, True, True), (h, c.draft_vocab_size, 1, False, False),
    ]  # fmt: skip


def measure(c: HeadConfig, rows: int, steps: int, once: bool, seconds: float = 2.0) -> dict[str, float]:
    """Milliseconds of the products and of the optimizer, and tokens a second of both together."""
    device = torch.device("cuda")
    calls = []
    for inputs, outputs, times, input_gradient, weight_gradient in products(c, steps, once):
        x, w = (torch.randn(n, inputs, device=device).bfloat16() for n in (rows, outputs))
        y = torch.randn(rows, outputs, device=device).bfloat16()
        dx, dw, out = torch.empty_like(x), torch.empty_like(w), torch.empty_like(y)
        one = [lambda x=x, w=w, out=out: torch.mm(x, w.T, out=out)]
        if input_gradient:
            one.append(lambda y=y, w=w, dx=dx: torch.mm(y, w, out=dx))
        if weight_gradient:
            one.append(lambda y=y, x=x, dw=dw: torch.mm(y.T, x, out=dw))
        calls += one * times
    matmul = _timed(lambda calls=calls: [call() for call in calls], seconds)
    del calls
    torch.cuda.empty_cache()
    parameters = [torch.nn.Parameter(torch.randn(outputs, inputs, device=device) * 0.02) for inputs, outputs in _matrices(c)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    copies = [parameter.bfloat16() for parameter in parameters]

    def update() -> None:
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        optimizer.grad_scale, optimizer.found_inf = norm.clamp(min=1.0), (~norm.isfinite()).float()
        optimizer.step()
        torch._foreach_copy_(copies, [parameter.detach() for parameter in parameters])

    optimizing = _timed(update, 0.5)
    return {"gemm_ms": 1e3 * matmul, "optimizer_ms": 1e3 * optimizing, "tokens_per_second": rows / (matmul + optimizing)}


def _matrices(c: HeadConfig) -> list[tuple[int, int]]:
    h, width = c.hidden_size, c.heads * c.head_dim
    return [
        (3 * h, h),
        *[(2 * h, width)] * 3,
        (width, h),
        *[(h, c.intermediate_size)] * 2,
        (c.intermediate_size, h),
        (h, c.draft_vocab_size),
    ]


def matmul_rate(size: int = 8192, seconds: float = 1.5) -> float:
    """TFLOP/s of one bf16 product, sustained so long."""
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    return 2 * size**3 / _timed(lambda: a @ b, seconds) / 1e12


def _timed(call, seconds: float) -> float:
    """Seconds of one call, over as many as fit, after one that is not counted."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    number = max(2, int(seconds / (time.perf_counter() - began)))
    began = time.perf_counter()
    for _ in range(number):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / number
