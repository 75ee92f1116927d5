"""Whatever the order in which answers arrive, a token budget commits the same prefix, as early as is certain, and at a cost that does not grow.

The reference sums all conversations anew for each of them, after every answer.
"""

import hashlib
import itertools
import json
import os
import random
import sys
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

import pytest
from arrivals import Arrivals
from generate_in_process import SMALL, context_of, prepare, prompt, run

from jobs.errors import Interrupted
from jobs.stages import answering, budget, gate, generate, judging
from jobs.stages.conversations import Conversation, read_conversations
from jobs.storage.responses import Response, ResponseLog, scan_responses
from jobs.verifier.chat import Chat

CONVERSATIONS = 10_000
LONGEST, LONGEST_ANSWER = SMALL["verifier"]["max_model_len"], 100


def rows_of(rng: random.Random, conversations: int) -> list[dict]:
    """One to four turns each, in both modes; some prompts leave no room for an answer, at once or in a later turn."""
    turns = [" ".join(["word"] * rng.choice((1, 3, 9, 9, 30, 90))) for _ in range(4 * conversations)]
    return [
        prompt(i, *turns[4 * i : 4 * i + rng.choice((1, 1, 2, 4))], split="train", thinking=rng.random() < 0.5)
        for i in range(conversations)
    ]


def committed(folder: Path) -> dict:
    path = folder / "states/train/responses.jsonl"
    return {response.id: response for _, _, response in scan_responses(path)} if path.exists() else {}


def before(conversations: list[Conversation], place: int, bound) -> int:
    return sum(bound(c) for c in conversations[:place])


def least(c: Conversation) -> int:
    return c.tokens


def most(c: Conversation) -> int:
    open_turns = 0 if c.finished else len(c.turns) - len(c.answers)
    turns = [LONGEST] * open_turns
    if open_turns and c.running_tokens:
        turns[0] = min(LONGEST, c.running_tokens + LONGEST_ANSWER)
    return c.tokens + sum(turns)


class Reference:
    """Compared with after every answer: both ends of what is known of the prefix, and what is committed by now."""

    def __init__(self, engine: Arrivals, limit: int, earlier: set[str]):
        self.engine, self.limit, self.earlier, self.held = engine, limit, earlier, 0

    def __call__(self, work: answering.Answering) -> None:
        conversations = work.conversations
        certain = [c for c in conversations if before(conversations, c.order, most) < self.limit]
        possible = [c for c in conversations if before(conversations, c.order, least) < self.limit]
        assert (work.budget.certain, work.budget.possible) == (len(certain), len(possible))
        assert work.budget.certain <= work.budget.likely <= work.budget.possible
        whole = {finished.request.id for finished in self.engine.handed_out if not finished.dropped}
        belong = {sample for sample in whole if sample.rpartition("#")[0] in {c.id for c in certain}}
        assert work.log.ids() == self.earlier | belong
        assert not {c.id for c in possible} & {sample.rpartition("#")[0] for sample in self.engine.discarded}
        self.held = max(self.held, len(whole) - len(belong))


def prefix(whole: dict, order: list[Conversation], limit: int) -> dict:
    expected, total = {}, 0
    for conversation in order:
        if total < limit:
            mine = {i: r for i, r in whole.items() if i.rpartition("#")[0] == conversation.id}
            expected |= mine
            total += sum(response.tokens for response in mine.values())
    return expected


@pytest.mark.parametrize("seed", (0, 2, 5, 9))
def test_what_is_committed_is_what_summing_anew_commits(tmp_path, seed):
    """Multi-turn conversations, prompts that do not fit, lost states, and a run that is stopped and continued in another order."""
    rng = random.Random(seed)
    rows, lossy = rows_of(rng, 40), (0, 0.1)[seed % 2]
    generation = {"max_new_tokens": LONGEST_ANSWER, "max_dropped_share": 1.0}
    everything = prepare(tmp_path / "all", rows, generate=generation)

    def lost(sample: str) -> bool:
        return random.Random(f"lost {sample}").random() < lossy

    run(everything, "train", Arrivals(seed, 8, lost=lost))
    whole, order = committed(everything), read_conversations(everything / "prompts.jsonl", "train", 3)
    tokens = sum(response.tokens for response in whole.values())
    held = 0
    for limit in (1, tokens // 7, tokens // 2, tokens - 1, tokens):
        limited = prepare(tmp_path / str(limit), rows, generate=generation | {"train_token_budget": limit})
        for stop_after in (rng.randrange(10, 40), None):
            engine = Arrivals(rng.randrange(10**6), rng.choice((3, 8, 40)), lost=lost, stop_after=stop_after)
            engine.watch = reference = Reference(engine, limit, set(committed(limited)))
            try:
                counts = run(limited, "train", engine)
            except Interrupted:
                assert committed(limited).items() <= whole.items()
            held = max(held, reference.held)
        assert committed(limited) == prefix(whole, order, limit)
        assert counts["turns"] == len(committed(limited)) and counts["asked"] == counts["turns"] + sum(counts["dropped"].values())
    assert held > 5


class Lines:
    """Lines of Python that the budget and the commit take; `places` is how many after each answer, `held` how many answers wait then."""

    def __init__(self):
        self.count, self.places, self.held = 0, [], []

    def trace(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename != budget.__file__ and code is not answering.Answering._commit_what_is_certain.__code__:
            return None
        self.count += event == "line"
        return self.trace

    def __call__(self, work: answering.Answering) -> None:
        self.places.append(self.count)
        self.held.append(len(work.engine.handed_out) - len(work.log))


@pytest.mark.slow
def test_an_answer_costs_the_same_with_a_thousand_others_held(tmp_path, monkeypatch):
    """10,000 conversations; one look at every answer that is held would be a thousand lines, and one sum for each millions."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # 7,000 times the disk, which this does not measure
    monkeypatch.setattr(Chat, "render", lambda self, messages, thinking: [5] * (10 + 20 * len(messages)))
    rng = random.Random(1)
    rows = [prompt(i, *["Say something"] * rng.choice((1, 1, 1, 3)), split="train") for i in range(CONVERSATIONS)]
    folder = prepare(tmp_path / "run", rows, generate={"max_new_tokens": 100, "train_token_budget": 35 * CONVERSATIONS})
    engine = Arrivals(1, CONVERSATIONS // 10)
    engine.watch = lines = Lines()
    sys.settrace(lines.trace)
    try:
        counts = run(folder, "train", engine)
    finally:
        sys.settrace(None)
    assert counts["beyond_budget"] > CONVERSATIONS / 4
    taken = [(held, after - before) for held, (before, after) in zip(lines.held[1:], itertools.pairwise(lines.places), strict=True)]
    few, many = ([count for held, count in taken if low <= held < high] for low, high in ((1, 50), (1000, CONVERSATIONS)))
    assert len(few) > 100 and len(many) > 100
    assert mean(many) < 2 * mean(few) < 400, (mean(few), mean(many))


def answered(folder: Path) -> list[str]:
    return [json.loads(line)["id"] for line in (folder / "states/train/responses.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("exist", [False, True], ids=["generated", "existing"])
def test_a_trial_takes_the_first_of_the_seeded_order_and_the_run_goes_on_behind_them(exist, tmp_path, monkeypatch):
    """Whichever answers arrive first; 5 % of 60 are 3. What the trial says of them is asked elsewhere."""
    rows = [prompt(i, f"question {i}", split="train") for i in range(60)]
    generation = {"responses": str(tmp_path / "given")} if exist else {}
    folder = prepare(tmp_path / "run", rows, generate=generation, gate={"min_gain": 0.1})
    if exist:
        with ResponseLog(tmp_path / "given" / "train") as log:
            for row in rows:
                log.append(Response(f"{row['id']}#0", [5, 6, 7], [8, 9], "stop", {}, "test", False))
    order = sorted((f"{row['id']}{'#0' if exist else ''}" for row in rows), key=lambda i: hashlib.sha256(f"3:{i}".encode()).digest())
    first = {f"{i.partition('#')[0]}#0" for i in order[:3]}
    monkeypatch.setattr(gate, "_train_and_judge", lambda _: SimpleNamespace(name="trial"))
    monkeypatch.setattr(judging, "keep", lambda *_: None)
    monkeypatch.setattr(judging, "kept", lambda _, name: name)
    monkeypatch.setattr(judging, "gain", lambda _, judged, other: {"of": judged.name, "over": other})
    engine = Arrivals(seed=1, places=8)
    context = context_of(folder, engine)
    try:
        assert gate.trial_gain(context, gate.Best("ngram", 2.5)) == {"of": "trial", "over": "ngram"}
        begun = answered(folder)
        assert set(begun) == first and len(begun) == 3
        generate.run_split(context, "train")
        assert answered(folder)[:3] == begun and sorted(answered(folder)) == sorted(f"{row['id']}#0" for row in rows)
        assert len(engine.handed_out) == len(rows), "nothing is answered twice"
    finally:
        context.run.close()
