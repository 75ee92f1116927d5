"""Standard sets: read from a file or through `datasets`, judged apart, and no training row overlaps with them."""

import json
from pathlib import Path

import pytest
from test_prompts_are_split_by_content import context, texts, user, write

from jobs.errors import MustFix
from jobs.stages import prompts, standard
from jobs.stages.domains import domain_of

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


def test_every_known_name_is_a_repository_that_fetch_resolves():
    from jobs.job_file import load
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
