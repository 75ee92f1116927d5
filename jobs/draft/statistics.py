"""How sure a judgement is: bootstrap intervals over PROMPTS, paired when two heads are compared.

The unit that is resampled is the prompt, not the step: steps of one answer are alike (a code answer
is easy from end to end), so an interval over steps would be several times too narrow. Turns of one
conversation (`<prompt>#<turn>`) belong to one prompt.

Mean acceptance length is a ratio estimator, sum of tokens over sum of steps, as the engine's own
counters give it; averaging the prompts' own means would weigh a ten-token answer like a long one.
Two heads are compared on the same resampled prompts, so that what makes a prompt easy for both
cancels. Resampling is seeded: the same judgement gives the same interval, bit for bit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jobs.draft.acceptance import Judgement
from jobs.errors import MustFix
from jobs.wording import counted

# A percentile bootstrap of n prompts has C(2n-1, n) distinct resamples: 35 at 4, 126 at 5. Below
# this the ends of a 95 % interval would be the two or three most extreme ones.
MINIMUM_PROMPTS = 5


class Interval(NamedTuple):
    """`mean` over all prompts and the percentile interval `low`..`high`, in tokens a verification step."""

    mean: float
    low: float
    high: float


def mean_interval(
    judgement: Judgement,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    dimension: str | None = None,
    label: str | None = None,
) -> Interval:
    """Mean acceptance length of the walk with its interval.

    Args:
        judgement: of one head.
        bootstrap: resamples over prompts.
        seed: of the resampling.
        level: of the interval.
        dimension, label: only steps of that group (for example "thinking", "inside"); None is all.

    Raises:
        MustFix: fewer than `MINIMUM_PROMPTS` prompts with a step, or an unknown group.
    """
    by_prompt = sums_by_prompt(judgement, dimension, label)
    prompts = sorted(by_prompt)
    _enough(prompts, judgement.name)
    tokens, steps = _columns(by_prompt, prompts)  # [P], [P]
    weights = _resamples(len(prompts), bootstrap, seed)  # [B, P]
    return _interval(float(tokens.sum() / steps.sum()), (weights @ tokens) / (weights @ steps), level)


def paired_gain_interval(
    judgement: Judgement,
    baseline: Judgement,
    *,
    bootstrap: int = 1000,
    seed: int = 0,
    level: float = 0.95,
    dimension: str | None = None,
    label: str | None = None,
) -> Interval:
    """Mean acceptance length of `judgement` minus that of `baseline`, on the same resampled prompts.

    Raises:
        MustFix: the two were not judged on the same prompts, or on too few.
    """
    ours, theirs = sums_by_prompt(judgement, dimension, label), sums_by_prompt(baseline, dimension, label)
    if set(ours) != set(theirs):
        odd = sorted(set(ours) ^ set(theirs))
        raise MustFix(
            f"{judgement.name} and {baseline.name} were not judged on the same prompts: {len(odd)} differ, the first is {odd[0]}",
            where=f"judgements/{judgement.name}.json and judgements/{baseline.name}.json",
            remedy="judge both on the same eval split",
        )
    prompts = sorted(ours)
    _enough(prompts, judgement.name)
    weights = _resamples(len(prompts), bootstrap, seed)  # [B, P]
    means, drawn = [], []
    for by_prompt in (ours, theirs):
        tokens, steps = _columns(by_prompt, prompts)  # [P], [P]
        means.append(float(tokens.sum() / steps.sum()))
        drawn.append((weights @ tokens) / (weights @ steps))  # [B]
    return _interval(means[0] - means[1], drawn[0] - drawn[1], level)


def sums_by_prompt(judgement: Judgement, dimension: str | None = None, label: str | None = None) -> dict[str, tuple[int, int]]:
    """(tokens, steps) of every prompt that has a step, turns summed."""
    if dimension is not None and label not in judgement.labels(dimension):
        raise MustFix(
            f"{judgement.name} has no group {dimension}={label}",
            where=f"judgements/{judgement.name}.json",
            remedy=f"known are {judgement.labels(dimension)}",
        )
    sums: dict[str, tuple[int, int]] = {}
    for sample_id, sample in judgement.samples.items():
        counts = sample.walk if dimension is None else sample.groups.get(dimension, {}).get(label)
        if counts is None or not counts.steps:
            continue
        prompt = prompt_of(sample_id)
        tokens, steps = sums.get(prompt, (0, 0))
        sums[prompt] = (tokens + counts.tokens, steps + counts.steps)
    return sums


def prompt_of(sample_id: str) -> str:
    """`<prompt id>#<turn>` -> the prompt id; an id without a turn is a prompt of its own."""
    return sample_id.rpartition("#")[0] or sample_id


def _enough(prompts: Sequence[str], name: str) -> None:
    if len(prompts) < MINIMUM_PROMPTS:
        raise MustFix(
            f"{counted(len(prompts), 'prompts')} with a step: too few for an interval of {name}, which needs {MINIMUM_PROMPTS}",
            where="prompts.eval_samples",
            remedy="judge on more prompts",
        )


def _columns(by_prompt: dict[str, tuple[int, int]], prompts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array([by_prompt[p] for p in prompts], dtype=np.float64)  # [P, 2]
    return table[:, 0], table[:, 1]


def _resamples(prompts: int, bootstrap: int, seed: int) -> np.ndarray:
    """How often each prompt is drawn in each resample: float64 [B, P], rows sum to P."""
    return np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1.0 / prompts), size=bootstrap).astype(np.float64)


def _interval(mean: float, drawn: np.ndarray, level: float) -> Interval:
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, float(low), float(high))
