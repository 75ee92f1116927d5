"""Reading a run's report as a person, a browser and an auditor would: its figures, its charts, and what stands behind them."""

import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jobs.reporting.forecast import forecast
from jobs.reporting.report import write_report

VOID = {"meta", "br", "img", "link", "input", "hr"}
BROWSER = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--allow-file-access-from-files",
    "--virtual-time-budget=3000",
]


@dataclass
class Chart:
    """An `svg` of the page: its accessible name, its marks (`rect.bar` -> how many) and its texts with their class."""

    name: str
    marks: Counter[str] = field(default_factory=Counter)
    texts: list[tuple[str, str]] = field(default_factory=list)

    def of(self, kind: str) -> list[str]:
        return [text for of, text in self.texts if of == kind]


class Page(HTMLParser):
    """Elements must nest and close; figures, charts, attributes and the visible text are kept."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.charts: list[Chart] = []
        self.figures: list[tuple[dict[str, str], str]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> repeats an attribute"
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        given = {name: value or "" for name, value in attrs}
        if tag == "data":
            self.figures.append((given, ""))
        elif tag == "svg":
            self.charts.append(Chart(given["aria-label"]))
        elif "svg" in self.open and (kind := given.get("class", "").partition(" ")[0]):
            self.charts[-1].marks[f"{tag}.{kind}"] += 1
            if tag == "text":
                self.charts[-1].texts.append((kind, ""))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()
        if tag not in ("data", "code", "strong", "span"):
            self.text += " "

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            return
        self.text += data
        if self.open and self.open[-1] == "data":
            attributes, text = self.figures[-1]
            self.figures[-1] = (attributes, text + data)
        elif self.open and self.open[-1] == "text":
            kind, text = self.charts[-1].texts[-1]
            self.charts[-1].texts[-1] = (kind, text + data)


def looked_up(run: Path, source: str):
    """The value behind `file#/json/pointer`; a .jsonl file is the list of its lines, `forecast(file)` what follows from a ledger."""
    file, path = source.split("#")
    if file == "forecast(run.json)":
        found = forecast(json.loads((run / "run.json").read_text()))
    else:
        text = (run / file).read_text()
        found = [json.loads(line) for line in text.splitlines()] if file.endswith(".jsonl") else json.loads(text)
    for part in path.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        found = found[int(part)] if isinstance(found, list) else found[part]
    return found


def page_of(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def figures_are_those_of_the_files(run: Path, page: Page) -> None:
    """Every figure carries the value of the entry that it names."""
    for attributes, shown in page.figures:
        value = json.loads(attributes["value"])
        if "data-sum" in attributes:
            expected = sum(stage.get("seconds") or 0 for stage in looked_up(run, "run.json#/stages").values())
            assert value == pytest.approx(expected)
        elif "data-per" in attributes:
            assert value == pytest.approx(looked_up(run, attributes["data-source"]) / looked_up(run, attributes["data-per"]))
        elif "hidden-word" not in str(looked_up(run, attributes["data-source"])):
            assert value == looked_up(run, attributes["data-source"]), attributes["data-source"]
        assert shown.strip(), f"{attributes} shows nothing"


def charts_show_what_is_traced(page: Page) -> None:
    """Every number that a chart shows as a value is, rounded, a figure of the page that names its source, of the same head or stage."""
    values = {(f.get("data-source", ""), "data-per" in f): json.loads(f["value"]) for f, _ in page.figures}
    texts = {f.get("data-source", ""): text for f, text in page.figures if "data-per" not in f}
    charts = {chart.name: chart for chart in page.charts}
    chart = charts["Acceptance length by head"]
    for name, shown in zip(chart.of("label"), chart.of("value"), strict=True):
        ends = (
            [f"/heads/{name}/acceptance_length/{end}" for end in ("mean", "low", "high")] if name != "none" else ["/acceptance/none/mean"]
        )
        found = [next(v for (source, _), v in values.items() if source.endswith(end)) for end in ends]
        assert re.findall(r"[\d.]+", shown) == [f"{value:.2f}" for value in found], (name, shown)
    chart = charts["Share of steps that accept the draft at each position"]
    shares = [
        [v for (source, per), v in values.items() if per and source.endswith(f"/walk/accepted/{k}")] for k in range(len(chart.of("value")))
    ]
    for shown, share in zip(chart.of("value"), [share for of in shares for share in of], strict=True):
        assert abs(float(shown) - 100 * share) <= (0.0501 if "." in shown else 0.501), (shown, share)
    chart = charts["Time by stage"]
    for name, shown in zip(chart.of("label"), chart.of("value"), strict=True):
        assert shown == texts[f"run.json#/stages/{name}/seconds"], name


def seen_in_a_browser(report: Path, folder: Path, width: int) -> dict:
    """What chromium makes of the page in a frame of this width; anything it logs is an error. folder: for its own files."""
    frame = folder / "frame.html"
    frame.write_text(
        f"""<body><iframe id=f src="{report.as_uri()}" style="width:{width}px;height:4000px;border:0"></iframe><p id=out>none</p><script>
        document.getElementById("f").onload = function () {{
          const page = this.contentDocument, boxes = what => [...page.querySelectorAll(what)].map(s => s.getBoundingClientRect());
          document.getElementById("out").textContent = JSON.stringify({{
            wide: page.documentElement.scrollWidth, charts: [...page.querySelectorAll("svg")].map(s => s.getAttribute("aria-label")),
            least: Math.min(...boxes("svg").map(r => r.width)), bars: boxes("rect.bar").filter(r => r.width > 0).length,
            whiskers: boxes("path.whisker").filter(r => r.width > 0).length, figures: page.querySelectorAll("data[data-source]").length,
            requests: page.defaultView.performance.getEntriesByType("resource").length, verdict: page.querySelector(".verdict").textContent}});
        }}</script></body>"""
    )
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", frame.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in shown.stderr, shown.stderr[-2000:]
    return json.loads(re.search(r'<p id="out">(.*?)</p>', shown.stdout)[1])
