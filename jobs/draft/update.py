"""One update of the weights: its learning rate, the sum over the ranks, division by the loss positions, clipping, AdamW,
and when to leave a step out. Each rank updates its share (`jobs.draft.shares`).

Everything is decided on the device, so that no step makes the host wait: AdamW's `grad_scale` and
`found_inf`, made for mixed precision, scale the gradients and skip the step in its own kernel.

A step is left out when its loss or gradient is not finite, and when its loss is more than
`spike_factor` times the usual one: a running mean over about 20 steps that were not left out.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from jobs.draft.ranks import Ranks
from jobs.draft.shares import Shares
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

    def __init__(self, trained: Mapping[str, nn.Parameter], settings: TrainSettings, ranks: Ranks):
        self._settings, self._shares = settings, Shares(trained, ranks)
        matrices = [self._shares.own[name] for name, p in trained.items() if p.ndim > 1]
        vectors = [self._shares.own[name] for name, p in trained.items() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, fused=True)
        self.usual = torch.zeros((), dtype=torch.float64, device=ranks.device)

    def step(self, loss: Tensor, count: Tensor, learning_rate: float) -> tuple[Tensor, Tensor]:
        """(norm of the mean gradient, why the step was left out or 0), fp64 scalars on the device.

        loss, count: sums over all loss positions of all ranks; the gradients are this rank's sums. A step
        without a loss position changes nothing. The gradients are freed.
        """
        settings = self._settings
        self._shares.reduce()
        mean = loss / count.clamp(min=1e-9)
        norm = self._shares.norm() / count.clamp(min=1e-9)
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
        self._shares.gather()
        learned = torch.where(self.usual > 0, MEMORY * self.usual + (1 - MEMORY) * mean, mean)
        self.usual = torch.where(good, learned, self.usual)
        return norm.where(count > 0, 0.0), reason

    def moments(self, place: torch.device) -> dict[str, Tensor]:
        """Copies of AdamW's whole state at `place`, by the names of the tensors: `name/exp_avg` and so on.

        Every rank has to call it; the first one has the result.
        """
        state = self._adam.state
        parts = {(name, part): value for name, own in self._shares.own.items() for part, value in state.get(own, {}).items()}
        return {f"{name}/{part}": self._shares.whole(name, value, place) for (name, part), value in parts.items()}

    def restore(self, moments: Mapping[str, Tensor], usual: float) -> None:
        for name, own in self._shares.own.items():
            parts = {key.rpartition("/")[2]: value for key, value in moments.items() if key.rpartition("/")[0] == name}
            if parts:
                self._adam.state[own] = {part: self._shares.share_of(value.to(own.device)) for part, value in parts.items()}
        self.usual.fill_(usual)
