"""The walk is the live process: compared, draft by draft, with a speculating loop written out plainly."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.draft.acceptance import accepted_lengths
from jobs.draft.replay import Judgement, count_sample, judge_chains, standard_labels, walk
from jobs.errors import MustFix
from jobs.storage.responses import Response

K = 3


def speculate(chains, prompt, truth, draft_tokens, stop_before=None):
    """Decode by speculation, one token at a time, with a verifier that says `truth`.

    Returns the emitted tokens and (drafts tried, drafts accepted) of each step. Written from what the
    engine does, not from `walk`: a list of known tokens grows and the proposer is asked for its last row.
    """
    known, steps = [*prompt, truth[len(prompt)]], []  # the first token comes from prefill, without drafts
    end = len(truth) if stop_before is None else stop_before
    while len(known) < end:
        drafts = [d for d in chains[len(known) - len(prompt) - 1][:draft_tokens] if d >= 0]
        tried = accepted = 0
        for draft in drafts:
            if len(known) == len(truth):
                break
            tried += 1
            if draft != truth[len(known)]:
                break
            known.append(draft)
            accepted += 1
        if len(known) < len(truth):
            known.append(truth[len(known)])  # the bonus token
        steps.append((tried, accepted))
    return known, steps


@st.composite
def cases(draw):
    prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    response = draw(st.lists(st.integers(0, 2), min_size=1, max_size=14))
    rows = len(response)
    chains = draw(st.lists(st.lists(st.integers(0, 2), min_size=K, max_size=K), min_size=rows, max_size=rows))
    cut = draw(st.lists(st.integers(0, K), min_size=rows, max_size=rows))  # n-gram: fewer than K, or none
    whole = draw(st.booleans())
    return prompt, response, [chain if whole else chain[:c] + [-1] * (K - c) for chain, c in zip(chains, cut, strict=True)]


@settings(max_examples=400, deadline=None)
@given(cases())
def test_every_step_is_the_live_one(case):
    prompt, response, chains = case
    known, steps = speculate(chains, prompt, [*prompt, *response], K)
    assert known == [*prompt, *response]  # speculation changes nothing
    assert walk(np.array(chains), [*prompt, *response], len(prompt) - 1, K) == [a for _, a in steps]
    counts = count_sample(np.array(chains), prompt, response, K).walk
    assert counts.steps == len(steps)
    assert counts.tokens == len(response) - 1  # all but the one from prefill
    assert counts.tried == tuple(sum(tried > j for tried, _ in steps) for j in range(K))
    assert counts.accepted == tuple(sum(a > j for _, a in steps) for j in range(K))
    assert counts.histogram == [sum(a == n for _, a in steps) for n in range(K + 1)]
    assert counts.drafts == counts.tried[0]


@settings(max_examples=200, deadline=None)
@given(cases(), st.integers(1, 8))
def test_the_engines_form_counts_whole_steps_that_start_before_the_limit(case, generated):
    prompt, response, chains = case
    response, chains = [*response, *[0] * (generated + K)], [*chains, *[[0] * K] * (generated + K)]
    stop = len(prompt) + generated
    _, steps = speculate(chains, prompt, [*prompt, *response], K, stop)
    assert walk(np.array(chains), [*prompt, *response], len(prompt) - 1, K, stop) == [a for _, a in steps]
    counts = count_sample(np.array(chains), prompt, response, K, stop_before=stop).walk
    assert counts.tokens == sum(a + 1 for _, a in steps) >= generated - 1
    assert counts.draft_tokens == sum(sum(d >= 0 for d in chains[r]) for r in _starts(steps))
    with pytest.raises(ValueError, match="do not reach"):
        walk(np.array(chains), [*prompt, *response][: stop + K - 2], len(prompt) - 1, K, stop)


def _starts(steps):
    row = 0
    for _, accepted in steps:
        yield row
        row += accepted + 1


@settings(max_examples=200, deadline=None)
@given(cases())
def test_all_positions_counts_every_row_with_k_tokens_after_it(case):
    prompt, response, chains = case
    counts = count_sample(np.array(chains), prompt, response, K).every
    truth = [*prompt, *response]
    expected = []
    for row in range(len(prompt) - 1, len(truth) - 1):
        following = truth[row + 2 : row + 2 + K]
        if len(following) == K:
            chain = chains[row - len(prompt) + 1]
            expected.append(next((j for j in range(K) if chain[j] != following[j]), K))
    assert counts.steps == len(expected) and counts.tokens == sum(expected) + len(expected)
    assert counts.accepted == tuple(sum(a > j for a in expected) for j in range(K))


@settings(max_examples=100, deadline=None)
@given(cases(), st.data())
def test_groups_split_the_walk_and_nothing_else(case, data):
    prompt, response, chains = case
    labels = data.draw(st.lists(st.sampled_from("ab"), min_size=len(prompt) + len(response), max_size=len(prompt) + len(response)))
    counted = count_sample(np.array(chains), prompt, response, K, labels={"half": labels, "source": "s"})
    for dimension in ("half", "source"):
        parts = list(counted.groups[dimension].values())
        if parts:
            assert sum(parts[1:], parts[0]) == counted.walk
        else:
            assert counted.walk.steps == 0


def test_a_perfect_head_reaches_k_plus_1_and_a_useless_one_1():
    prompt, response = [1, 2], list(range(3, 3 + 1 + 4 * 10))
    truth = np.array([*prompt, *response, *[-9] * K])
    perfect = np.stack([truth[r + 2 : r + 2 + K] for r in range(1, 1 + len(response))])
    assert count_sample(perfect, prompt, response, K).walk.mean == 4.0
    useless = count_sample(np.zeros_like(perfect), prompt, response, K).walk
    assert useless.mean == 1.0 and useless.rates == [0.0] * K and useless.steps == len(response) - 1


def test_lengths_stop_at_the_first_wrong_draft_and_at_the_end():
    chains = np.array([[1, 9, 3], [2, 3, 4], [3, 4, 5], [9, 9, 9]])
    assert accepted_lengths(chains, [0, 0, 1, 2, 3, 4], 0).tolist() == [1, 3, 2, 0]


def response(sample: str, prompt: list[int], answer: list[int]) -> Response:
    return Response(sample, prompt, answer, "stop", {}, "code", True)


def test_a_judgement_survives_json_and_its_summary_has_every_figure():
    answers = [response("b#0", [5], [1, 2, 1, 2, 1]), response("a#0", [5, 6], [2, 2, 2])]
    chains = [np.array([[2, 1, 9]] * 5), np.array([[2, -1, -1]] * 3)]
    label = lambda answer: standard_labels(answer, range(1, 3))  # noqa: E731
    judged = judge_chains("ngram", zip(answers, chains, strict=True), K, labels=label)
    text = json.dumps(judged.as_dict(), allow_nan=False)
    assert Judgement.from_dict(json.loads(text)) == judged
    assert list(judged.samples) == ["a#0", "b#0"]
    summary = judged.summary()
    # b: 1 [2 1 | 2] [1], a: 2 [2]: 3 steps, 6 tokens of which the last of each step is the bonus where one is left
    assert summary["mean_acceptance_length"] == judged.walk.tokens / judged.walk.steps == 6 / 3
    assert summary["histogram"] == [1, 1, 1, 0] and summary["rates"] == [2 / 3, 1 / 3, 0.0]
    # Three steps verified a first draft and two took it; the only one that got to a second took that, and lost its third.
    assert (judged.walk.tried, judged.walk.accepted) == ((3, 1, 1), (2, 1, 0))
    assert summary["conditional_rates"] == judged.walk.conditional_rates == [2 / 3, 1.0, 0.0]
    assert set(summary["groups"]) == {"source", "position", "thinking"}
    assert summary["groups"]["source"]["code"]["steps"] == 3


def test_labels_name_thinking_and_place():
    answer = response("a#0", [1] * 4, [2] * 300)
    labels = standard_labels(answer, range(4, 10))
    assert labels["thinking"][3:11] == ["outside", *["inside"] * 6, "outside"]
    assert labels["position"][0] == labels["position"][4 + 255] == "0-255" and labels["position"][4 + 256] == "256-1023"
    assert set(standard_labels(answer)["thinking"]) == {"outside"}


def test_a_long_answer_is_told_apart_by_the_places_it_reaches():
    tokens = 20_000
    labels = standard_labels(response("a#0", [1] * 4, [2] * tokens))["position"]
    place = dict.fromkeys(labels[4:])
    assert list(place) == ["0-255", "256-1023", "1024-4095", "4096-16383", "16384+"]
    assert {name: labels[4:].count(name) for name in place} == dict(zip(place, (256, 768, 3072, 12_288, tokens - 16_384), strict=True))
    for first in (256, 1024, 4096, 16_384):
        assert labels[4 + first].startswith(str(first)) and labels[4 + first - 1] != labels[4 + first], "it begins where its name says"
    # A step is counted where its first token stands: with every draft wrong, one step a token but for the one from prefill.
    counted = count_sample(np.zeros((tokens, K)), [1] * 4, [2] * tokens, K, labels={"position": labels})
    steps = {name: counts.steps for name, counts in counted.groups["position"].items()}
    assert steps == {"0-255": 255, "256-1023": 768, "1024-4095": 3072, "4096-16383": 12_288, "16384+": 3616}


def test_nothing_to_judge_on_is_refused():
    with pytest.raises(MustFix, match="no answer of two tokens or more to judge ngram on"):
        judge_chains("ngram", [(response("a#0", [1], [2]), np.zeros((1, K)))], K)
