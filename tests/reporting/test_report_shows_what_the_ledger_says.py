"""report.html: self-contained, well-formed, escaped, and every figure equal to the entry that it names."""

import json
import re

import pytest
from made_up_runs import HOSTILE, complete_ledger
from report_pages import Page, figures_are_those_of_the_files, page_of

from jobs.errors import MustFix
from jobs.reporting import charts, figures
from jobs.reporting.forecast import forecast
from jobs.reporting.report import write_report


@pytest.mark.parametrize("name", ["complete_run", "stopped_run", "failed_run"])
def test_every_figure_equals_the_entry_it_names(name, request):
    run = request.getfixturevalue(name)
    page = page_of(run)
    assert len(page.figures) > 10
    figures_are_those_of_the_files(run, page)


def test_what_is_shown_is_the_value_rounded(complete_run):
    shown = {attributes.get("data-source"): text for attributes, text in page_of(complete_run).figures if "data-per" not in attributes}
    assert shown["evaluation.json#/heads/trained/acceptance_length/mean"] == "2.613"
    assert shown["run.json#/stages/train/seconds"] == "61.5 s"
    assert shown["run.json#/stages/generate.train/seconds"] == "2.0 min"
    assert shown["baseline.json#/heads/ngram/rates/0"] == "31.0 %"
    # What vLLM counted while that head drafted, beside the replay of the same answers.
    assert (shown["baseline.json#/heads/ngram/live/mean"], shown["baseline.json#/heads/ngram/live/replay/mean"]) == ("2.047", "2.031")
    assert shown["run.json#/cost/amount"] == f"{complete_ledger()['cost']['amount']:.2f} EUR"


def test_no_speculation_stands_first_in_table_and_chart(complete_run):
    page = page_of(complete_run)
    shown = {attributes.get("data-source"): text for attributes, text in page.figures}
    assert shown["run.json#/acceptance/none/mean"] == "1.000"
    words = " ".join(page.text.split())
    assert "none no speculation 1.000 - untrained" in words, "the first row of the table"
    assert words.index("none 1.00") < words.index("untrained 1.02"), "the first bar of the chart"
    ledger = json.loads((complete_run / "run.json").read_text())
    del ledger["acceptance"]["none"]  # of an older version
    (complete_run / "run.json").write_text(json.dumps(ledger))
    assert "no speculation" not in page_of(complete_run).text


def test_positions_are_shares_of_all_steps_and_a_drafter_that_rarely_drafts_is_not_flattered(complete_run):
    page = page_of(complete_run)
    shown = {(a["data-source"], a.get("data-per")): text for a, text in page.figures if "data-source" in a}
    walk = "baseline.json#/heads/ngram/walk"
    assert shown[f"{walk}/accepted/0", f"{walk}/steps"] == "5.6 %", "279 of 5,000 steps"
    assert shown["baseline.json#/heads/ngram/rates/0", None] == "31.0 %", "of the 900 steps that drafted, in a row of its own"
    assert ("evaluation.json#/heads/trained/rates/0", None) not in shown and shown[
        "evaluation.json#/heads/trained/walk/accepted/0", "evaluation.json#/heads/trained/walk/steps"
    ] == "71.0 %"
    assert "if drafted" in page.text


def test_the_verdict_comes_first_and_says_what_the_head_is_worth(complete_run):
    page = page_of(complete_run)
    words = " ".join(page.text.split())
    assert words.index("Done") < words.index("Acceptance length by head")
    assert "The trained head emits 2.61 tokens a verification step (95 % interval 2.53 to 2.69); 4 is the most." in words
    assert "Against ngram: +1.06 (95 % interval 0.98 to 1.14) on the same prompts." in words
    for needed in (
        "too long",
        "duplicate",
        "no answer",
        "900 tokens/s",
        "estimate in training",
        "training from scratch, 700 steps",
        "train.epochs",
        "vllm",
        "b" * 64,
        "prompts: 12 were too long",
    ):
        assert needed in words, needed
    assert "hidden-word" not in (complete_run / "report.html").read_text()  # a password in a URL


def test_live_speed_stands_in_the_verdict_and_in_a_table_and_a_dead_server_is_named(complete_run):
    words = " ".join(page_of(complete_run).text.split())
    assert "Through the real server trained is 1.41 times as fast as none, with 1 request at once." in words
    assert words.index("1.41 times") < words.index("Acceptance length by head")
    assert "the replay of trained over the whole eval split, each of its steps counted, gave 2.613." in words
    assert "winner and plain at 1: 96 %" in words
    assert "winner and plain at 1: 0.376 (2 of 48 answers, not more than chance)" in words
    assert "winner and plain at 16: 2.249 (11 of 48 answers, more than chance), plain and plain at 16: 0.570 (3 of 48 answers)." in words
    assert "The live server died with signal SIGKILL" in words and "84.6 1.41" in words and "2.610" in words


def test_standard_prompts_stand_beside_the_public_cards_with_what_differs(complete_run):
    words = " ".join(page_of(complete_run).text.split())
    for needed in (
        "lightseekorg/kimi-k2.5-eagle3",
        "3.201",
        "2.687",
        "What differs from the cards",
        "temperature 1",
        "3.113",
        "3.03 to 3.19",
    ):
        assert needed in words, needed
    ledger = json.loads((complete_run / "run.json").read_text())
    ledger["settings"]["verifier"]["model"] = "another/model"
    (complete_run / "run.json").write_text(json.dumps(ledger))
    words = page_of(complete_run).text
    assert "3.113" in words and "lightseekorg" not in words, "the cards are of heads for Kimi-K2.5"


def test_a_long_table_of_sources_is_capped_with_the_rest_summed_and_positions_go_up(complete_run):
    words = " ".join(page_of(complete_run).text.split())
    assert "set-07" in words and "set-29" in words and "set-08" not in words
    assert "the 27 others together" in words
    assert words.index("0-255") < words.index("256-1023") < words.index("1024-4095") < words.index("16384+")
    evaluation = json.loads((complete_run / "evaluation.json").read_text())
    del evaluation["heads"]["trained"]["others"]
    (complete_run / "evaluation.json").write_text(json.dumps(evaluation))
    (complete_run / "baseline.json").unlink()
    assert "and 22 more in evaluation.json" in " ".join(page_of(complete_run).text.split())


def test_the_scaling_table_and_every_stages_money_are_there(complete_run):
    shown = {attributes.get("data-source"): text for attributes, text in page_of(complete_run).figures if "data-per" not in attributes}
    assert shown["scaling.json#/rows/0/share"] == "10 %" and shown["scaling.json#/rows/2/samples"] == "900"
    assert shown["run.json#/stages/generate.train/cost"] == "0.42 EUR" and "Where time and money went" in page_of(complete_run).text
    assert (
        shown["run.json#/stages/generate.train/counts/dropped/no answer"] == "2"
        and shown["run.json#/stages/prompts/counts/too_long"] == "12"
    )


def test_a_no_go_says_why(complete_run):
    ledger = json.loads((complete_run / "run.json").read_text())
    ledger |= {
        "status": "no_go",
        "published": None,
        "acceptance": {"ngram": {"mean": 3.7, "low": 3.6, "high": 3.8}, "baseline": {"mean": 3.7, "low": 3.6, "high": 3.8}},
    }
    ledger["gate"] = {"verdict": "no_go", "why": "ngram already accepts 3.700 tokens a step", "forced": False}
    (complete_run / "run.json").write_text(json.dumps(ledger))
    (complete_run / "evaluation.json").unlink()
    words = " ".join(page_of(complete_run).text.split())
    assert "No go" in words and "Nothing was trained or published: ngram already accepts 3.700 tokens a step." in words
    assert "The best existing way to speculate (ngram) emits 3.70 (95 % interval 3.60 to 3.80)." in words


def test_a_run_that_stopped_early_has_a_page(stopped_run):
    words = " ".join(page_of(stopped_run).text.split())
    assert "Interrupted" in words and "Stopped by SIGTERM" in words and "run the same command again to continue" in words
    assert "could not be read" not in words, "the torn last line of a killed run is no problem"


def test_a_run_that_is_not_over_says_what_it_still_takes_and_costs(stopped_run):
    ledger = json.loads((stopped_run / "run.json").read_text())
    ledger["stages"]["generate.train"] = {
        "state": "running", "seconds": 420.0, "cost": 1.4583,
        "progress": {"done": 300, "total": 900, "unit": "answers", "from": 0, "seconds": 300.0, "per_second": 1.5},
    }  # fmt: skip
    (stopped_run / "run.json").write_text(json.dumps(ledger))
    expected = forecast(ledger)
    page = page_of(stopped_run)
    shown = {attributes.get("data-source"): (json.loads(attributes["value"]), text) for attributes, text in page.figures}
    for end in ("low", "high"):
        assert shown[f"forecast(run.json)#/seconds_left/{end}"] == (
            expected["seconds_left"][end],
            figures.seconds_text(expected["seconds_left"][end]),
        )
        assert shown[f"forecast(run.json)#/cost_in_all/{end}"] == (
            expected["cost_in_all"][end],
            figures.money_text(expected["cost_in_all"][end]),
        )
    assert shown["forecast(run.json)#/stages/generate.train/low"] == (400.0, "6.7 min") and shown[
        "forecast(run.json)#/stages/generate.train/high"
    ] == (600.0, "10.0 min")
    words = " ".join(page.text.split())
    for needed in ("Still expected", "Cost so far", "Cost expected in all", "What is left", "its own progress", "the plan"):
        assert needed in words, needed


def test_a_run_that_is_over_says_its_time_and_its_cost_and_expects_nothing(complete_run):
    page = page_of(complete_run)
    assert not any(str(attributes.get("data-source")).startswith("forecast") for attributes, _ in page.figures)
    words, ledger = " ".join(page.text.split()), complete_ledger()
    assert f"Time in stages {figures.seconds_text(sum(stage['seconds'] for stage in ledger['stages'].values()))}" in words
    assert f"Cost {ledger['cost']['amount']:.2f} EUR" in words and "expected" not in words.lower() and "What is left" not in words


def test_without_a_price_the_report_names_no_cost(stopped_run):
    ledger = json.loads((stopped_run / "run.json").read_text())
    ledger["settings"]["rental"]["price_per_hour"], ledger["cost"]["amount"] = 0.0, 0.0
    for record in ledger["stages"].values():
        record["cost"] = 0.0  # the ledger counts all the same
    (stopped_run / "run.json").write_text(json.dumps(ledger))
    words = " ".join(page_of(stopped_run).text.split())
    assert "Still expected" in words and "EUR" not in words.split("Details")[0] and "cost" not in words.split("Details")[0].lower()
    assert "Where time went" in words


@pytest.mark.parametrize(
    "contents",
    [
        {},
        {"run.json": "{torn"},
        {"run.json": "[]", "train.jsonl": "x\ny\n"},
        {"run.json": '{"stages": 3, "acceptance": [], "machine": "box"}'},
    ],
)
def test_a_folder_with_holes_has_a_page(tmp_path, contents):
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    words = page_of(tmp_path).text
    assert "No head has been judged yet." in words
    if contents.get("run.json") == "{torn":
        assert "run.json cannot be read" in words


def test_no_folder_is_one_sentence(tmp_path):
    with pytest.raises(MustFix, match="There is no run here"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["complete_run", "failed_run"])
def test_nothing_is_fetched_and_nothing_runs(name, request):
    run = request.getfixturevalue(name)
    page = page_of(run)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image", "use", "a"}
    for tag, attribute, value in page.attributes:
        assert attribute not in ("src", "href", "xlink:href", "srcset", "action", "poster"), (tag, attribute, value)
        assert not attribute.startswith("on"), (tag, attribute)
    style = re.search(r"<style>(.*?)</style>", (run / "report.html").read_text(), re.S)[1]
    assert "url(" not in style and "@import" not in style


def test_markup_from_outside_is_text(failed_run):
    raw = write_report(failed_run).read_text()
    assert HOSTILE not in raw and "<script" not in raw and "<img" not in raw
    assert Page(raw).text.count(HOSTILE) > 20  # shown as it is, everywhere


def test_the_loss_that_is_not_finite_is_a_gap_and_is_counted(failed_run):
    words = " ".join(page_of(failed_run).text.split())
    assert "Lines with a loss that is not finite 1" in words


def test_long_logs_are_thinned_without_losing_the_mean_or_the_end():
    points = [(float(step), 100.0 if step == 7000 else 1.0) for step in range(100_000)]
    thin = charts.thinned(points)
    assert len(thin) <= 300 and thin[-1] == points[-1]
    assert max(y for _, y in thin) > 1.2, "a spike vanished"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.1, 6.2), (3, 3), (0, 0.004), (1, 100_000), (-5, 5)])
def test_axis_ticks_are_round_and_span_the_data(low, high):
    found = charts.ticks(low, high, 5)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 8


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.05, "0.05 s"), (7.57, "7.6 s"), (864, "14.4 min"), (9120, "2.5 h"), (3 * 86400, "3.0 d"), (None, "-")],
)
def test_seconds_are_written_for_people(seconds, text):
    assert figures.seconds_text(seconds) == text
