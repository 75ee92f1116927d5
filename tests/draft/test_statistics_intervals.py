"""Intervals are over prompts, cover the truth as often as they say, and are the same for the same seed."""

import numpy as np
import pytest

from jobs.draft.acceptance import Counts, Judgement, SampleCounts
from jobs.draft.statistics import MINIMUM_PROMPTS, mean_interval, paired_gain_interval, prompt_of
from jobs.errors import MustFix


def judgement(name: str, rows: dict[str, tuple[int, int]]) -> Judgement:
    """From sample id -> (tokens, steps)."""
    return Judgement(name, 1, {i: SampleCounts(Counts(s, t, s, s, (s,), (t - s,)), Counts.zero(1)) for i, (t, s) in rows.items()})


def drawn(seed: int, prompts: int, easier: float = 0.0) -> dict[str, tuple[int, int]]:
    """Prompts of one step length but their own difficulty: steps within a prompt are alike."""
    rng = np.random.default_rng(seed)
    rows = {}
    for i in range(prompts):
        steps, ease = int(rng.integers(20, 200)), rng.beta(4, 4)
        tokens = steps + int(rng.binomial(steps, min(ease + easier, 1.0)))
        rows[f"p{i}#0"] = (tokens, steps)
    return rows


def test_it_covers_the_truth_as_often_as_it_says():
    truth = 1.5  # E[steps * (1 + ease)] / E[steps], independent draws
    inside = 0
    for seed in range(300):
        interval = mean_interval(judgement("h", drawn(seed, 40)), bootstrap=300, seed=seed)
        inside += interval.low <= truth <= interval.high
    # 95 % of 300 is 285 with a standard deviation of 3.8; the percentile bootstrap is a little narrow at 40 prompts
    assert 265 <= inside <= 297


def test_an_interval_over_steps_would_be_far_too_narrow():
    rows = drawn(1, 40)
    interval = mean_interval(judgement("h", rows), seed=0)
    accepted, steps = sum(t - s for t, s in rows.values()), sum(s for _, s in rows.values())
    share = accepted / steps
    over_steps = 2 * 1.96 * (share * (1 - share) / steps) ** 0.5
    assert interval.high - interval.low > 3 * over_steps


def test_the_mean_is_tokens_over_steps_and_turns_belong_to_their_prompt():
    rows = {"a#0": (10, 5), "a#1": (90, 30), "b#0": (7, 7), "c": (8, 4), "d#0": (9, 3), "e#0": (5, 5), "empty#0": (0, 0)}
    interval = mean_interval(judgement("h", rows), seed=3)
    assert interval.mean == pytest.approx(129 / 54)
    merged = {"a#0": (100, 35), "b#0": (7, 7), "c": (8, 4), "d#0": (9, 3), "e#0": (5, 5)}
    assert mean_interval(judgement("h", merged), seed=3) == interval
    assert [prompt_of(i) for i in ("a#1", "x#y#0", "c")] == ["a", "x#y", "c"]


def test_the_same_seed_gives_the_same_interval_and_another_does_not():
    one = judgement("h", drawn(5, 20))
    assert mean_interval(one, seed=1) == mean_interval(one, seed=1) != mean_interval(one, seed=2)
    shuffled = Judgement("h", 1, dict(reversed(one.samples.items())))
    assert mean_interval(shuffled, seed=1) == mean_interval(one, seed=1)


def test_a_paired_gain_is_narrower_than_the_two_apart_and_zero_against_itself():
    rng = np.random.default_rng(0)
    base = drawn(7, 40)
    better = {i: (t + int(rng.binomial(s, 0.1)), s) for i, (t, s) in base.items()}
    a, b = judgement("new", better), judgement("old", base)
    gain = paired_gain_interval(a, b, seed=0)
    assert gain.mean == pytest.approx(mean_interval(a).mean - mean_interval(b).mean)
    assert gain.low > 0.05 and gain.high < 0.15  # every prompt gained about 0.1
    apart = [mean_interval(x, seed=0) for x in (a, b)]
    assert gain.high - gain.low < 0.3 * sum(x.high - x.low for x in apart) / 2
    assert paired_gain_interval(b, b) == (0.0, 0.0, 0.0)


def test_too_few_prompts_other_prompts_and_unknown_groups_are_refused():
    few = judgement("h", drawn(0, MINIMUM_PROMPTS - 1))
    with pytest.raises(MustFix, match="4 prompts with a step: too few"):
        mean_interval(few)
    one, other = judgement("a", drawn(0, 8)), judgement("b", drawn(0, 9))
    with pytest.raises(MustFix, match="not judged on the same prompts: 1 differ, the first is p8"):
        paired_gain_interval(one, other)
    with pytest.raises(MustFix, match="no group thinking=inside"):
        mean_interval(one, dimension="thinking", label="inside")
