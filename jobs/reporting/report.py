"""One `report.html` of a run, for a person: the verdict first, then what stands behind it.

Self-contained by decision: no script, no font, no image, nothing fetched. It is opened years later from
a bucket, on a phone, offline. Every figure is a `<data>` element that carries its exact value and where
it was read (`run.json#/stages/train/seconds`, a JSON pointer), so that a number can be traced to the
ledger and a test can hold the page to it. Nothing is required: a run that died in its first stage gets
a page too, and that is when it is needed most. All text is escaped; file names, notes and errors come
from outside.
"""

import itertools
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from jobs.errors import MustFix
from jobs.reporting import charts, figures, measured
from jobs.reporting.figures import mapping, number
from jobs.reporting.forecast import forecast
from jobs.reporting.run_files import RunFiles
from jobs.reporting.tiles import expected_rows, facts, is_priced
from jobs.reporting.traced import figure, masked
from jobs.storage.files import write_atomically

EVENTS_SHOWN = 60
NOTES_SHOWN = 20
SPECULATION_LIMIT = 4  # axis of acceptance with the usual 3 drafted tokens
VERDICTS = {
    "done": ("Done", "good"),
    "no_go": ("No go", "warn"),
    "failed": ("Failed", "bad"),
    "interrupted": ("Interrupted", "warn"),
    "running": ("Not finished", "warn"),
}


def write_report(run_path: Path) -> Path:
    """Write `report.html` into the run directory and return its path. MustFix if there is no such folder."""
    run_path = Path(run_path)
    if not run_path.is_dir():
        raise MustFix("There is no run here", where=str(run_path), remedy="name a run directory")
    page = run_path / "report.html"
    write_atomically(page, render(RunFiles(run_path)).encode("utf-8"))
    return page


def render(files: RunFiles) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["figure"] = figure
    environment.filters["masked"] = masked
    return environment.get_template("report.html").render(**page_of(files))


# What stands on the page ------------------------------------------------------------------------


def page_of(files: RunFiles) -> dict[str, Any]:
    run = files.run
    heads = head_figures(files)
    stages = figures.stage_rows(run)
    word, tone = VERDICTS.get(str(run.get("status")), ("Unknown", "warn"))
    currency, expected = str(mapping(run.get("cost")).get("currency") or ""), forecast(run)
    return {
        "job": str(run.get("job") or files.path.absolute().name),
        "verdict": {"word": word, "tone": tone, "lines": verdict_lines(files)},
        "problems": files.problems,
        "error": mapping(run.get("error")),
        "exit_code": run.get("exit_code"),
        "gate": mapping(run.get("gate")),
        "facts": facts(run, stages, expected),
        "heads": heads,
        "no_speculation": number(mapping(mapping(run.get("acceptance")).get("none")).get("mean")),
        "acceptance_chart": acceptance_chart(files),
        "rates_chart": rates_chart(heads),
        "positions": max((len(head["rates"]) for head in heads), default=0),
        "gains": gain_figures(files),
        "groups": measured.group_tables(heads),
        "domain_gains": measured.domain_gains(files.evaluation),
        "best": str(files.baseline.get("best") or ""),
        "standard": measured.standard_table(heads, mapping(run.get("settings"))),
        "live": measured.live_table(files.live),
        "scaling": measured.scaling_rows(files.scaling),
        "scaling_chart": scaling_chart(files),
        "curves": training_curves(files.training),
        "training": training_facts(files.training),
        "training_notes": [masked(line["note"]) for line in files.training if "note" in line][-NOTES_SHOWN:],
        "stages": stages,
        "stages_chart": charts.duration_bars(
            "Time by stage", [(row.name, row.seconds or 0.0, figures.seconds_text(row.seconds)) for row in stages if row.seconds]
        ),
        "expected": expected_rows(expected),
        "currency": currency,
        "priced": is_priced(run),
        "errors_of_stages": {
            name: str(entry["error"]) for name, raw in mapping(run.get("stages")).items() if (entry := mapping(raw)).get("error")
        },
        "events": [event_row(event) for event in files.events[-EVENTS_SHOWN:]],
        "events_left_out": max(0, len(files.events) - EVENTS_SHOWN),
        "settings": {section: mapping(values) for section, values in mapping(run.get("settings")).items()},
        "versions": mapping(run.get("versions")),
        "machine": mapping(run.get("machine")),
        "hashes": hashes(run),
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "text": figures,
    }


def verdict_lines(files: RunFiles) -> list[Markup]:
    """One to three sentences that say how it ended and what the head is worth."""
    run, acceptance = files.run, mapping(files.run.get("acceptance"))
    lines = []
    trained = mapping(acceptance.get("trained"))
    if number(trained.get("mean")) is not None:
        lines.append(
            Markup("The trained head emits {} tokens a verification step{}; {} is the most.").format(
                _mean("trained", trained), _interval(trained, "acceptance", "trained"), _most(files)
            )
        )
    lines += _comparison(files) + _speed(files)
    gate = mapping(run.get("gate"))
    if run.get("status") == "no_go" and gate:
        lines.append(Markup("Nothing was trained or published: {}.").format(str(gate.get("why", "the gate said so")).rstrip(".")))
    error = mapping(run.get("error"))
    if error.get("message"):
        lines.append(Markup("{}.").format(masked(error["message"]).rstrip(".")))
    if run.get("published"):
        lines.append(Markup("Published: <code>{}</code>").format(masked(run["published"])))
    if not lines:
        lines.append(Markup("No head has been judged yet."))
    return lines


def _comparison(files: RunFiles) -> list[Markup]:
    gains, acceptance = mapping(files.evaluation.get("gains")), mapping(files.run.get("acceptance"))
    best = str(files.baseline.get("best") or "baseline")
    key = next((key for key in (f"over_{best}", "over_untrained") if key in gains), None)
    if key is not None:
        gain = mapping(gains[key])
        mean = number(gain.get("mean"))
        if mean is not None:
            text = figure(f"{mean:+.2f}", mean, ("gains", key, "mean"), file="evaluation.json")
            return [
                Markup("Against {}: {}{} on the same prompts.").format(
                    key.removeprefix("over_"), text, _interval(gain, "gains", key, file="evaluation.json")
                )
            ]
    baseline = mapping(acceptance.get("baseline"))
    if number(baseline.get("mean")) is None:
        return []
    named = f" ({best})" if best != "baseline" else ""
    return [
        Markup("The best existing way to speculate{} emits {}{}.").format(
            named, _mean("baseline", baseline), _interval(baseline, "acceptance", "baseline")
        )
    ]


def _speed(files: RunFiles) -> list[Markup]:
    """What the winner was worth through the real server, at the fewest requests at once."""
    speedup = {c: value for c, raw in mapping(files.live.get("speedup")).items() if (value := number(raw)) is not None}
    if not speedup:
        return []
    least = min(speedup, key=lambda c: (len(c), c))
    text = figure(f"{speedup[least]:.2f}", speedup[least], ("speedup", least), file="live.json")
    return [
        Markup("Through the real server {} is {} times as fast as none, with {} at once.").format(
            str(files.live.get("winner")), text, f"{least} request{'' if least == '1' else 's'}"
        )
    ]


def _mean(name: str, entry: Mapping[str, Any]) -> Markup:
    return figure(f"{entry['mean']:.2f}", entry["mean"], ("acceptance", name, "mean"))


def _interval(entry: Mapping[str, Any], *path: str, file: str = "run.json") -> Markup:
    low, high = number(entry.get("low")), number(entry.get("high"))
    if low is None or high is None:
        return Markup("")
    return Markup(" (95 % interval {} to {})").format(
        figure(f"{low:.2f}", low, (*path, "low"), file), figure(f"{high:.2f}", high, (*path, "high"), file)
    )


def drafted(files: RunFiles) -> int:
    """Drafted tokens a step; the most a step can emit is one more."""
    found = number(files.evaluation.get("draft_tokens")) or number(files.baseline.get("draft_tokens"))
    return int(found) if found else SPECULATION_LIMIT - 1


def _most(files: RunFiles) -> int:
    return drafted(files) + 1


def acceptance_chart(files: RunFiles) -> Markup:
    return charts.interval_bars("Acceptance length by head", figures.head_rows(files.run), _most(files))


def head_figures(files: RunFiles) -> list[dict[str, Any]]:
    """Every judged head once, with the file its figures stand in; the trained head last."""
    found = []
    for file, judged in (("baseline.json", files.baseline), ("evaluation.json", files.evaluation)):
        for name, raw in mapping(judged.get("heads")).items():
            entry = mapping(raw)
            length = mapping(entry.get("acceptance_length"))
            if number(length.get("mean")) is None:
                continue
            walk = ("walk",) if "walk" in entry else ()
            counted = mapping(entry.get("walk")) if walk else entry
            found.append(
                {
                    "name": name,
                    "file": file,
                    "path": ("heads", name),
                    "length": length,
                    "rates": _numbers(entry.get("rates")),
                    "conditional_rates": _numbers(entry.get("conditional_rates")),
                    "walk": walk,
                    "steps": number(counted.get("steps")),
                    "tokens": number(counted.get("tokens")),
                    "drafts": number(counted.get("drafts")),
                    "accepted": figures.shares(counted.get("accepted"), counted.get("steps")),
                    "histogram": _numbers(entry.get("histogram")),
                    "taps": entry.get("taps"),
                    "readings": mapping(entry.get("readings")),
                    "live": measured.drafted(entry),
                    "groups": mapping(entry.get("groups")),
                    "others": mapping(entry.get("others")),
                    "standard": mapping(entry.get("standard")),
                }
            )
    last = {head["name"]: head for head in found}  # a head judged twice counts as judged last
    return sorted(last.values(), key=lambda head: (head["name"] == "trained", head["length"]["mean"]))


def _numbers(values: Any) -> list[float]:
    """The numbers up to the first entry that is none, so that a figure's place in the list is its place in the file."""
    return list(itertools.takewhile(lambda value: value is not None, map(number, values))) if isinstance(values, list) else []


def rates_chart(heads: list[dict[str, Any]]) -> Markup:
    """Of all steps, so that the bars of a head add up to its acceptance length less one."""
    shown = [(head["name"], head["accepted"] or head["rates"]) for head in heads if head["rates"]][-charts.SERIES_COLOURS :]
    count = max((len(rates) for _, rates in shown), default=0)
    return charts.grouped_bars("Share of steps that accept the draft at each position", [f"position {k + 1}" for k in range(count)], shown)


def gain_figures(files: RunFiles) -> list[tuple[str, dict[str, Any]]]:
    gains = mapping(files.evaluation.get("gains"))
    return [(key, mapping(raw)) for key, raw in gains.items() if number(mapping(raw).get("mean")) is not None]


def scaling_chart(files: RunFiles) -> Markup:
    """Acceptance length over the samples trained on."""
    points = [
        (number(row.get("samples")) or 0.0, mapping(row["acceptance_length"])["mean"]) for _, row in measured.scaling_rows(files.scaling)
    ]
    return (
        charts.line_chart("Acceptance length by samples", [("acceptance length", sorted(points))], x_label="training samples", floor=1)
        if len(points) > 1
        else Markup()
    )


def training_curves(lines: list[dict[str, Any]]) -> list[tuple[str, Markup]]:
    """Loss, accuracy by TTT step, acceptance, learning rate, over optimizer steps.

    Two acceptance curves: the replay on the eval split is what counts; the trainer's own estimate is there at every line.
    """
    by_step = {step: line for line in lines if (step := number(line.get("step"))) is not None and "loss" in line}
    rows = sorted(by_step.items())  # a resumed run repeats steps: the later line of a step counts

    def points(key: str) -> list[charts.Point]:
        return charts.thinned([(step, value) for step, line in rows if (value := number(line.get(key))) is not None])

    by_ttt_step = [(step, _numbers(line.get("accuracy_by_step"))) for step, line in rows]
    accuracy = []
    for k in range(max((len(values) for _, values in by_ttt_step), default=0)):
        series = [(step, values[k]) for step, values in by_ttt_step if len(values) > k]
        accuracy.append((f"TTT step {k + 1}", charts.thinned(series)))
    judged = sorted(
        {
            step: value for line in lines if (step := number(line.get("step"))) is not None and (value := acceptance_of(line)) is not None
        }.items()
    )
    acceptance = [("replay on the eval split", judged), ("estimate in training", points("acceptance_estimate"))]
    found = (
        ("Loss", charts.line_chart("Training loss", [("loss", points("loss"))], x_label="optimizer step")),
        ("Accuracy of the draft in training", charts.line_chart("Accuracy by TTT step", accuracy, x_label="optimizer step", floor=0)),
        ("Acceptance length", charts.line_chart("Acceptance length", acceptance, x_label="optimizer step", floor=1)),
        (
            "Learning rate",
            charts.line_chart("Learning rate", [("learning rate", points("learning_rate"))], x_label="optimizer step", floor=0),
        ),
    )
    return [(title, chart) for title, chart in found if chart]


def acceptance_of(line: Mapping[str, Any]) -> float | None:
    value = mapping(line.get("evaluation")).get("acceptance")
    return number(mapping(value).get("mean")) if isinstance(value, Mapping) else number(value)


def training_facts(lines: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The last line of the log in numbers, each traceable to it by its line number."""
    numbered = [(place, line) for place, line in enumerate(lines) if number(line.get("step")) is not None and "loss" in line]
    if not numbered:
        return []
    place, last = numbered[-1]
    shown = (
        ("step", "Last step"),
        ("loss", "Last loss"),
        ("tokens_per_second", "Tokens a second"),
        ("data_wait", "Waited for data"),
        ("grad_norm", "Gradient norm"),
    )
    found = [
        (
            title,
            figure(
                figures.share_text(last[key]) if key == "data_wait" else figures.count_text(last[key]),
                last[key],
                (place, key),
                "train.jsonl",
            ),
        )
        for key, title in shown
        if number(last.get(key)) is not None
    ]
    bad = sum(1 for _, line in numbered if number(line.get("loss")) is None)
    return [*found, ("Lines with a loss that is not finite", str(bad))] if bad else found


def event_row(event: dict[str, Any]) -> tuple[str, str, str]:
    rest = {key: value for key, value in event.items() if key not in ("time", "kind")}
    told = str(rest.pop("text")) if set(rest) == {"text"} else ", ".join(f"{key} {value}" for key, value in rest.items())
    return str(event.get("time", "")), str(event.get("kind", "")), masked(told)


def hashes(run: Mapping[str, Any]) -> list[tuple[str, str, Any, Any, tuple[str, ...]]]:
    """(stage, file, bytes, sha256, path in the ledger) of every output that the ledger names."""
    found = []
    for stage, raw in mapping(run.get("stages")).items():
        for name, entry in mapping(mapping(raw).get("outputs")).items():
            item = mapping(entry)
            found.append((stage, name, number(item.get("bytes")), item.get("sha256"), ("stages", stage, "outputs", name)))
    return found
