"""The paired gain of the trained head in each domain, of the run's own prompts, as `evaluate` writes it into evaluation.json."""

from types import SimpleNamespace

import pytest

from jobs.draft.acceptance import Counts, Judgement, SampleCounts
from jobs.job_file import load
from jobs.stages import judging

# Steps and tokens of ten prompts of each domain, one of them with too few for an interval; each prompt has the same in both judgements.
STEPS = 10
DOMAINS = {"chat": 10, "code": 10, "math": 4}


def judged(name: str, tokens: dict[str, int]) -> Judgement:
    """tokens: domain -> tokens of the STEPS steps of each of its answers, the place of the prompt added."""
    samples = {}
    for domain, prompts in DOMAINS.items():
        for place in range(prompts):
            counts = Counts(STEPS, tokens[domain] + place, STEPS, 3 * STEPS, (STEPS,) * 3, (5, 3, 1))
            samples[f"{domain}{place}#0"] = SampleCounts(counts, counts, {"domain": {domain: counts}})
    wild = Counts(STEPS, 40 if name == "trained" else 10, STEPS, 3 * STEPS, (STEPS,) * 3, (5, 3, 1))
    standard = {f"std.gsm8k.{place}#0": SampleCounts(wild, wild, {"domain": {"chat": wild}}) for place in range(9)}
    return Judgement(name, 3, samples | standard)


def test_each_domain_with_prompts_enough_has_the_gain_of_its_own_prompts():
    context = SimpleNamespace(settings=load("smoke", overrides=["evaluate.bootstrap=200"], environment={}))
    trained = judged("trained", {"chat": 22, "code": 17, "math": 20})
    best = judged("ngram", {"chat": 14, "code": 19, "math": 12})
    gains = judging.gains_by_domain(context, trained, best)
    assert gains.keys() == {"chat", "code"}, "four prompts are too few for an interval, standard sets stand apart"
    assert gains["chat"]["mean"] == pytest.approx(0.8) and gains["code"]["mean"] == pytest.approx(-0.2)
    for gain in gains.values():
        assert gain["low"] == pytest.approx(gain["mean"]) == gain["high"], "the same gain on every prompt: paired, its interval is a point"
