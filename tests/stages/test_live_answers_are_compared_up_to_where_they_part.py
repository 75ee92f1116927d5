"""Lossless or not: answers written by hand as the benchmark keeps them, and how often the winner's part from plain ones."""

import json
from pathlib import Path

import pytest

from jobs.reporting.measured import live_table
from jobs.stages import live


def kept(folder: Path, way: str, concurrency: str, *answers: tuple[str, int]) -> None:
    texts, tokens = zip(*answers, strict=True)
    (folder / f"{way}-{concurrency}.json").write_text(json.dumps({"generated_texts": texts, "output_lens": tokens}))


SAME = ("abcdefghij" * 4, 10)  # four characters a token
PARTS = ("abcdefghij" * 2 + "X" * 20, 10)  # after 20 characters: the sixth token is another
SHORTER = ("abcdefghij" * 2, 5)  # ended where the other went on


@pytest.fixture
def folder(tmp_path) -> Path:
    """At 1 one answer of four parts; at 4 two do, the second because it ends. Plain decoding: one of four, between 1 and 4."""
    kept(tmp_path, "none", "1", SAME, SAME, SAME, SAME)
    kept(tmp_path, "none", "4", SAME, SAME, SAME, PARTS)
    kept(tmp_path, "trained", "1", SAME, PARTS, SAME, SAME)
    kept(tmp_path, "trained", "4", PARTS, SHORTER, SAME, PARTS)
    return tmp_path


def test_the_share_of_equal_answers_and_the_rate_of_divergences_are_of_known_differences(folder):
    ways = folder, "trained", ["1", "4"], ["1", "4"]
    assert live.same_answers(*ways) == {"winner_and_plain": {"1": 0.75, "4": 0.5}, "plain_and_plain": {"4": 0.75}}
    found = live.first_divergences(*ways)
    # Three whole answers of ten tokens and six tokens of the other; at 4 two whole, six tokens and the five that both have.
    at_1 = {"answers": 4, "diverged": 1, "tokens": 36.0, "per_1000_tokens": 1000 / 36}
    at_4 = {"answers": 4, "diverged": 2, "tokens": 31.0, "per_1000_tokens": 2000 / 31}
    assert found["winner_and_plain"] == {"1": at_1 | {"more_than_chance": False}, "4": at_4 | {"more_than_chance": False}}
    assert found["plain_and_plain"] == {"4": at_1}


def test_what_is_not_measured_yet_is_not_compared(folder):
    (folder / "none-4.json").unlink()
    (folder / "trained-1.json").unlink()
    found = live.first_divergences(folder, "trained", ["1"], ["4"])
    assert found == live.same_answers(folder, "trained", ["1"], ["4"]) == {"winner_and_plain": {}, "plain_and_plain": {}}


def test_one_concurrency_has_nothing_to_be_held_against(folder):
    found = live.first_divergences(folder, "trained", ["1"], ["1"])
    assert found["plain_and_plain"] == {} and found["winner_and_plain"]["1"]["more_than_chance"] is None


@pytest.mark.parametrize(
    ("winner", "plain", "more"),
    [
        (0, 0, False),  # identical, as in fp32 on CPU
        (4, 0, False),  # of as many tokens: 1 in 16 that all four fall on one side
        (6, 0, True),
        (10, 10, False),
        (18, 10, False),
        (24, 10, True),
        (3, 10, False),
    ],
)
def test_more_than_chance_is_two_standard_errors_above_plain_decoding(tmp_path, winner, plain, more):
    """400 answers of which so many part at their last token, so that the tokens compared are as many."""
    whole, parts = ("x" * 40, 10), ("x" * 39 + "y", 10)
    kept(tmp_path, "none", "1", *[whole] * 400)
    kept(tmp_path, "none", "4", *[whole] * (400 - plain), *[parts] * plain)
    kept(tmp_path, "trained", "1", *[whole] * (400 - winner), *[parts] * winner)
    found = live.first_divergences(tmp_path, "trained", ["1", "4"], ["1"])
    assert found["winner_and_plain"]["1"]["more_than_chance"] is more
    assert (found["winner_and_plain"]["1"]["diverged"], found["plain_and_plain"]["4"]["diverged"]) == (winner, plain)


def test_all_plain_pairs_together_say_what_chance_is(tmp_path):
    """Against one of them it would be more."""
    whole, parts = ("x" * 40, 10), ("x" * 39 + "y", 10)
    kept(tmp_path, "none", "1", *[whole] * 100)
    kept(tmp_path, "none", "4", *[whole] * 100)
    kept(tmp_path, "none", "16", *[whole] * 90, *[parts] * 10)
    kept(tmp_path, "trained", "4", *[whole] * 92, *[parts] * 8)
    more = {
        tuple(plain): live.first_divergences(tmp_path, "trained", plain, ["4"])["winner_and_plain"]["4"]["more_than_chance"]
        for plain in (["1", "4"], ["1", "4", "16"])
    }
    assert more == {("1", "4"): True, ("1", "4", "16"): False}


def test_the_report_shows_them_beside_the_equal_answers(folder):
    compared = live.first_divergences(folder, "trained", ["1", "4"], ["1", "4"])
    run = {"output_throughput": 10.0}
    table = live_table({"winner": "trained", "ways": {"none": {"runs": {"1": run}}}, "first_divergences": compared})
    shown = [(kind, at, cells["per_1000_tokens"].value, cells["diverged"].value, more) for kind, at, cells, more in table["parted"]]
    assert shown == [
        ("winner and plain", "1", 1000 / 36, 1, False),
        ("winner and plain", "4", 2000 / 31, 2, False),
        ("plain and plain", "4", 1000 / 36, 1, None),
    ]
    assert table["parted"][1][2]["answers"].path == ("first_divergences", "winner_and_plain", "4", "answers")
