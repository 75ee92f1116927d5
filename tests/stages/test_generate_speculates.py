"""`generate.speculate`: the same greedy answers and states as without, and what vLLM counted is in the ledger.

The real engine drafts with a head trained for seconds. Its counters must be the replay's with difference 0: the plain
run answered K tokens more, so that what was drafted past the last token is known too. The same after a kill -9.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from briefly_trained_head import K, trained
from generate_in_process import context_of, prepare, prompt, run

from jobs.draft.formats import load_head, save_llama_eagle3
from jobs.draft.replay import Counts, count_sample, draft_chains
from jobs.draft.weights import VerifierWeights
from jobs.stages import baseline, generate
from jobs.storage.files import read_json
from jobs.storage.states import StateStore
from jobs.verifier.requests import Request
from jobs.verifier.tiny import CHECKPOINT

pytestmark = pytest.mark.slow
M = 40
SCRIPT = Path(__file__).with_name("generate_in_process.py")
GREEDY = {"thinking": {"temperature": 0}, "instant": {"temperature": 0}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> StateStore:
    """Answers of M + K tokens without speculation."""
    folder = prepare(
        tmp_path_factory.mktemp("plain"),
        [prompt(i, f"Explain the function number {i}.") for i in range(24)],
        generate={"max_new_tokens": M + K, **GREEDY},
    )
    context = context_of(folder)
    engine = generate.start_engine(context)
    context.run.close()
    torch.set_num_threads(1)
    timed("plain", folder, engine)
    engine.close()
    return StateStore(folder / "states/eval")


def timed(name: str, folder: Path, engine) -> dict:
    """Counts of the eval split; its processor time is printed, because the machine may be shared (`pytest -s`)."""
    warm = [Request(f"w{i}#0", [5 + i] * 8, max_tokens=8, ignore_eos=True) for i in range(8)]
    engine.run(warm, lambda finished: ())  # what a first step compiles is not what a token costs
    began = time.process_time()
    counts = run(folder, "eval", engine)
    print(f"{name}: {1000 * (time.process_time() - began) / counts['response_tokens']:.2f} ms of processor time a token")
    return counts


@pytest.fixture(scope="module")
def speculating(plain, tmp_path_factory):
    """speculating(name) -> a run directory of the prompts whose plain answer goes on to the end; the head drafts."""
    base = tmp_path_factory.mktemp("speculating")
    save_llama_eagle3(trained(plain, VerifierWeights.read(CHECKPOINT), False, (2, 5, 7)), base / "head", dtype=None)
    rows = [prompt(i, f"Explain the function number {i}.") for i in range(24)]
    going_on = [row for row in rows if len(plain.response(f"{row['id']}#0").response_token_ids) == M + K]
    assert len(going_on) >= 12

    def made(name: str, tokens: int = M) -> Path:
        heads = {"candidates": [{"name": "mine", "model": str(base / "head")}], "ngram": False}
        folder = prepare(base / name, going_on, generate={"max_new_tokens": tokens, "speculate": "mine", **GREEDY}, heads=heads)
        (folder / "locations.json").write_text(json.dumps({"verifier": str(CHECKPOINT), "heads": {"mine": str(base / "head")}}))
        return folder

    return made


@pytest.fixture(scope="module")
def engine(speculating):
    context = context_of(speculating("start"))
    made = generate.start_engine(context)
    torch.set_num_threads(1)
    yield made
    made.close()
    context.run.close()


def assert_same_answers_and_states(store: StateStore, plain: StateStore) -> None:
    for sample_id in store.ids():
        mine, other = store.read(sample_id), plain.read(sample_id)
        rows = len(mine.taps)
        assert mine.response.response_token_ids == other.response.response_token_ids[:M]
        assert rows == mine.response.tokens - 1
        for name in ("taps", "final"):
            one, two = getattr(mine, name), getattr(other, name)[:rows]
            assert ((one - two).norm(dim=-1) / two.norm(dim=-1)).max() < 1e-4, (sample_id, name)
        torch.testing.assert_close(mine.logprob, other.logprob[:rows], rtol=0, atol=1e-3, equal_nan=True)


def test_answers_and_states_are_those_without_and_the_ledgers_counters_are_the_replays(plain, speculating, engine):
    folder = speculating("run")
    counts = timed("speculating", folder, engine)
    store = StateStore(folder / "states/eval")
    assert len(store.ids()) == counts["turns"] and store.verify().problems == []
    assert_same_answers_and_states(store, plain)

    head = load_head(folder.parent / "head", verifier=VerifierWeights.read(CHECKPOINT))
    whole = Counts.zero(K)
    for sample_id in store.ids():
        sample = plain.read(sample_id, head.config.taps)
        asked, answer = sample.response.prompt_token_ids, sample.response.response_token_ids
        chains = draft_chains(head, [*asked, *answer], sample.taps, K, first_row=len(asked) - 1)
        whole = whole + count_sample(chains, asked, answer, K, stop_before=len(asked) + M).walk
    live = counts["speculation"]["mine"]
    assert 0.1 < whole.rates[2] < whole.rates[0] < 0.98, whole.rates
    assert (live["drafts"], live["draft_tokens"], live["accepted"]) == (whole.drafts, whole.draft_tokens, list(whole.accepted))
    assert live["mean"] == pytest.approx(whole.mean) and (live["answers"], live["starts"], live["taps"]) == (counts["turns"], 1, [2, 5, 7])

    context = context_of(folder)
    try:
        baseline.run(context)
    finally:
        context.run.close()
    beside = read_json(folder / "baseline.json")["heads"]["mine"]["live"]
    assert (
        beside["mean"] == live["mean"]
        and beside["replay"]["drafts"] == live["drafts"]
        and beside["replay"]["draft_tokens"] == live["draft_tokens"]
    )
    past_the_end = sum(live["accepted"]) - sum(beside["replay"]["accepted"])
    assert 0 <= past_the_end <= K * counts["turns"]


def test_a_killed_run_continues_to_the_same_answers_and_keeps_what_was_counted(plain, speculating, engine):
    folder = speculating("killed")
    path = folder / "states/eval/responses.jsonl"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), "eval"], stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    while not path.exists() or path.read_text().count("\n") < 3:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    first = path.read_text().splitlines()
    counts = run(folder, "eval", engine)
    assert path.read_text().splitlines()[: len(first)] == first
    store = StateStore(folder / "states/eval")
    assert store.verify().problems == []
    assert_same_answers_and_states(store, plain)
    entries = read_json(folder / "speculation.json")["eval"]
    assert entries[-1]["answers"] == counts["turns"] - len(first)
    assert counts["speculation"]["mine"]["starts"] == len(entries)
    assert counts["speculation"]["mine"]["drafts"] == sum(entry["drafts"] for entry in entries) > 0
