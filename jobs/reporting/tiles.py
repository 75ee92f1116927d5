"""What the report says of the run as a whole: the tiles under the verdict, and what a run that is not over still takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from jobs.reporting import figures
from jobs.reporting.figures import mapping, number
from jobs.reporting.traced import figure, masked

FORECAST = "forecast(run.json)"  # a figure computed by forecast.py, from that file alone


def facts(run: Mapping[str, Any], stages: Sequence[figures.StageRow], expected: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """(title, value) of each tile; expected: `forecast` of the run."""
    settings, machine = mapping(run.get("settings")), mapping(run.get("machine"))
    verifier = mapping(settings.get("verifier"))
    found: list[tuple[str, Any]] = []
    if verifier.get("model"):
        found.append(("Verifier", masked(verifier["model"])))
    if machine.get("name"):
        found.append(("Machine", masked(machine["name"])))
    total = sum(row.seconds or 0.0 for row in stages)
    if total:
        found.append(
            (
                "Time in stages",
                Markup('<data value="{}" data-sum="run.json#/stages/*/seconds">{}</data>').format(total, figures.seconds_text(total)),
            )
        )
    if expected is not None and expected["seconds_left"] is not None:
        found.append(("Still expected", _between(expected["seconds_left"], ("seconds_left",), figures.seconds_text)))
    found += _cost(run, expected)
    loads = number(run.get("verifier_loads"))
    if loads is not None:
        found.append(("Verifier loads", figure(f"{loads:.0f}", run["verifier_loads"], ("verifier_loads",))))
    return found


def is_priced(run: Mapping[str, Any]) -> bool:
    """Whether the machine has a price, or had one."""
    return bool(figures.amount_of(run.get("cost")) or number(mapping(mapping(run.get("settings")).get("rental")).get("price_per_hour")))


def expected_rows(expected: Mapping[str, Any] | None) -> list[tuple[str, Markup, str]]:
    """(stage, seconds left, by what they are known) of a run that is not over."""
    stages = expected["stages"] if expected is not None else {}
    return [
        (name, _between(left, ("stages", name), figures.seconds_text), "its own progress" if left["measured"] else "the plan")
        for name, left in stages.items()
    ]


def _cost(run: Mapping[str, Any], expected: Mapping[str, Any] | None) -> list[tuple[str, Markup]]:
    """So far and in all, or of a run that is over; nothing where no price was ever set."""
    cost = run.get("cost")
    amount, currency = figures.amount_of(cost), str(mapping(cost).get("currency") or "")
    if amount is None or not is_priced(run):
        return []
    so_far = figure(figures.money_text(amount, currency), amount, ("cost", "amount") if isinstance(cost, Mapping) else ("cost",))
    if expected is None or expected["cost_in_all"] is None:
        return [("Cost" if expected is None else "Cost so far", so_far)]
    in_all = _between(expected["cost_in_all"], ("cost_in_all",), figures.money_text)
    return [("Cost so far", so_far), ("Cost expected in all", Markup("{} {}").format(in_all, currency))]


def _between(value: Mapping[str, float], path: Sequence[Any], text: Any) -> Markup:
    """Low to high, each with its place in the forecast; one of them where both read the same."""
    low, high = (figure(text(value[end]), value[end], (*path, end), file=FORECAST) for end in ("low", "high"))
    return high if text(value["low"]) == text(value["high"]) else Markup("{} to {}").format(low, high)
