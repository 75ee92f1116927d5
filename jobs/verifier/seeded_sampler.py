"""The next tokens of a step, each answer by its own seed, and top-p without sorting.

vLLM 0.16.0 draws a request with a seed by a generator of its own, a kernel launch for each, and finds top-p by
sorting the whole vocabulary of every request. On an H200 at 1,024 requests of 163,840 ids that is 12 and 18 ms of
every step. Here a step is drawn by one compiled function whatever the number of requests:

top-p   A token is kept while those likelier than it have less than `top_p` together, as in vLLM. The probability at
        which that ends is searched for: each pass over the vocabulary sums up what lies under 15 thresholds.
draw    Gumbel-max: the largest of `logit - log(e)`, e exponential. e is a hash of seed and token, so no state is kept:
        a draw depends on the seed, the position and the logits, and not on chunks, preemption, neighbours or device.

Without a GPU the limit is found by sorting, which is faster there, and nothing is compiled.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SEED_KEY = "eagle3_seed"  # extra_args: the seed of the answer
DEPTH = 32.0  # nats below the likeliest token: all of 163,840 tokens further down have 2e-9 together
WAYS, PASSES = 16, 6  # 32 / 16^6 = 1.9e-6 nats, the distance of neighbouring fp32 numbers at 16 to 32


def seeds_at(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """63-bit seeds [n] for the tokens at `positions` of requests seeded with `seeds`, both [n] (splitmix64)."""
    value = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (value ^ (value >> np.uint64(31))) >> np.uint64(1)


def draw(logits: torch.Tensor, seeds: torch.Tensor, top_p: torch.Tensor | None, kept: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Token ids [n], int64.

    logits [n, V] fp32, divided by the temperature; seeds [n, 2] int32, halves of `seeds_at`; top_p [n] or None.
    """
    e = exponential(seeds, logits.shape[-1])  # [n, V]
    scores = logits - e.log()
    if top_p is not None:
        scores = scores.where(kept(logits, top_p), -torch.inf)
    return scores.argmax(-1)


def exponential(seeds: torch.Tensor, tokens: int) -> torch.Tensor:
    """[n, tokens] fp32, exponentially distributed: 31 bits of a hash of seed and token, exact where e is small and decides."""
    token = torch.arange(tokens, dtype=torch.int32, device=seeds.device)  # [V]
    bits = _mixed(_mixed(token * -1640531535 + seeds[:, :1]) ^ seeds[:, 1:])  # [n, V]
    uniform = ((bits & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    return -torch.log1p(-uniform.clamp(max=1 - 2.0**-24))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """C. Wellons' `lowbias32` on int32, whose products wrap; each bit of the input moves half of the output's."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -2073254261
    return x ^ ((x >> 16) & 0xFFFF)


def nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Which tokens are kept, [n, V] bool. logits [n, V], top_p [n]; 1 keeps all."""
    weights = (logits - logits.amax(-1, keepdim=True)).exp()  # [n, V]
    droppable, width, limit = (1 - top_p) * weights.sum(-1), DEPTH, torch.full_like(weights[:, :1], -DEPTH)  # [n], nats, [n, 1]
    for _ in range(PASSES):
        width /= WAYS
        # How many of the thresholds have so little up to them: the limit is between the last of these and the next.
        small = [(weights * (weights <= (limit + k * width).exp())).sum(-1) <= droppable for k in range(1, WAYS)]
        limit = limit + width * torch.stack(small).sum(0)[:, None]
    return (weights > limit.exp()) | (top_p[:, None] >= 1)


def nucleus_by_sorting(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The same as vLLM finds it."""
    ordered, tokens = logits.sort(-1)  # [n, V]
    kept = ordered.softmax(-1).cumsum(-1) > 1 - top_p[:, None]
    kept[:, -1] = True
    return torch.empty_like(kept).scatter_(-1, tokens, kept | (top_p[:, None] >= 1))


@functools.cache
def compiled() -> Callable[..., torch.Tensor]:
    return torch.compile(functools.partial(draw, kept=nucleus), fullgraph=True)


class SeededSampler:
    """Takes the place of the top-k and top-p sampler in a model runner of vLLM. Requests carry their seed in SEED_KEY."""

    def __init__(self, runner: Any):
        self.runner, self.device = runner, runner.device
        self.cuda = self.device.type == "cuda"
        self._drafts: list[int] | None = None
        self._sample, runner._sample = runner._sample, self._around_sample
        place = runner.sampler.topk_topp_sampler
        self._theirs, place.forward = place.forward, self._forward
        if self.cuda:  # compiled before the first step, for any number of rows
            rows = 256
            logits = torch.zeros(rows, runner.model_config.get_vocab_size(), device=self.device)
            self._draw(logits, np.zeros(rows, np.uint64), torch.ones(rows, device=self.device))

    def _around_sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        self._drafts = spec_decode_metadata and spec_decode_metadata.num_draft_tokens
        generators = self.runner.input_batch.generators
        if generators:
            # With a drafter, accepting and correcting a draft goes by vLLM's own generators: seeded anew for every position.
            seeds, unused = self._seeds(self.runner.input_batch.num_reqs), self.runner.discard_request_mask.np
            for index, generator in generators.items():
                generator.manual_seed(int(seeds[index]))
                if unused[index]:
                    generator.set_offset(4)  # which vLLM then takes back
        return self._sample(logits, spec_decode_metadata)

    def _seeds(self, rows: int) -> np.ndarray:
        """[rows] uint64. The position is that of the first token to be drawn: counted from the last draft, a later step could come by the same numbers again."""
        runner = self.runner
        parameters = [runner.requests[request].sampling_params.extra_args for request in runner.input_batch.req_ids[:rows]]
        seeds = np.array([(extra or {}).get(SEED_KEY, 0) for extra in parameters], dtype=np.uint64)
        return seeds_at(seeds, runner.seq_lens.np[:rows] - np.array(self._drafts or 0))

    def _forward(self, logits: torch.Tensor, generators: dict, k: torch.Tensor | None, p: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        if k is not None:
            return self._theirs(logits, generators, k, p)
        return self._draw(logits, self._seeds(len(logits)), p), None

    @torch.inference_mode()  # as in vLLM's steps; in another mode it would be compiled another time
    def _draw(self, logits: torch.Tensor, seeds: np.ndarray, top_p: torch.Tensor | None) -> torch.Tensor:
        halves = torch.from_numpy(seeds.view(np.int32).reshape(-1, 2).copy())
        if not self.cuda:
            return draw(logits, halves, top_p, nucleus_by_sorting)
        halves = halves.pin_memory().to(self.device, non_blocking=True)
        if rows_alone := len(logits) == 1:  # one row would be compiled by itself
            logits, halves, top_p = (x if x is None else x.repeat(2, *(1,) * (x.dim() - 1)) for x in (logits, halves, top_p))
        for x in (logits, halves, top_p):
            if x is not None:
                torch._dynamo.maybe_mark_dynamic(x, 0)
        drawn = compiled()(logits, halves, top_p)
        return drawn[:1] if rows_alone else drawn
