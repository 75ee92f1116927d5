"""Prompts: only the user's side is kept, nothing twice, train and eval disjoint by content, the line named that is wrong."""

import json
import sys
from pathlib import Path

import pytest

from jobs.context import Context
from jobs.errors import MustFix
from jobs.job_file import load
from jobs.reporting.display import Display
from jobs.run import RunDirectory
from jobs.stages import fetch, prompts
from jobs.verifier.tiny import PROMPTS


def context(tmp_path: Path, *overrides: str) -> Context:
    settings = load("smoke", overrides=overrides, environment={})
    run = RunDirectory(tmp_path / "run")
    run.begin(settings)
    made = Context(settings, run, Display.open("plain", stream=sys.stderr))
    fetch.run(made)
    return made


def write(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def user(text: str, **more) -> dict:
    return {"messages": [{"role": "user", "content": text}], **more}


def split(made: Context) -> tuple[list[dict], list[dict]]:
    rows = [json.loads(line) for line in (made.path / "prompts.jsonl").read_text().splitlines()]
    return [r for r in rows if r["split"] == "train"], [r for r in rows if r["split"] == "eval"]


def texts(rows: list[dict]) -> set[str]:
    return {m["content"] for row in rows for m in row["messages"] if m["role"] == "user"}


def test_nothing_stands_in_both_splits_even_under_another_id_or_spelling(tmp_path):
    rows = [user(f"question {i}", id=f"t{i}") for i in range(30)]
    rows += [user(f"Question   {i}", id=f"e{i}", split="eval") for i in range(5)]
    source = write(tmp_path / "p.jsonl", rows)
    made = context(tmp_path, f"prompts.source={source}", "prompts.train_samples=100", "prompts.eval_samples=5")
    counts = prompts.run(made)
    train, evaluation = split(made)
    assert {r["id"] for r in evaluation} == {f"e{i}" for i in range(5)}, "of two copies the one marked eval stays"
    spelled = lambda rows: {" ".join(t.lower().split()) for t in texts(rows)}  # noqa: E731
    assert not spelled(train) & spelled(evaluation)
    assert (counts["duplicate"], counts["train"]) == (5, 25)


def test_a_turn_of_a_longer_conversation_counts_too(tmp_path):
    rows = [user("the shared question", id="e0", split="eval"), user("alone", id="t0")]
    rows.append(
        {
            "id": "t1",
            "messages": [
                {"role": "user", "content": "first"},
                {"role": "assistant", "content": "x"},
                {"role": "user", "content": "The Shared question"},
            ],
        }
    )
    made = context(tmp_path, f"prompts.source={write(tmp_path / 'p.jsonl', rows)}", "prompts.train_samples=9", "prompts.eval_samples=1")
    assert prompts.run(made)["in_eval_too"] == 1
    assert texts(split(made)[0]) == {"alone"}


def test_assistant_turns_are_discarded_and_sharegpt_is_read(tmp_path):
    rows = [
        {
            "id": f"s{i}",
            "conversations": [
                {"from": "system", "value": "be brief"},
                {"from": "human", "value": f"q{i}"},
                {"from": "gpt", "value": "its answer"},
                {"from": "human", "value": f"and {i}?"},
            ],
        }
        for i in range(4)
    ]
    made = context(
        tmp_path,
        f"prompts.source={write(tmp_path / 'p.jsonl', rows)}",
        "prompts.messages_field=conversations",
        "prompts.eval_samples=1",
        "prompts.train_samples=3",
    )
    prompts.run(made)
    for row in split(made)[0]:
        assert [m["role"] for m in row["messages"]] == ["system", "user", "user"]


def test_the_choice_does_not_depend_on_the_order_of_the_file(tmp_path):
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()][:200]
    chosen = []
    for name, ordered in (("a", rows), ("b", rows[::-1])):
        folder = tmp_path / name
        folder.mkdir()
        source = write(folder / "p.jsonl", ordered)
        made = context(folder, f"prompts.source={source}", "prompts.train_samples=20", "prompts.eval_samples=4")
        prompts.run(made)
        chosen.append((made.path / "prompts.jsonl").read_bytes())
    assert chosen[0] == chosen[1]


def test_long_prompts_are_dropped_and_counted_and_the_mix_has_its_share(tmp_path):
    main = write(tmp_path / "main.jsonl", [user(f"main {i}", id=f"m{i}") for i in range(20)] + [user("long " * 2000, id="long")])
    other = write(tmp_path / "other.jsonl", [{"id": f"o{i}", "inputs": f"autre {i}"} for i in range(10)])
    made = context(
        tmp_path,
        f"prompts.source={main}",
        f'prompts.mix=[{{source="{other}", messages_field="inputs", samples=3}}]',
        "prompts.train_samples=30",
        "prompts.eval_samples=2",
    )
    counts = prompts.run(made)
    assert counts["too_long"] == 1
    assert sum(row["source"] == "other" for row in split(made)[0]) == 3
    assert counts["train"] == 3 + 18


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{not json", "line 2"),
        ('["a list"]', "no JSON object"),
        ('{"id": "x"}', "`messages` is missing or empty"),
        ('{"messages": [{"role": "martian", "content": "x"}]}', "A turn is no message"),
        ('{"messages": [{"role": "user", "content": 5}]}', "A turn is no message"),
        ('{"id": "a#b", "messages": [{"role": "user", "content": "x"}]}', "holds a #"),
        ('{"split": "test", "messages": [{"role": "user", "content": "x"}]}', "`split` is 'test'"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(tmp_path, line, expected):
    source = write(tmp_path / "p.jsonl", [user("fine", id="a"), line])
    made = context(tmp_path, f"prompts.source={source}")
    with pytest.raises(MustFix) as error:
        prompts.run(made)
    assert expected in str(error.value) and "line 2" in str(error.value) and str(source) in str(error.value)


def test_a_missing_or_empty_file_is_one_sentence(tmp_path):
    made = context(tmp_path, f"prompts.source={tmp_path}/none.jsonl")
    with pytest.raises(MustFix, match="cannot be read"):
        prompts.run(made)
    made.run.close()
    made = context(tmp_path, f"prompts.source={write(tmp_path / 'empty.jsonl', [])}")
    with pytest.raises(MustFix, match="No usable prompt is left for the eval split"):
        prompts.run(made)


def test_a_dataset_by_name_is_read_through_the_datasets_library(tmp_path):
    folder = tmp_path / "dataset"
    folder.mkdir()
    write(folder / "train.jsonl", [user(f"from the data set {i}", id=f"d{i}") for i in range(12)])
    made = context(tmp_path, f"prompts.source={folder}", "prompts.train_samples=8", "prompts.eval_samples=4")
    counts = prompts.run(made)
    assert (counts["train"], counts["eval"]) == (8, 4)
