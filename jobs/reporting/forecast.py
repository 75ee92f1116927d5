"""A run that is not over: how long it has taken, what it still takes, and what both cost.

The display, `status` and the report say the same because they all ask here. It follows from the ledger
alone, so whoever reads a figure can compute it again. What is not begun is taken from the plan for the
run's machine, with what this run has measured of it; of a stage that is under way its own progress counts.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from jobs.errors import MustFix
from jobs.reporting import figures
from jobs.reporting.figures import mapping, number
from jobs.reporting.machines import Machine, Rates, calibrate, for_verifier, machine_of, with_disk
from jobs.reporting.plan import Plan, plan, span, verifier_size
from jobs.reporting.stage_times import ENGINE_START, ZERO
from jobs.reporting.workload import Range, VerifierSize
from jobs.settings import Settings

ON_THE_ENGINE = ("generate.eval", "generate.train")
LEFT_IN = ("pending", "running", "failed")
# From here on a stage's own progress says more than its plan: before, one answer more or less is most of the rate.
MEASURED_SECONDS, MEASURED_SHARE = 30.0, 0.05


def forecast(ledger: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a run has taken and still takes; None for one that is over, or has no stages yet. JSON-able.

    `seconds` of all stages in all starts; `seconds_left` {low, high}, None where the plan knows no such machine or verifier;
    `stages` {name: {low, high, measured}} of those that are left, in seconds, `measured` if by the stage's own progress.
    `cost`, `cost_left` {low, high} and `cost_in_all` {low, high} in `currency`, None where no price is set.
    `text` says it in a sentence, `line` in a few words for the display.
    """
    stages = mapping(ledger.get("stages"))
    if not stages or ledger.get("status") in ("done", "no_go"):
        return None
    cost = mapping(ledger.get("cost"))
    price = number(mapping(mapping(ledger.get("settings")).get("rental")).get("price_per_hour")) or 0.0
    spent = number(cost.get("amount")) or 0.0
    found: dict[str, Any] = {
        "seconds": sum(number(mapping(record).get("seconds")) or 0.0 for record in stages.values()), "seconds_left": None, "stages": {},
        "cost": spent if price or spent else None, "cost_left": None, "cost_in_all": None, "currency": str(cost.get("currency") or ""),
    }  # fmt: skip
    planned, late = _planned(ledger), []
    if planned is not None:
        left, late = _left(planned, ledger)
        whole = sum((seconds for seconds, _ in left.values()), ZERO)
        found["seconds_left"] = whole.as_dict()
        found["stages"] = {name: seconds.as_dict() | {"measured": measured} for name, (seconds, measured) in left.items()}
        if price:
            paid = whole.times(price / 3600)
            found |= {"cost_left": paid.as_dict(), "cost_in_all": (paid + Range.exactly(spent)).as_dict()}
    return found | {"text": _sentence(found, planned, late), "line": _line(found)}


def told(ledger: Mapping[str, Any]) -> str:
    """One sentence about the time and the money of a run: so far and to the end, or of one that is over in all."""
    expected = forecast(ledger)
    if expected is not None:
        return expected["text"]
    seconds = sum(row.seconds or 0.0 for row in figures.stage_rows(ledger))
    amount = figures.amount_of(ledger.get("cost"))
    paid = f", cost {figures.money_text(amount, str(mapping(ledger.get('cost')).get('currency') or ''))}" if amount else ""
    return f"In all {figures.seconds_text(seconds)}{paid}."


def _planned(ledger: Mapping[str, Any]) -> Plan | None:
    """The plan for the run's machine; None where the table lacks it, and for settings of another version or an unknown verifier."""
    machine = machine_of(ledger)
    if machine is None:
        return None
    try:
        settings = Settings.model_validate(ledger.get("settings") or {})
        verifier = verifier_size(settings)
        return plan(settings, _rates(ledger, machine, verifier), machine, verifier=verifier)
    except (MustFix, ValidationError, ImportError):
        return None


def _rates(ledger: Mapping[str, Any], machine: Machine, verifier: VerifierSize) -> Rates:
    """The machine's rates with what this run has measured.

    The eval split is small: the engine warms up in it and its batch is seldom full. So its rate is the least
    that the train split reaches, not what it reaches (332 tokens/s and 1,329 in a smoke run).
    """
    table = for_verifier(machine.rates, verifier)
    try:
        found = calibrate(ledger, table)
    except MustFix:  # nothing is finished yet
        return with_disk(table, ledger)
    if mapping(mapping(ledger.get("stages")).get("generate.train")).get("state") == "done":
        return found
    at_least = {name: _at_least(getattr(found, name), getattr(table, name)) for name in ("generate", "extract")}
    return replace(found, **at_least)


def _at_least(measured: Range, known: Range) -> Range:
    return Range(max(measured.low, known.low), max(measured.low, known.high))


def _left(planned: Plan, ledger: Mapping[str, Any]) -> tuple[dict[str, tuple[Range, bool]], list[str]]:
    """({stage: (seconds left, whether measured)}, stages that have outlasted their plan unmeasured)."""
    stages = mapping(ledger.get("stages"))
    records = {stage.name: mapping(stages.get(stage.name) or {"state": "pending"}) for stage in planned.stages}
    left: dict[str, tuple[Range, bool]] = {}
    late = []
    start = planned.stage(ENGINE_START).seconds if _engine_is_to_start(ledger, records) else ZERO
    for stage in planned.stages:
        record = records[stage.name]
        if stage.name == ENGINE_START or record.get("state") not in LEFT_IN:
            continue
        seconds, measured, over = _of_stage(stage.seconds, record, start if stage.name in ON_THE_ENGINE else ZERO)
        if stage.name in ON_THE_ENGINE:
            start = ZERO  # paid with the first of them that is left
        left[stage.name] = (seconds, measured)
        late += [stage.name] if over else []
    return left, late


def _engine_is_to_start(ledger: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether answers are left and this start of the run has not loaded the verifier; one that stopped has lost it."""
    if not any(records[name].get("state") in LEFT_IN for name in ON_THE_ENGINE):
        return False
    loads, before = (number(ledger.get(name)) or 0.0 for name in ("verifier_loads", "loads_before"))
    return ledger.get("status") != "running" or loads <= before


def _of_stage(planned: Range, record: Mapping[str, Any], start: Range) -> tuple[Range, bool, bool]:
    """(seconds left, whether measured, whether it is past its plan); `start`: of the engine, still to come or going on in it."""
    progress = mapping(record.get("progress"))
    done, total, first, counted = (number(progress.get(key)) for key in ("done", "total", "from", "seconds"))
    if done is None or not total or first is None or counted is None:
        taken, whole = number(record.get("seconds")) or 0.0, planned + start
        return _less(whole, taken), False, taken > whole.high
    if done >= total:
        return start, True, False
    rates = [rate for rate in ((done - first) / counted if counted else 0.0, number(progress.get("per_second"))) if rate]
    if rates and (counted >= MEASURED_SECONDS or done - first >= MEASURED_SHARE * total):
        # Since this start began and over the last minute: how far the two are apart is how steady the stage is.
        return Range((total - done) / max(rates), (total - done) / min(rates)) + start, True, False
    rest = planned.times((total - first) / total)
    return _less(rest, counted) + start, False, counted > rest.high


def _less(whole: Range, taken: float) -> Range:
    return Range(max(whole.low - taken, 0.0), max(whole.high - taken, 0.0))


def _sentence(found: Mapping[str, Any], planned: Plan | None, late: list[str]) -> str:
    text = f"So far {figures.seconds_text(found['seconds'])}; "
    if planned is None:
        text += "what is left is not known, there is no plan for this machine and verifier"
    else:
        measured = [name for name, stage in found["stages"].items() if stage["measured"]]
        by = f"by the progress of {' and '.join(measured)} and " if measured else ""
        text += f"to the end {_more(found)} more {by}by the plan for {planned.machine}"
    if late:
        text += f", which {' and '.join(late)} {'has' if len(late) == 1 else 'have'} outlasted"
    return f"{text}{_money(found)}."


def _line(found: Mapping[str, Any]) -> str:
    """The sentence in the 80 columns of a terminal, hence without the cents of a large amount."""
    text = f"elapsed {figures.clock_text(found['seconds'])}"
    if found["seconds_left"]:
        text += f", {_more(found)} more"
    if found["cost"] is not None:
        in_all = f" of {span(Range(**found['cost_in_all']), _round)}" if found["cost_in_all"] else ""
        text += f", cost {_round(found['cost'])}{in_all} {found['currency']}"
    return text


def _round(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else figures.money_text(amount)


def _more(found: Mapping[str, Any]) -> str:
    left = Range(**found["seconds_left"])
    return span(left) if left.high else "0 s"


def _money(found: Mapping[str, Any]) -> str:
    if found["cost"] is None:
        return ""
    so_far = f"; cost so far {figures.money_text(found['cost'])}"
    in_all = f", in all {span(Range(**found['cost_in_all']), figures.money_text)}" if found["cost_in_all"] else ""
    return f"{so_far}{in_all} {found['currency']}"
