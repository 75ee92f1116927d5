"""The generate stage answers conversations turn by turn, within its budget, and repeats nothing."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time

import pytest
import torch
from generate_in_process import SMALL, context_of, prepare, prompt, run, settings_with, small_engine

from jobs.errors import Interrupted, MustFix
from jobs.reporting.figures import dropped_of
from jobs.stages import generate
from jobs.stages.conversations import read_conversations
from jobs.storage.states import Response, ResponseLog, StateStore, StateWriter
from jobs.verifier import capture, fit, state_thread
from jobs.verifier.chat import Chat
from jobs.verifier.parallel import parallel
from jobs.verifier.state_thread import StoreThread
from jobs.verifier.tiny import CHECKPOINT

QUESTIONS = [f"What does the function number {i} return?" for i in range(40)]


@pytest.fixture(scope="module")
def engine():
    with small_engine() as made:
        yield made


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat.load(CHECKPOINT)


def responses(folder, split="eval"):
    store = StateStore(folder / "states" / split)
    return {sample_id: store.response(sample_id) for sample_id in store.ids()}


def test_eval_keeps_both_readings_and_train_the_three_taps(engine, tmp_path):
    rows = [prompt(i, QUESTIONS[i], split="eval" if i < 3 else "train") for i in range(8)]
    folder = prepare(tmp_path / "run", rows)
    counts = run(folder, "eval", engine)
    assert (counts["prompts"], counts["asked"], counts["turns"], counts["dropped"]) == (3, 3, 3, {})
    assert StateStore(folder / "states/eval").layout.taps == (2, 3, 5, 6, 7, 8)
    assert run(folder, "train", engine)["turns"] == 5
    store = StateStore(folder / "states/train")
    assert store.layout.taps == (2, 5, 7)
    assert store.verify().rows == sum(store.response(i).rows for i in store.ids())


def test_train_states_can_be_fp8_and_eval_states_never_are(engine, tmp_path):
    rows = [prompt(i, QUESTIONS[i], split="eval" if i < 2 else "train") for i in range(5)]
    plain, small = prepare(tmp_path / "plain", rows), prepare(tmp_path / "small", rows, states={"dtype": "fp8", "shard_mib": 4})
    for folder in (plain, small):
        run(folder, "eval", engine)
        run(folder, "train", engine)
    assert StateStore(small / "states/eval").layout.dtype == "float32"
    exact, stored = StateStore(plain / "states/train"), StateStore(small / "states/train")
    assert stored.layout.dtype == "float8_e4m3fn" and stored.ids() == exact.ids()
    for sample_id in exact.ids():
        a, b = exact.read(sample_id), stored.read(sample_id)
        assert 0 < ((a.taps - b.taps.float()).norm(dim=-1) / a.taps.norm(dim=-1)).max() < 0.05


def test_every_turn_sees_the_verifiers_own_earlier_answers(engine, chat, tmp_path):
    """The second prompt holds the first answer as the template renders it: its thinking is gone."""
    rows = [prompt(1, "Hello there", "And then?", "Why?", thinking=True), prompt(2, "Just one", thinking=False)]
    folder = prepare(tmp_path / "run", rows)
    assert run(folder, "eval", engine)["turns"] == 4
    made = responses(folder)
    assert sorted(made) == ["p001#0", "p001#1", "p001#2", "p002#0"]
    messages = []
    for turn, said in enumerate(["Hello there", "And then?", "Why?"]):
        messages.append({"role": "user", "content": said})
        response = made[f"p001#{turn}"]
        assert response.prompt_token_ids == chat.render(messages, True)
        assert response.thinking and response.sampling["temperature"] == 1.0
        messages.append(chat.assistant_message(response.response_token_ids, True))
    assert made["p002#0"].prompt_token_ids == chat.render([{"role": "user", "content": "Just one"}], False)
    assert made["p002#0"].sampling["temperature"] == 0.6


def test_answers_depend_on_seed_and_id_alone(engine, tmp_path):
    rows = [prompt(i, QUESTIONS[i]) for i in range(12)]
    first, second = prepare(tmp_path / "a", rows), prepare(tmp_path / "b", rows[::-1])
    third = prepare(tmp_path / "c", rows[:5])
    other = prepare(tmp_path / "d", rows, job={"seed": 4})
    for folder in (first, second, third, other):
        run(folder, "eval", engine)
    assert responses(first) == responses(second)
    assert {k: v for k, v in responses(first).items() if k in responses(third)} == responses(third)
    assert responses(first) != responses(other)


def test_the_engine_is_full_until_nothing_is_left_to_give_it(engine, tmp_path, monkeypatch):
    """Every step decodes as many requests as there are places, as long as one more could have been given."""
    places, rows = SMALL["verifier"]["max_num_seqs"], [prompt(i, QUESTIONS[i], *(["More?"] if i % 4 == 0 else [])) for i in range(40)]
    given, seen = [], []
    add, step = engine._add, engine._step
    monkeypatch.setattr(engine, "_add", lambda request: (given.append(request.id), add(request))[1])
    monkeypatch.setattr(engine, "_step", lambda: (seen.append((len(given), len(engine._running))), step())[1])
    counts = run(prepare(tmp_path / "run", rows), "eval", engine)
    assert len(given) == counts["turns"] == 50
    before_the_last = [running for so_far, running in seen if so_far < 50]
    assert len(before_the_last) > 20 and min(before_the_last) >= places


def test_a_token_budget_takes_a_prefix_in_seeded_order(engine, tmp_path):
    rows = [prompt(i, QUESTIONS[i], *(["More?"] if i % 3 == 0 else []), split="train") for i in range(20)]
    everything = prepare(tmp_path / "all", rows)
    run(everything, "train", engine)
    whole = responses(everything, "train")
    order = read_conversations(everything / "prompts.jsonl", "train", 3)
    for budget in (1, 300, 1000, 10**9):
        limited = prepare(tmp_path / str(budget), rows[::-1], generate={"max_new_tokens": 24, "train_token_budget": budget})
        counts = run(limited, "train", engine)
        expected, total = {}, 0
        for conversation in order:
            if total < budget:
                mine = {i: r for i, r in whole.items() if i.startswith(conversation.id + "#")}
                expected |= mine
                total += sum(response.tokens for response in mine.values())
        assert responses(limited, "train") == expected
        assert counts["tokens"] == total and counts["prompts"] + counts["beyond_budget"] == 20


def test_a_second_run_does_nothing_and_needs_no_engine(engine, tmp_path):
    folder = prepare(tmp_path / "run", [prompt(i, QUESTIONS[i], "Again?") for i in range(4)])
    first = run(folder, "eval", engine)
    before = (folder / "states/eval/responses.jsonl").read_bytes()

    class NoEngine:
        def __getattr__(self, name):
            raise AssertionError("a finished split must not ask for the verifier")

    second = run(folder, "eval", NoEngine())
    assert (folder / "states/eval/responses.jsonl").read_bytes() == before
    assert second["turns"] == first["turns"] == 8 and second["rows"] == first["rows"]


def test_what_does_not_fit_is_dropped_and_counted_and_too_much_of_it_stops(engine, tmp_path):
    rows = [prompt(i, QUESTIONS[i]) for i in range(5)] + [prompt(9, "word " * 400, "and more")]
    folder = prepare(tmp_path / "run", rows, generate={"max_dropped_share": 0.5})
    counts = run(folder, "eval", engine)
    assert (counts["asked"], counts["turns"], counts["dropped"]) == (7, 5, {"prompt_too_long": 2})
    strict = prepare(tmp_path / "strict", rows)
    with pytest.raises(MustFix, match="max_dropped_share"):
        run(strict, "eval", engine)
    with pytest.raises(MustFix, match="no response"):
        run(prepare(tmp_path / "empty", []), "eval", engine)


def test_an_answer_that_goes_round_in_circles_is_stopped_as_it_is_set(engine, tmp_path):
    """Greedy, the tiny verifier loops sooner or later. What ended as a repetition is one, and stands in the counts."""
    rows = [prompt(i, QUESTIONS[i]) for i in range(8)]
    greedy = {"thinking": {"temperature": 0}, "instant": {"temperature": 0}}
    folder = prepare(tmp_path / "run", rows, generate={"max_new_tokens": 150, "stop_on_repetition": 24, **greedy})
    ended = run(folder, "eval", engine)["ended"]
    looped = [response.response_token_ids for response in responses(folder).values() if response.finish_reason == "repetition"]
    assert ended.get("repetition") == len(looped) > 0, ended
    for ids in looped:  # the last 24 tokens are one piece of 1, 2 or 3, again and again
        assert len(ids) < 150 and any(ids[-24:][piece:] == ids[-24:-piece] for piece in (1, 2, 3))


def test_how_the_verifier_is_spread_and_why_is_told_to_the_person_and_the_record(tmp_path, monkeypatch, capsys):
    """The engine is not started, but what is chosen for it is chosen by the rules, as on two GPUs of 141 GB."""

    class NotStarted:
        def __init__(self, model, settings, **given):
            self.parallel = parallel(model, settings)

    monkeypatch.setattr(generate, "VerifierEngine", NotStarted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fit, "device_bytes", lambda: 141 * 10**9)
    told = {}
    for gpus in (1, 2):
        folder = prepare(tmp_path / str(gpus), [])
        context = context_of(folder)
        context.settings = settings_with({"verifier": {"tensor_parallel_size": gpus}})
        generate.start_engine(context)
        context.run.close()
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        told[gpus] = [event["text"] for event in events if event["kind"] == "note"]
        shown = " ".join(capsys.readouterr().err.split())
        assert all(text in shown for text in told[gpus]), shown
    assert told[1] == [], "with one GPU there is nothing to choose"
    chosen, instead = told[2]
    assert chosen.startswith("verifier.parallel = auto is tp: 2.0 tokens an expert at 8 requests would leave GPUs waiting"), told
    assert 'million tokens, 8 requests have 0.0 at most; "dp_ep" would hold' in instead, told


def test_existing_responses_are_prefilled(engine, tmp_path):
    folder = prepare(tmp_path / "run", [prompt(i, QUESTIONS[i], "More?") for i in range(6)])
    run(folder, "eval", engine)
    again = prepare(tmp_path / "again", [], generate={"responses": str(folder / "states")})
    counts = run(again, "eval", engine)
    assert counts["turns"] == 12
    assert responses(again) == responses(folder)
    made, given = StateStore(again / "states/eval"), StateStore(folder / "states/eval")
    for sample_id in given.ids():
        a, b = made.read(sample_id), given.read(sample_id)
        assert ((a.taps - b.taps).norm(dim=-1) / b.taps.norm(dim=-1)).max() < 1e-4
        known = ~b.logprob.isnan()
        assert not a.logprob.isnan().any()
        torch.testing.assert_close(a.logprob[known], b.logprob[known], rtol=0, atol=1e-3)


def test_existing_responses_that_overlap_with_a_standard_prompt_are_not_trained_on(engine, chat, tmp_path):
    """Of either kind: a set of this run's prompts, and one that was answered beside the responses."""
    folder = tmp_path / "answers"
    words = lambda first, last: " ".join(f"w{i}" for i in range(first, last))  # noqa: E731

    def answer(sample: str, *said: str) -> Response:
        turns = [{"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)]
        return Response(sample, chat.render(turns, False), [5, 6, 7], "stop", {}, "test", False)

    train = [
        answer("plain#0", "An ordinary question."), answer("answered#0", "Tell me more.", "What is seven times six? Easy.", "And then?"),
        answer("late#0", "An opening of its own."), answer("late#1", "An opening of its own.", "Yes.", f"Solve:  {words(3, 16).upper()}!"),
        answer("inside#0", f"Please {words(100, 113)} now."), answer("alike#0", words(3, 15)), answer("short#0", "what is seven TIMES six"),
    ]  # fmt: skip
    for split, made in (("eval", [answer("e#0", "Judge this."), answer("std.mine.1#0", words(100, 120))]), ("train", train)):
        (folder / split).mkdir(parents=True)
        with ResponseLog(folder / split) as log:
            for each in made:
                log.append(each)
    sets = [prompt(0, words(0, 20)) | {"id": "std.gsm8k.0"}, prompt(1, "What is seven times six?") | {"id": "std.gsm8k.1"}]
    counts = run(prepare(tmp_path / "run", sets, generate={"responses": str(folder)}), "train", engine)
    assert set(responses(tmp_path / "run", "train")) == {"plain#0", "answered#0", "alike#0"}
    assert counts["in_standard_too"] == 3 and counts["turns"] == counts["asked"] == 3 and counts["dropped"] == {}
    assert dropped_of(counts) == {"in standard too": 3}, "it stands in the report"
    run(prepare(tmp_path / "run2", sets, generate={"responses": str(folder)}), "eval", engine)
    assert set(responses(tmp_path / "run2")) == {"e#0", "std.mine.1#0"}, "they are judged"
    alone = run(prepare(tmp_path / "run3", [], generate={"responses": str(folder), "train_token_budget": 1}), "train", engine)
    assert alone["in_standard_too"] == 1 and alone["turns"] == 1


def test_responses_of_another_verifier_are_refused(engine, tmp_path):
    folder = prepare(tmp_path / "run", [prompt(i, QUESTIONS[i]) for i in range(2)])
    run(folder, "eval", engine)
    for key, message in (("verifier_revision", "another verifier"), ("tokenizer_sha256", "another tokenizer")):
        foreign = tmp_path / key
        shutil.copytree(folder / "states", foreign)
        store = json.loads((foreign / "eval/store.json").read_text())
        (foreign / "eval/store.json").write_text(json.dumps(store | {key: "f" * 64}))
        with pytest.raises(MustFix, match=message):
            run(prepare(tmp_path / f"{key}-run", [], generate={"responses": str(foreign)}), "eval", engine)
    stranger = tmp_path / "ids" / "eval"
    stranger.mkdir(parents=True)
    line = json.loads((folder / "states/eval/responses.jsonl").read_text().splitlines()[0]) | {"response_token_ids": [10**6]}
    (stranger / "responses.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(MustFix, match="token 1000000"):
        run(prepare(tmp_path / "ids-run", [], generate={"responses": str(stranger.parent)}), "eval", engine)


def test_an_empty_log_of_responses_is_an_error(engine, tmp_path):
    (tmp_path / "none" / "eval").mkdir(parents=True)
    ResponseLog(tmp_path / "none" / "eval").close()
    with pytest.raises(MustFix, match="no response"):
        run(prepare(tmp_path / "run", [], generate={"responses": str(tmp_path / "none")}), "eval", engine)
    with pytest.raises(MustFix, match="no responses"):
        run(prepare(tmp_path / "other", [], generate={"responses": str(tmp_path / "nowhere")}), "eval", engine)


def test_a_stop_keeps_what_is_finished(engine, tmp_path):
    rows = [prompt(i, QUESTIONS[i], "More?") for i in range(12)]
    unbroken, stopped = prepare(tmp_path / "unbroken", rows), prepare(tmp_path / "stopped", rows)
    run(unbroken, "eval", engine)
    context = context_of(stopped, engine)
    log = stopped / "states/eval/responses.jsonl"

    def terminate() -> None:
        while not log.exists() or len(log.read_bytes().splitlines()) < 5:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    context.should_stop.install()
    try:
        threading.Thread(target=terminate, daemon=True).start()
        with pytest.raises(Interrupted):
            generate.stage("eval").run(context)
    finally:
        context.should_stop.restore()
        context.run.close()
    kept = log.read_bytes()
    assert 5 <= len(kept.splitlines()) < 24
    assert run(stopped, "eval", engine)["turns"] == 24
    assert log.read_bytes().startswith(kept)
    assert responses(stopped) == responses(unbroken)


@pytest.mark.parametrize("behind", ["disk", "processor"])
def test_what_slows_the_verifier_down_is_said(engine, tmp_path, monkeypatch, behind):
    """A step's rows wait for memory that the disk has to give back, or for the thread that takes them in."""
    monkeypatch.setattr(state_thread, "JOINED_SECONDS", 0.0)  # each by itself: so few, joined, would fit into the queue
    rows = [prompt(i, QUESTIONS[i]) for i in range(6)]
    if behind == "disk":
        write = StateWriter._write_extent
        monkeypatch.setattr(StateWriter, "_write_extent", lambda self, *given: (time.sleep(0.3), write(self, *given))[1])
        monkeypatch.setattr(capture, "LIMIT_BYTES", 1)
    else:
        take_in = StoreThread._write
        monkeypatch.setattr(StoreThread, "_write", lambda self, step: (time.sleep(0.3), take_in(self, step))[1])
    folder = prepare(tmp_path / "slow", rows)
    counts = run(folder, "eval", engine)
    assert counts["capture_wait"] > 0.1 and (counts["disk_wait"] > 0.1) == (behind == "disk"), counts
    told = [json.loads(line).get("text", "") for line in (folder / "events.jsonl").read_text().splitlines()]
    assert any(f"for its states to be taken in, because the {behind} was" in text for text in told), told


def test_a_full_disk_is_a_must_fix_and_the_run_goes_on_after_it(engine, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True, text=True)
    if os.geteuid() != 0 or mounted.returncode:
        pytest.skip(f"mounting a small tmpfs needs root and is not allowed here: {mounted.stderr.strip()}")
    try:
        rows = [prompt(i, QUESTIONS[i]) for i in range(40)]
        unbroken = prepare(tmp_path / "unbroken", rows)
        run(unbroken, "eval", engine)
        folder = prepare(disk / "run", rows, states={"shard_mib": 1})
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(1 << 20))
        with pytest.raises(MustFix, match="disk is full") as failure:
            run(folder, "eval", engine)
        assert failure.value.exit_code == 78
        kept = (folder / "states/eval/responses.jsonl").read_bytes()
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        run(folder, "eval", engine)
        assert (folder / "states/eval/responses.jsonl").read_bytes().startswith(kept)
        assert responses(folder) == responses(unbroken)
        assert StateStore(folder / "states/eval").verify().problems == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
