"""One update of the weights: its learning rate, division by the loss positions, clipping, AdamW, and when to leave a step out.

Everything is decided on the device, so that no step makes the host wait: AdamW's `grad_scale` and
`found_inf`, made for mixed precision, scale the gradients and skip the step in its own kernel.

A step is left out when its loss or gradient is not finite, and when its loss is more than
`spike_factor` times the usual one: a running mean over about 20 steps that were not left out.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from jobs.settings import TrainSettings

NOT_FINITE, SPIKE = 1, 2
REASONS = {NOT_FINITE: "a loss or gradient that is not finite", SPIKE: "a loss far over the usual one"}
MEMORY = 0.95  # share of the usual loss that a step leaves


def learning_rate(step: int, steps: int, settings: TrainSettings, warm: bool) -> float:
    """Linear warm-up, then a cosine down to `final_share` of the peak; step counts from 0."""
    peak = settings.warm_start_learning_rate if warm else settings.learning_rate
    rising = math.ceil(settings.warmup_share * steps)
    if step < rising:
        return peak * (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return peak * (settings.final_share + (1 - settings.final_share) * 0.5 * (1 + math.cos(math.pi * done)))


class Update:
    """AdamW in fp32 over the trained tensors; `usual` is the running mean of the loss, fp64, 0 before the first step."""

    def __init__(self, trained: Mapping[str, nn.Parameter], settings: TrainSettings, device: torch.device):
        self._trained, self._settings = trained, settings
        matrices = [p for p in trained.values() if p.ndim > 1]
        vectors = [p for p in trained.values() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, fused=True)
        self.usual = torch.zeros((), dtype=torch.float64, device=device)

    def step(self, loss: Tensor, count: Tensor, learning_rate: float) -> tuple[Tensor, Tensor]:
        """(norm of the mean gradient, why the step was left out or 0), fp64 scalars on the device.

        loss, count: sums over all loss positions of all ranks, as are the gradients. A step without a
        loss position changes nothing. The gradients are freed.
        """
        settings = self._settings
        mean = loss / count.clamp(min=1e-9)
        norm = nn.utils.get_total_norm([p.grad for p in self._trained.values()]).double() / count.clamp(min=1e-9)
        reason = torch.where(norm.isfinite() & loss.isfinite(), 0.0, float(NOT_FINITE)).double()
        if settings.spike_factor is not None:
            spike = (self.usual > 0) & (mean > settings.spike_factor * self.usual)
            reason = torch.where((reason == 0) & spike, float(SPIKE), reason)
        good = (reason == 0) & (count > 0)
        scale = (settings.clip / (norm + 1e-6)).clamp(max=1.0) / count
        self._adam.grad_scale = scale.reciprocal().where(good, 1.0).float()
        self._adam.found_inf = (~good).float()
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self._adam.zero_grad()
        learned = torch.where(self.usual > 0, MEMORY * self.usual + (1 - MEMORY) * mean, mean)
        self.usual = torch.where(good, learned, self.usual)
        return norm.where(count > 0, 0.0), reason

    def moments(self) -> dict[str, Tensor]:
        """AdamW's state by the names of the tensors: `name/exp_avg` and so on."""
        state = self._adam.state
        return {f"{name}/{part}": value for name, p in self._trained.items() for part, value in state.get(p, {}).items()}

    def restore(self, moments: Mapping[str, Tensor], usual: float) -> None:
        for name, parameter in self._trained.items():
            parts = {key.rpartition("/")[2]: value for key, value in moments.items() if key.rpartition("/")[0] == name}
            if parts:
                self._adam.state[parameter] = {part: value.to(parameter.device) for part, value in parts.items()}
        self.usual.fill_(usual)
