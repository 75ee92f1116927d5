"""vLLM's CPU runner drafts with an EAGLE-3 head: greedy answers stay what they were and the counters are the true ones."""

import pytest
from probing import run_probe

from compat.cpu_speculation import rejection_sample

TOKENS = 40
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def looks(tmp_path_factory):
    return run_probe("engine", "speculation", tmp_path_factory.mktemp("speculation"))


@pytest.fixture(scope="module")
def seen(looks):
    return looks["known"]


def test_speculative_answers_equal_plain_ones(seen):
    assert seen["plain"] == [[last + 1 + step for step in range(TOKENS)] for last in seen["last"]]
    assert seen["speculative"] == seen["plain"]


def test_counters_are_those_of_a_head_known_by_construction(seen):
    # From an even token every first draft is accepted: 2 tokens a step after the prefill's own token. From an odd
    # one the first step accepts nothing and leaves an even token.
    odd = sum(last % 2 for last in seen["last"])
    steps = [-(-(TOKENS - 1 - last % 2) // 2) + last % 2 for last in seen["last"]]
    accepted = sum(steps) - odd
    assert seen["counters"] == {
        "num_drafts": sum(steps),
        "num_draft_tokens": 3 * sum(steps),
        "num_accepted_tokens": accepted,
        "num_accepted_tokens_per_pos": [accepted, 0, 0],
    }


def test_sampling_is_refused_instead_of_verified_wrongly(seen):
    assert "Speculation on CPU verifies greedily only" in seen["sampling"]


def test_drafting_and_capturing_other_taps_at_once(looks):
    seen = looks["random"]
    assert seen["equal"]
    assert seen["put_out"] == 6  # the drafter's 1, 4, 8 and the captured 2, 5, 7
    assert seen["worst"] < 1e-4


def test_without_the_shim_the_runner_refuses(tmp_path):
    seen = run_probe("engine", "speculation_without_its_shim", tmp_path / "models", shims=False)
    assert "AssertionError: spec decode is not supported" in seen["failure"]
    assert "The draft has 2 KV heads and the verifier 4" in seen["other_heads"]


def test_greedy_rejection_by_hand():
    import torch

    drafts, truth = torch.tensor([5, 6, 7, 1, 2, 9]), torch.tensor([5, 8, 7, 1, 2, 3])
    output = rejection_sample(drafts, [3, 2, 0, 1], 3, truth, torch.tensor([[40], [41], [42], [43]]), -1)
    assert output.tolist() == [[5, 8, -1, -1], [1, 2, 41, -1], [42, -1, -1, -1], [3, -1, -1, -1]]
