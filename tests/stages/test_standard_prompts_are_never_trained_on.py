"""Standard sets: read from a file or through `datasets`, judged apart, and no training row overlaps with them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from test_prompts_are_split_by_content import context, texts, user, write

from jobs.errors import MustFix
from jobs.job_file import load
from jobs.reporting import figures
from jobs.settings import StandardPrompts
from jobs.stages import generate, prompts, standard
from jobs.stages.domains import domain_of
from jobs.stages.existing import UserTurns
from jobs.verifier.chat import Chat
from jobs.verifier.tiny import CHECKPOINT

QUESTION = "Natalia sold clips to forty eight of her friends in April and then half as many in May, how many clips did she sell altogether?"
SHORT = "What is seven times six?"


def own_rows() -> list[dict]:
    rows = [user(f"an ordinary question number {i}", id=f"o{i}") for i in range(20)]
    rows.append(
        user(
            "natalia sold  clips to forty eight of her friends in april and then half as many in may, how many clips did she sell altogether?",
            id="spelt",
        )
    )
    rows.append(user(f"Solve this step by step.\n\n{QUESTION} Give a number.", id="inside"))
    rows.append(user("Please tell me: what is seven times six? Thanks.", id="short"))
    rows.append(user("Natalia sold clips to forty eight of her friends in April.", id="only-alike"))
    return rows


def overlapping(tmp_path: Path, *more: str):
    own, hard = (
        write(tmp_path / "own.jsonl", own_rows()),
        write(tmp_path / "gsm.jsonl", [{"question": QUESTION, "answer": "72"}, {"question": SHORT}]),
    )
    made = context(
        tmp_path, f"prompts.source={own}", f'prompts.standard=[{{name="gsm8k", source="{hard}"}}]', "prompts.train_samples=40", "prompts.eval_samples=6", *more
    )  # fmt: skip
    return made, prompts.run(made)


def rows_of(made) -> list[dict]:
    return [json.loads(line) for line in (made.path / "prompts.jsonl").read_text().splitlines()]


def test_overlap_is_found_by_content_and_reported(tmp_path):
    made, counts = overlapping(tmp_path)
    rows = rows_of(made)
    trained = [row for row in rows if row["split"] == "train"]
    assert not {"spelt", "inside", "short"} & {row["id"] for row in rows}
    assert counts["in_standard_too"] == 3 and counts["standard"] == 2
    assert "Natalia sold clips to forty eight of her friends in April." in texts(rows), "a shorter run of the same words is no overlap"
    sets = [row for row in rows if row["id"].startswith("std.")]
    assert {row["source"] for row in sets} == {"gsm8k"} and {row["split"] for row in sets} == {"eval"} and texts(sets) == {QUESTION, SHORT}
    assert not texts(trained) & texts(sets)


def test_overlap_is_found_in_every_source_of_a_mix_and_in_both_splits(tmp_path):
    """A mix's rows are left out as the first source's are: of the train split, and of the eval split, which they share."""
    main = [user(f"an ordinary question number {i}", id=f"o{i}") for i in range(20)]
    mixed = [user(f"a question of the mix, {i}", id=f"m{i}") for i in range(4)] + own_rows()[-4:]
    files = {name: write(tmp_path / f"{name}.jsonl", rows) for name, rows in (("main", main), ("mixed", mixed))}
    hard = write(tmp_path / "gsm.jsonl", [{"question": QUESTION}, {"question": SHORT}])
    made = context(
        tmp_path, f"prompts.source={files['main']}", f'prompts.mix=[{{source="{files["mixed"]}", samples=8}}]',
        f'prompts.standard=[{{name="gsm8k", source="{hard}"}}]', "prompts.train_samples=20", "prompts.eval_samples=5",
    )  # fmt: skip
    counts, rows = prompts.run(made), rows_of(made)
    assert counts["in_standard_too"] == 3, "spelt in another way, inside another template, short"
    assert {row["id"] for row in rows if row["source"] == "mixed"} == {"m0", "m1", "m2", "m3", "only-alike"}
    assert {row["split"] for row in rows if row["source"] == "mixed"} == {"train", "eval"}
    assert figures.dropped_of(counts)["in standard too"] == 3, "the report says it"


def test_what_users_said_is_found_in_a_rendered_prompt():
    chat = Chat.load(CHECKPOINT)
    said = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?\n\nYes: <one>."}, {"role": "assistant", "content": "An answer."},
        {"role": "user", "content": "Two?"}, {"role": "tool", "content": "a result", "tool_call_id": "t"},
    ]  # fmt: skip
    for thinking in (True, False):
        assert UserTurns(chat).of(chat.render(said[:4], thinking)) == ["One?\n\nYes: <one>.", "Two?"]
        assert UserTurns(chat).of(chat.render(said, thinking))[0] == "One?\n\nYes: <one>.", "whatever follows"
        assert UserTurns(chat).of(chat.render(said[:2], thinking)) == ["One?\n\nYes: <one>."]


def test_existing_answers_depend_on_the_standard_sets_and_on_nothing_else_of_the_prompts(tmp_path):
    for standard_too, splits in ((True, {"eval": False, "train": True}), (False, {"eval": False, "train": False})):
        sets = ['prompts.standard=[{name="gsm8k", source="set.jsonl"}]'] if standard_too else ["prompts.standard=[]"]
        made = SimpleNamespace(settings=load("smoke", overrides=[*sets, "generate.responses=/answers"], environment={}), path=tmp_path)
        for split, expected in splits.items():
            inputs = generate.stage(split).inputs(made)
            assert (tmp_path / "prompts.jsonl" in inputs) == expected and Path(f"/answers/{split}/responses.jsonl") in inputs


def test_short_follow_ups_forbid_nothing_and_very_short_prompts_only_themselves():
    words = lambda numbers: " ".join(f"w{i}" for i in numbers)  # noqa: E731
    overlap = standard.Overlap(
        [["Compose a travel post about the island of Hawaii", "Rewrite it."], ["Define entropy."], [words(range(30))]]
    )
    assert "please compose a travel post about the island of hawaii now" in overlap and "DEFINE  entropy" in overlap
    assert "Rewrite it." not in overlap and "Please define entropy. And enthalpy." not in overlap
    assert words(range(10, 23)) in overlap and words(range(10, 22)) not in overlap
    assert "anything" not in standard.Overlap([])


def test_the_own_eval_split_keeps_its_size_beside_a_standard_set(tmp_path):
    made, counts = overlapping(tmp_path)
    assert counts["eval"] == 6 == sum(row["split"] == "eval" and standard.set_of(row["id"]) is None for row in rows_of(made))


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("mt-bench", {"question_id": 81, "turns": ["first", "second"]}, ["first", "second"]),
        ("mt-bench", {"prompt_id": 81, "prompt": ["first", "second"]}, ["first", "second"]),
        ("humaneval", {"task_id": "HumanEval/0", "prompt": "def f():\n"}, ["Complete this Python function.\n\n```python\ndef f():\n```"]),
        ("math500", {"unique_id": "test/algebra/1.json", "problem": "Solve {x}."}, ["Solve {x}."]),
        ("mine", {"messages": [{"role": "user", "content": "hello"}]}, ["hello"]),
    ],
)
def test_the_columns_of_the_known_sets_are_read(tmp_path, name, raw, said):
    own = write(tmp_path / "own.jsonl", [user(f"question {i}", id=f"o{i}") for i in range(9)])
    source = write(tmp_path / "set.jsonl", [raw])
    made = context(
        tmp_path,
        f"prompts.source={own}",
        f'prompts.standard=[{{name="{name}", source="{source}"}}]',
        "prompts.train_samples=4",
        "prompts.eval_samples=4",
    )
    prompts.run(made)
    (row,) = [row for row in rows_of(made) if standard.set_of(row["id"]) == name]
    assert [message["content"] for message in row["messages"]] == said and "#" not in row["id"] and "/" not in row["id"]


def test_a_set_by_name_is_read_through_the_datasets_library_and_a_number_takes_so_many(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    write(folder / "train.jsonl", [{"question": f"how much is {i} and {i}?"} for i in range(9)])
    own = write(tmp_path / "own.jsonl", [user(f"question {i}", id=f"o{i}") for i in range(9)])
    made = context(
        tmp_path,
        f"prompts.source={own}",
        f'prompts.standard=[{{name="gsm8k", source="{folder}", samples=4}}]',
        "prompts.train_samples=4",
        "prompts.eval_samples=4",
    )
    assert prompts.run(made)["standard"] == 4


# Of each known set: repository, subset, split, and a row with the columns that the repository has.
ON_THE_HUB = {
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", None, "train", {"prompt": ["Compose a post.", "Rewrite it."], "reference": [], "category": "writing", "prompt_id": 81}),
    "humaneval": ("openai/openai_humaneval", None, "test", {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "", "test": "", "entry_point": "f"}),
    "gsm8k": ("openai/gsm8k", "main", "test", {"question": QUESTION, "answer": "#### 72"}),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", {"problem": "Solve x.", "solution": "", "answer": "1", "subject": "Algebra", "level": 1, "unique_id": "test/a/1.json"}),
}  # fmt: skip
SAID = {
    "mt-bench": ["Compose a post.", "Rewrite it."], "humaneval": ["Complete this Python function.\n\n```python\ndef f():\n```"],
    "gsm8k": [QUESTION], "math500": ["Solve x."],
}  # fmt: skip


def test_the_known_sets_are_read_by_name_at_the_commit_that_fetch_resolved(tmp_path, monkeypatch):
    made = context(tmp_path, "prompts.standard=[]", "prompts.train_samples=4", "prompts.eval_samples=4")
    fetched = made.fetched()
    commits = {repository: f"{place:040x}" for place, (repository, *_) in enumerate(ON_THE_HUB.values(), 1)}
    fetched["prompts"] |= {repository: {"revision": commit} for repository, commit in commits.items()}
    (made.path / "fetched.json").write_text(json.dumps(fetched))
    assert set(standard.KNOWN) == set(ON_THE_HUB)
    wanted = made.settings.prompts.model_copy(update={"standard": tuple(StandardPrompts(name=name) for name in ON_THE_HUB)})
    made = replace(made, settings=made.settings.model_copy(update={"prompts": wanted}))
    asked = []

    def load_dataset(name, subset=None, *, split=None, revision=None):
        asked.append((name, subset, split, revision))
        return [row for repository, *_, row in ON_THE_HUB.values() if repository == name]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert prompts.run(made)["standard"] == 4
    assert asked == [(repository, subset, split, commits[repository]) for repository, subset, split, _ in ON_THE_HUB.values()]
    said = {standard.set_of(row["id"]): [m["content"] for m in row["messages"]] for row in rows_of(made) if standard.set_of(row["id"])}
    assert said == SAID


def test_every_known_name_is_a_repository_that_fetch_resolves():
    from jobs.stages.hub import prompt_repositories

    found = dict(prompt_repositories(load("hero", environment={}).prompts))
    assert {known.repository for known in standard.KNOWN.values()} <= set(found)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ('[{name="gsm9k"}]', "No standard set is called 'gsm9k'"),
        ('[{name="mine", source="SET"}]', "The row has no text of a question"),
        ('[{name="mine", source="/nowhere.jsonl"}]', "cannot be read"),
    ],
)
def test_a_wrong_set_is_one_sentence(tmp_path, wanted, expected):
    bad = write(tmp_path / "bad.jsonl", [{"answer": "no question"}])
    made = context(tmp_path, f"prompts.standard={wanted.replace('SET', str(bad))}")
    with pytest.raises(MustFix, match=expected) as error:
        prompts.run(made)
    assert "\n" not in str(error.value)


def test_the_mix_is_judged_in_its_share(tmp_path):
    main = write(tmp_path / "main.jsonl", [user(f"main {i}", id=f"m{i}") for i in range(60)])
    tools = write(tmp_path / "tools.jsonl", [user(f"call {i}", id=f"t{i}") for i in range(30)])
    made = context(
        tmp_path,
        f"prompts.source={main}",
        f'prompts.mix=[{{source="{tools}", samples=10}}]',
        "prompts.train_samples=40",
        "prompts.eval_samples=12",
    )
    prompts.run(made)
    rows = rows_of(made)
    assert sum(row["split"] == "eval" and row["source"] == "tools" for row in rows) == 3
    assert sum(row["split"] == "train" and row["source"] == "tools" for row in rows) == 10
    trained = texts([row for row in rows if row["split"] == "train"])
    assert not trained & texts([row for row in rows if row["split"] == "eval"])


@pytest.mark.parametrize(
    ("source", "domain"),
    [
        ("microsoft/orca-math-word-problems-200k", "math"), ("theblackcat102/evol-codealpaca-v1", "code"), ("cpython-3.11/Lib/enum.py", "code"),
        ("NousResearch/hermes-function-calling-v1", "tool calls"), ("CohereLabs/aya_dataset", "multilingual"), ("teknium/OpenHermes-2.5", "chat"),
        ("gsm8k", "math"), ("company/logs/2026", "support"),
    ],
)  # fmt: skip
def test_a_source_tells_its_domain_or_the_settings_do(source, domain):
    assert domain_of(source, {"company/": "other", "company/logs": "support"}) == domain


def test_preflight_names_an_unknown_set_a_missing_file_and_an_eval_split_too_small_for_an_interval(tmp_path):
    from jobs.stages.preflight import access

    made = context(tmp_path, 'prompts.standard=[{name="gsm9k"}, {name="mine", source="/nowhere.jsonl"}]', "prompts.eval_samples=4")
    unknown, missing, small = sorted(access.prompts(made), key=lambda text: ("gsm9k" not in text, "nowhere" not in text))
    assert "no standard set is called 'gsm9k'" in unknown and "/nowhere.jsonl are no file" in missing
    assert "prompts.eval_samples = 4 is too small for a confidence interval, which needs 5 prompts" in small
