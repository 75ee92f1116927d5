"""Judging from a real state store: several heads in one pass, either reading of the taps, the same every time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_heads import H, V, small_head

from jobs.draft.drafting import draft_chains
from jobs.draft.replay import Candidate, count_sample, judge, judge_heads, standard_labels
from jobs.errors import Interrupted, MustFix
from jobs.storage.states import Response, ResponseLog, StateLayout, StateStore, StateWriter

K = 3
TAPS = (2, 3, 5, 6, 7, 8)


def answer_of(head, taps: torch.Tensor, prompt: int, generator: torch.Generator) -> list[int]:
    """Ids of which about two in three are what the head drafts from the row before: random ones nobody drafts."""
    ids = torch.randint(V, (taps.shape[0] + 1,), generator=generator).tolist()
    for row in range(prompt - 1, taps.shape[0] - 1):
        if torch.rand((), generator=generator) < 0.7:
            ids[row + 2] = draft_chains(head, ids[: row + 2], taps[: row + 1], 1)[-1, 0].item()
    return ids


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> StateStore:
    """Nine answers, some so short that nothing is drafted, written through the real writer."""
    folder = tmp_path_factory.mktemp("states")
    layout = StateLayout(TAPS, H, "float32", "random", "0" * 40, "0" * 64)
    generator = torch.Generator().manual_seed(0)
    writer = StateWriter(folder, layout, extent_rows=8)
    answers = []
    for number in range(9):
        prompt, response = 3 + number, [1, 2, 9, 17, 30, 5, 26, 33, 40][number]
        rows = prompt + response - 1
        taps = torch.randn(rows, 6, H, generator=generator)
        ids = answer_of(small_head(1), taps[:, [0, 2, 4]], prompt, generator)
        sample = f"p{number // 2}#{number % 2}"
        writer.append(sample, 0, taps, torch.randn(rows, H, generator=generator), torch.zeros(rows))
        writer.finish(sample, len(ids))
        answers.append(Response(sample, ids[:prompt], ids[prompt:], "stop", {}, "chat" if number % 2 else "code", False))
    writer.sync()
    writer.close()
    with ResponseLog(folder) as log:
        for answer in answers:
            log.append(answer)
    return StateStore(folder)


def test_it_is_draft_and_count_of_every_sample(store):
    head = small_head(1)
    judged = judge(head, store, store.ids(), K, labels=standard_labels)
    assert list(judged.samples) == store.ids() and judged.walk.steps > 0
    for sample_id in store.ids():
        sample = store.read(sample_id, head.config.taps)
        prompt, response = sample.response.prompt_token_ids, sample.response.response_token_ids
        chains = draft_chains(head, [*prompt, *response], sample.taps, K)[len(prompt) - 1 :]
        assert judged.samples[sample_id] == count_sample(chains, prompt, response, K, labels=standard_labels(sample.response))
        assert judged.samples[sample_id].walk.tokens == len(response) - 1


def test_several_heads_and_both_readings_in_one_pass_equal_one_by_one(store):
    one, two = small_head(1), small_head(2, norm_before_residual=True)
    candidates = {"one": Candidate(one, (2, 5, 7)), "one, read as outputs": Candidate(one, (3, 6, 8)), "two": Candidate(two, (2, 5, 7))}
    together = judge_heads(candidates, store, store.ids(), K)
    for name, candidate in candidates.items():
        assert together[name] == judge(candidate.head, store, store.ids(), K, name=name, taps=candidate.taps)
    best = together["one"].mean_acceptance_length
    assert best > 1.5 > max(together[name].mean_acceptance_length for name in ("one, read as outputs", "two"))


def test_the_states_are_read_once_whatever_the_number_of_heads(store, monkeypatch):
    """57 KB a token is what a judgement takes its time for: one read an answer, of the taps that any head wants."""
    read, asked = store.read, []
    monkeypatch.setattr(store, "read", lambda sample, taps: asked.append((sample, tuple(taps))) or read(sample, taps))
    candidates = {f"head {seed}": Candidate(small_head(seed), taps) for seed, taps in enumerate([(2, 5, 7), (3, 6, 8), (2, 5, 7)])}
    judge_heads(candidates, store, store.ids(), K)
    assert asked == [(sample, TAPS) for sample in sorted(store.ids())]
    asked.clear()
    judge(small_head(0), store, store.ids(), K)
    assert asked == [(sample, (2, 5, 7)) for sample in sorted(store.ids())], "and of one head no tap that it does not read"


def test_twice_and_in_any_order_it_is_identical(store):
    head = small_head(3)
    seen = []
    first = judge(head, store, store.ids(), K, progress=lambda done, total: seen.append((done, total)))
    again = judge(head, store, list(reversed(store.ids())) + store.ids()[:2], K)
    assert first.as_dict() == again.as_dict()
    assert seen == [(i + 1, 9) for i in range(9)]


def test_a_head_that_was_told_the_answer_reaches_the_most(store):
    """A drafted chain that equals the answer counts K+1 a step in the store's own answers, truncation included."""
    sample = store.response("p4#0")
    truth = np.array([*sample.prompt_token_ids, *sample.response_token_ids, *[-9] * K])
    first = len(sample.prompt_token_ids) - 1
    chains = np.stack([truth[r + 2 : r + 2 + K] for r in range(first, first + len(sample.response_token_ids))])
    counts = count_sample(chains, sample.prompt_token_ids, sample.response_token_ids, K).walk
    assert (counts.steps, counts.tokens) == (10, 39)


def test_stopping_misfits_and_emptiness_are_sentences(store):
    head = small_head(1)
    with pytest.raises(Interrupted, match="after 0 of 9"):
        judge(head, store, store.ids(), K, should_stop=lambda: True)
    with pytest.raises(MustFix, match=r"reads taps \[2, 4, 7\] and the states hold"):
        judge(head, store, store.ids(), K, taps=(2, 4, 7))
    with pytest.raises(MustFix, match="no answer of two tokens or more"):
        judge(head, store, ["p0#0"], K)
    other = type("Store", (), {"layout": replace(store.layout, hidden_size=H + 1)})()
    with pytest.raises(MustFix, match="is 32 wide and the states are 33"):
        judge(head, other, [], K)
