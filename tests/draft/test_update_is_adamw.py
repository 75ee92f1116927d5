"""One update equals AdamW with decoupled decay (Loshchilov and Hutter 2019, algorithm 2) after clipping, written out in float64.

Gradients come in as sums over loss positions; the reference is given their mean. Vectors (norms) are not decayed.
"""

import numpy as np
import pytest
import torch
from torch import nn

from jobs.draft.ranks import Ranks
from jobs.draft.update import Update
from jobs.settings import TrainSettings

SHAPES = {"layers.0.mlp.up_proj.weight": (6, 5), "norm.weight": (7,), "fc.weight": (4, 3)}


class Reference:
    """The algorithm on float64 arrays, changed in place."""

    def __init__(self, weights: dict[str, np.ndarray], settings: TrainSettings):
        self.weights, self.settings, self.t = weights, settings, 0
        self.m, self.v = ({name: np.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))

    def update(self, gradient: dict[str, np.ndarray], rate: float) -> float:
        """One update by a mean gradient; its norm before clipping."""
        settings, m, v = self.settings, self.m, self.v
        self.t += 1
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        for name, weight in self.weights.items():
            g = gradient[name] * min(1.0, settings.clip / norm)
            m[name] = settings.betas[0] * m[name] + (1 - settings.betas[0]) * g
            v[name] = settings.betas[1] * v[name] + (1 - settings.betas[1]) * g**2
            if weight.ndim > 1:
                weight *= 1 - rate * settings.weight_decay
            weight -= rate * (m[name] / (1 - settings.betas[0] ** self.t)) / (np.sqrt(v[name] / (1 - settings.betas[1] ** self.t)) + 1e-8)
        return norm


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.8, 0.999)])
def test_updates_are_those_of_the_algorithm(betas):
    settings = TrainSettings(device="cpu", betas=betas, weight_decay=0.1, clip=1.0, spike_factor=None)
    random = np.random.default_rng(3)
    weights = {name: random.normal(size=shape) for name, shape in SHAPES.items()}
    trained = {name: nn.Parameter(torch.from_numpy(value).float()) for name, value in weights.items()}
    update = Update(trained, settings, Ranks(0, 1, torch.device("cpu")))
    scales, rates, counts = [0.05, 5.0, 0.2, 40.0, 0.01, 1.0], [1e-2, 2e-2, 2e-2, 1e-2, 5e-3, 1e-3], [17.0, 400.0, 3.0, 1.0, 256.0, 90.0]
    gradients = [{name: random.normal(size=shape) * scale for name, shape in SHAPES.items()} for scale in scales]
    reference = Reference(weights, settings)
    norms = [reference.update(gradient, rate) for gradient, rate in zip(gradients, rates, strict=True)]
    assert min(norms) < settings.clip < max(norms), "some are clipped and some are not"
    for gradient, rate, count, norm in zip(gradients, rates, counts, norms, strict=True):
        for name, parameter in trained.items():
            parameter.grad = torch.from_numpy(gradient[name] * count).float()
        found, reason = update.step(torch.tensor(2.0 * count).double(), torch.tensor(count).double(), rate)
        assert float(reason) == 0 and float(found) == pytest.approx(norm, rel=1e-5)
    for name, parameter in trained.items():
        np.testing.assert_allclose(parameter.detach().numpy(), weights[name], rtol=2e-5, atol=2e-6, err_msg=name)
