"""The next tokens of a step, each answer by its own seed, and top-p without sorting.

vLLM 0.16.0 draws a request with a seed by a generator of its own, a kernel launch for each, and finds top-p by
sorting the whole vocabulary of every request. On an H200 at 1,024 requests of 163,840 ids that is 12 and 18 ms of
every step. Here a step is drawn by one compiled function whatever the number of requests:

top-p   A token is kept while those likelier than it have less than `top_p` together. The probability at which that
        ends is searched for: each pass over the vocabulary sums up what lies under 15 thresholds. Unlike in vLLM, of
        tokens with one logit either all are kept or none (bf16 makes many alike).
draw    Gumbel-max: the largest of `logit - log(e)`, e exponential. e is a hash of seed and token, so no state is kept:
        a draw depends on the seed, the position and the logits, and not on chunks, preemption, neighbours or device.

Without a GPU the limit is found by sorting, which is faster there, and nothing is compiled.

Every tensor-parallel rank draws for itself and feeds its own tokens back, so all must come to the same ones from the same
logits: the kernels may not be chosen by how fast they happen to be in a process (DETERMINISTIC).
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

SEED_KEY = "eagle3_seed"  # extra_args: the seed of the answer
DEPTH = 32.0  # nats below the likeliest token: all of 163,840 tokens further down have 2e-9 together
# Inductor would try another block size for a sum with many accumulators, and another size rounds otherwise.
DETERMINISTIC = {"dynamic_scale_rblock": False}
WAYS, PASSES = 16, 6  # 32 / 16^6 = 1.9e-6 nats, the distance of neighbouring fp32 numbers at 16 to 32


def seeds_at(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """63-bit seeds [n] for the tokens at `positions` of requests seeded with `seeds`, both [n] (splitmix64)."""
    value = seeds.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (value ^ (value >> np.uint64(31))) >> np.uint64(1)


def halves(seeds: np.ndarray) -> torch.Tensor:
    """Seeds [n] uint64 as int32 [n, 2], what `draw` takes."""
    return torch.from_numpy(seeds.view(np.int32).reshape(-1, 2).copy())


def draw(logits: torch.Tensor, seeds: torch.Tensor, top_p: torch.Tensor | None, kept: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Token ids [n], int64.

    logits [n, V] fp32, divided by the temperature; seeds [n, 2] int32, the `halves` of `seeds_at`; top_p [n] or None.
    """
    e = exponential(seeds, logits.shape[-1])  # [n, V]
    scores = logits - e.log()
    if top_p is not None:
        scores = scores.where(kept(logits, top_p), -torch.inf)
    return scores.argmax(-1)


def exponential(seeds: torch.Tensor, tokens: int) -> torch.Tensor:
    """[n, tokens] fp32, exponentially distributed: from 31 bits of a hash of seed and token, so in steps of 5e-10 where e is small and decides."""
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
    """The same from the sorted probabilities, as vLLM finds it."""
    ordered = logits.sort(-1).values  # [n, V]
    dropped = (ordered.softmax(-1).cumsum(-1) <= 1 - top_p[:, None]).sum(-1, keepdim=True)  # [n, 1]
    lowest = ordered.gather(-1, dropped.clamp(max=logits.shape[-1] - 1))
    return (logits >= lowest) | (top_p[:, None] >= 1)


@functools.cache
def compiled(backend: str | Callable = "inductor") -> Callable[..., torch.Tensor]:
    options = {"options": DETERMINISTIC} if backend == "inductor" else {}
    return torch.compile(functools.partial(draw, kept=nucleus), fullgraph=True, backend=backend, **options)


@torch.inference_mode()  # as in vLLM's steps; what comes from elsewhere is copied, or it would be compiled another time
def draw_compiled(logits: torch.Tensor, seeds: torch.Tensor, top_p: torch.Tensor, backend: str | Callable = "inductor") -> torch.Tensor:
    """`draw` by one compiled function for any number of rows."""
    rows = len(logits)
    given = [logits.contiguous(), seeds.clone(), top_p.clone()]
    if rows == 1:  # one row would be compiled by itself
        given = [torch.cat((x, x)) for x in given]
    for x in given:
        torch._dynamo.maybe_mark_dynamic(x, 0)
    return compiled(backend)(*given)[:rows]


class SeededSampler:
    """Takes the place of the top-k and top-p sampler in a model runner of vLLM. Requests carry their seed in SEED_KEY; none has a top-k."""

    def __init__(self, runner: Any):
        self.runner, self.device = runner, runner.device
        self._seeds: np.ndarray | None = None  # of this step, [requests]
        self._sample, runner._sample = runner._sample, self._around_sample
        runner.sampler.topk_topp_sampler.forward = self._forward
        if (
            self.device.type == "cuda"
        ):  # compiled before the first step, for the most rows there may be: made for few, it is half as fast with many
            with torch.inference_mode():
                logits = torch.zeros(runner.max_num_reqs, runner.model_config.get_vocab_size(), device=self.device)
                self._draw(logits, np.zeros(len(logits), np.uint64), None)

    def _around_sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> Any:
        runner = self.runner
        if not runner.input_batch.sampling_metadata.all_greedy:
            self._seeds = self._seeds_of(spec_decode_metadata.num_draft_tokens if spec_decode_metadata is not None else 0)
            for index, generator in runner.input_batch.generators.items():
                # With a drafter, accepting and correcting a draft goes by vLLM's own generators: seeded anew for every position.
                generator.manual_seed(int(self._seeds[index]))
                if runner.discard_request_mask.np[index]:
                    generator.set_offset(4)  # which vLLM then takes back
        return self._sample(logits, spec_decode_metadata)

    def _seeds_of(self, drafts: list[int] | int) -> np.ndarray:
        """[requests] uint64, for the first token to be drawn: counted from the last draft, a later step could come by the same numbers again."""
        runner, count = self.runner, self.runner.input_batch.num_reqs
        parameters = [runner.requests[request].sampling_params.extra_args for request in runner.input_batch.req_ids[:count]]
        # What is greedy brings none, and what is drawn for it is not used.
        seeds = np.array([(extra or {}).get(SEED_KEY, 0) for extra in parameters], dtype=np.uint64)
        return seeds_at(seeds, runner.seq_lens.np[:count] - np.array(drafts))

    def _forward(self, logits: torch.Tensor, generators: dict, k: torch.Tensor | None, p: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        if k is not None:
            raise NotImplementedError("a request with top_k: this engine's requests have none")
        return self._draw(logits, self._seeds, p), None

    def _draw(self, logits: torch.Tensor, seeds: np.ndarray, top_p: torch.Tensor | None) -> torch.Tensor:
        if self.device.type != "cuda":
            return draw(logits, halves(seeds), top_p, nucleus_by_sorting)
        if top_p is None:  # it is 1 for all; without it another function would be compiled in the middle of the run
            top_p = torch.ones(len(logits), device=self.device)
        return draw_compiled(logits, halves(seeds).pin_memory().to(self.device, non_blocking=True), top_p)
