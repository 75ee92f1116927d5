"""The charts of the report: all of them, with their bars, intervals and readable axes, every value traced; and a real browser shows them."""

import json

import pytest
from made_up_runs import HOSTILE
from report_pages import BROWSER, charts_show_what_is_traced, page_of, seen_in_a_browser

from jobs.reporting import charts
from jobs.reporting.report import write_report

# Name -> marks, of the complete run: 3 heads and no speculation, 3 positions, 11 stages, 3 TTT steps, 5 evaluations, 3 shares of the data.
CHARTS = {
    "Acceptance length by head": {"rect.bar": 4, "path.whisker": 3, "text.value": 4},
    "Share of steps that accept the draft at each position": {"rect.bar": 9, "text.value": 9},
    "Training loss": {"polyline.line": 1},
    "Accuracy by TTT step": {"polyline.line": 3},
    "Acceptance length": {"polyline.line": 2, "circle.dot": 5},
    "Learning rate": {"polyline.line": 1},
    "Acceptance length by samples": {"polyline.line": 1, "circle.dot": 3},
    "Time by stage": {"rect.bar": 11, "text.value": 11},
}


def test_every_chart_is_there_with_its_bars_lines_and_intervals(complete_run):
    page = page_of(complete_run)
    drawn = {c.name: {mark: n for mark, n in c.marks.items() if mark not in ("text.axis", "text.label", "line.grid")} for c in page.charts}
    assert drawn == CHARTS


@pytest.mark.parametrize(
    "axis", ["Training loss", "Accuracy by TTT step", "Acceptance length", "Learning rate", "Acceptance length by samples"]
)
def test_an_axis_has_at_least_three_marks_each_way(complete_run, axis):
    """Text order: marks of the y axis, of the x axis, then what x is."""
    (chart,) = (c for c in page_of(complete_run).charts if c.name == axis)
    assert chart.marks["line.grid"] >= 3 and len(chart.of("axis")) - 1 - chart.marks["line.grid"] >= 3
    assert len(set(chart.of("axis")[chart.marks["line.grid"] : -1])) == len(chart.of("axis")) - 1 - chart.marks["line.grid"]


@pytest.mark.parametrize(("low", "high"), [(90, 900), (10, 700), (0, 1), (37, 41), (1, 7), (3, 3)])
def test_marks_lie_within_the_axis_and_are_enough_to_read_it(low, high):
    found = charts.ticks_within(low, high)
    assert all(low <= mark <= high for mark in found) and (len(found) >= 3 or low == high) and len(found) <= 9


def test_every_value_on_a_chart_is_a_traced_figure_of_the_page(complete_run):
    charts_show_what_is_traced(page_of(complete_run))


def test_a_small_share_is_not_shown_as_none(complete_run):
    (chart,) = (c for c in page_of(complete_run).charts if c.name.startswith("Share of steps"))
    assert chart.of("value") == ["1.5", "5.6", "71", "0.4", "2.7", "52", "0.1", "1.6", "38"]


def test_each_head_has_its_interval_in_each_domain_and_the_gain_has_one(complete_run):
    page, files = page_of(complete_run), {"baseline.json": ("untrained", "ngram"), "evaluation.json": ("trained",)}
    shown = {attributes.get("data-source"): text for attributes, text in page.figures}
    for file, names in files.items():
        judged = json.loads((complete_run / file).read_text())["heads"]
        for name in names:
            for label, group in judged[name]["groups"]["domain"].items():
                place = f"{file}#/heads/{name}/groups/domain/{label}"
                assert [shown[f"{place}/{end}"] for end in ("low", "high")] == [f"{group[end]:.2f}" for end in ("low", "high")]
                assert f"{group['low']:.2f} to {group['high']:.2f}" in " ".join(page.text.split())
    for label, gain in json.loads((complete_run / "evaluation.json").read_text())["gains_by_domain"].items():
        for end in ("mean", "low", "high"):
            assert shown[f"evaluation.json#/gains_by_domain/{label}/{end}"] == f"{gain[end]:+.3f}"


def test_a_chart_of_names_from_outside_is_text(failed_run):
    (chart,) = (c for c in page_of(failed_run).charts if c.name == "Acceptance length by head")
    assert chart.of("label") == [charts.shortened(HOSTILE)]


@pytest.mark.skipif(BROWSER is None, reason="Debian's chromium is not installed")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_real_browser_shows_it_without_an_error_at_this_width(complete_run, tmp_path, width):
    """The page in a frame of a phone's and a desktop's width: nothing sticks out, charts have a size, nothing is logged."""
    seen = seen_in_a_browser(write_report(complete_run), tmp_path, width)
    assert seen["verdict"] == "Done" and seen["charts"] == list(CHARTS) and seen["requests"] == 0
    assert (seen["bars"], seen["whiskers"]) == (24, 3) and seen["figures"] > 100
    assert seen["wide"] <= width, "the page is wider than the screen"
    assert seen["least"] > min(width, 600) * 0.5
