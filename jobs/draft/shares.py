"""Which part of every trained tensor a rank updates: gradients reach it summed, weights leave it for all.

With N ranks each one keeps 1/N of AdamW's moments and makes 1/N of the update: after the backward pass
gradients are reduced and scattered, the share is updated, weights are gathered (ZeRO, arXiv 1910.02054,
stage 1). That is as many bytes as an all-reduce, but clipping and AdamW, 15 ms of a step on an H200,
are divided by N, and so are 9.5 GB of moments.

Decisions:
* Shares are views: the flat tensor in N equal parts, the rank-th is the rank's. Nothing is copied into
  buckets, collectives work in place. A tensor that N does not divide is summed and updated by all.
* Weights are gathered in fp32, so that every rank has them whole, as one process has: for forward
  passes, evaluation, checkpoints and `best` alike. In bf16 half of those bytes would be saved (3.5 ms
  of 255 on two GPUs), and the ranks' weights would no longer be the ones that are published.
* Nothing is hidden behind the backward pass: the one compiled graph gives out all gradients at its end,
  and every weight is used in every TTT step, so none is complete earlier. Nor can an update begin
  before the last gradient is there, since clipping needs the norm of all of them.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.draft.ranks import Ranks


class Shares:
    """The shares of one rank; `own` are flat parameters on the same memory as the trained tensors."""

    def __init__(self, trained: Mapping[str, nn.Parameter], ranks: Ranks):
        self._trained, self._ranks = trained, ranks
        self.own = {name: nn.Parameter(self._cut(p.data)) for name, p in trained.items()}

    def _divided(self, tensor: Tensor) -> bool:
        return self._ranks.world > 1 and tensor.numel() % self._ranks.world == 0

    def _cut(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor, flat; all of it where it cannot be divided."""
        flat = tensor.view(-1)
        return flat.chunk(self._ranks.world)[self._ranks.rank] if self._divided(tensor) else flat

    def reduce(self) -> None:
        """Sums the gradients over all ranks; of a divided tensor only the own share is then right."""
        works = []
        for name, parameter in self._trained.items():
            gradient = parameter.grad
            self.own[name].grad = self._cut(gradient)
            if self._divided(gradient):
                works.append(dist.reduce_scatter_tensor(self.own[name].grad, gradient.view(-1), async_op=True))
            elif self._ranks.world > 1:
                works.append(dist.all_reduce(gradient, async_op=True))
        for work in works:
            work.wait()

    def norm(self) -> Tensor:
        """Norm of the summed gradient over all tensors, fp64 scalar, the same on every rank."""
        parts: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in self._trained.items():
            parts[self._divided(parameter)].append(self.own[name].grad)
        squares = {divided: nn.utils.get_total_norm(tensors).double().square() for divided, tensors in parts.items() if tensors}
        if True in squares:
            self._ranks.sum(squares[True])
        return sum(squares.values()).sqrt()

    def gather(self) -> None:
        """Gives every rank the updated weights and frees the gradients."""
        works = []
        for name, parameter in self._trained.items():
            parameter.grad = self.own[name].grad = None
            if self._divided(parameter):
                works.append(dist.all_gather_into_tensor(parameter.data.view(-1), self.own[name].data, async_op=True))
        for work in works:
            work.wait()

    def whole(self, name: str, share: Tensor, place: torch.device) -> Tensor | None:
        """What all ranks' shares of a tensor's moment are together, in new memory at `place`; on the first rank only.

        Every rank has to call it; a scalar is a scalar everywhere.
        """
        parameter, ranks = self._trained[name], self._ranks
        if share.ndim == 0 or not self._divided(parameter):
            return share.detach().to(place, copy=True).view(parameter.shape if share.ndim else ()) if ranks.first else None
        whole = torch.empty_like(parameter) if ranks.first else None
        dist.gather(share.detach(), list(whole.view(-1).chunk(ranks.world)) if ranks.first else None, dst=0)
        return whole.to(place) if ranks.first else None

    def share_of(self, whole: Tensor) -> Tensor:
        """The rank's share of a moment, in memory of its own."""
        return whole if whole.ndim == 0 else self._cut(whole.contiguous()).clone()
