"""How figures are read from a ledger and written for people.

The display, the plan and the report show the same run; they must not round or divide it in three
different ways. So the arithmetic (which counts become rates) and the notation (seconds, bytes,
money, intervals) stand here once. Nothing here raises on an absent key: a run that stopped early has
a ledger with holes in it, and that is exactly the ledger somebody wants to look at.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs.run import STAGES
from jobs.wording import counted

# Counts that mean something per second. Everything else (coverage, verdicts, ids) does not.
RATED = frozenset({"tokens", "response_tokens", "prompt_tokens", "rows", "positions", "steps", "bytes", "samples", "turns", "prompts"})
# What `prompts` counts as left out; other stages say `dropped`.
LEFT_OUT = ("duplicate", "too_long", "in_eval_too", "in_standard_too", "empty")
PER_SECOND = "_per_second"


@dataclass(frozen=True)
class StageRow:
    """One stage of a ledger: `seconds` of all its runs, `rates` per second of them, `dropped` by reason.

    `given_rates` are those the stage measured itself (`tokens_per_second`), without an engine start or a pause.
    """

    name: str
    state: str
    seconds: float | None
    counts: dict[str, Any]
    rates: dict[str, float]
    dropped: dict[str, int] = field(default_factory=dict)
    bytes: int | None = None
    cost: float | None = None

    @property
    def given_rates(self) -> dict[str, float]:
        found = {key.removesuffix(PER_SECOND): number(raw) for key, raw in self.counts.items() if key.endswith(PER_SECOND)}
        return {name: value for name, value in found.items() if value is not None}


def number(value: Any) -> float | None:
    """The value as a finite float, or None: a NaN loss is a gap in a curve, not a crash of the report."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def mapping(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def amount_of(cost: Any) -> float | None:
    """A cost is a plain amount or `{"amount", "currency"}`."""
    return number(mapping(cost).get("amount") if isinstance(cost, Mapping) else cost)


def stage_rows(ledger: Mapping[str, Any]) -> list[StageRow]:
    """Every stage of the ledger in the order it runs, any that this version does not know last; rates only where the stage is done and took time."""
    stages = mapping(ledger.get("stages"))
    known = [name for name in STAGES if name in stages]
    names = known + [name for name in stages if name not in STAGES]
    return [_stage_row(name, mapping(stages[name])) for name in names]


def _stage_row(name: str, entry: dict[str, Any]) -> StageRow:
    seconds = number(entry.get("seconds"))
    counts = mapping(entry.get("counts"))
    state = str(entry.get("state", "pending"))
    rates = {}
    if state == "done" and seconds:
        rates = {key: value / seconds for key, raw in counts.items() if key in RATED and (value := number(raw))}
        rates = {key: value for key, value in rates.items() if key + PER_SECOND not in counts}
    stored = number(entry.get("bytes"))
    return StageRow(
        name=name,
        state=state,
        seconds=seconds,
        counts=counts,
        rates=rates,
        dropped=dropped_of(counts),
        bytes=None if stored is None else int(stored),
        cost=amount_of(entry.get("cost")),
    )


def dropped_of(counts: Mapping[str, Any]) -> dict[str, int]:
    """{reason: how many} of `dropped_entries`."""
    return {reason: count for reason, count, _ in dropped_entries(counts)}


def dropped_entries(counts: Mapping[str, Any]) -> list[tuple[str, int, tuple[str, ...]]]:
    """(reason, how many, path in the counts): `dropped: {reason: n}` and `dropped_<reason>: n` are the two ways a stage tells it."""
    found = [(reason, int(value), ("dropped", reason)) for reason, raw in mapping(counts.get("dropped")).items() if (value := number(raw))]
    for key, raw in counts.items():
        value = number(raw)
        if value and (key.startswith("dropped_") or key in LEFT_OUT):
            found.append((key.removeprefix("dropped_").replace("_", " "), int(value), (key,)))
    total = number(counts.get("dropped"))
    return [("no reason given", int(total), ("dropped",))] if total and not found else found


def shares(counts: Any, steps: Any) -> list[float]:
    """Each count as a share of the steps, up to the first that is none; empty without steps."""
    whole = number(steps)
    if not whole or not isinstance(counts, list):
        return []
    return [value / whole for value in itertools.takewhile(lambda value: value is not None, map(number, counts))]


def head_rows(ledger: Mapping[str, Any]) -> list[tuple[str, float, float | None, float | None]]:
    """(head, mean, low, high) of the acceptance lengths, ascending, the trained head last.

    `baseline` is the ledger's second name for the best existing way to speculate: shown only if it stands alone.
    """
    rows = []
    acceptance = mapping(ledger.get("acceptance"))
    for name, raw in acceptance.items():
        if name == "baseline" and any(other == raw for key, other in acceptance.items() if key != name):
            continue
        figure = mapping(raw) or {"mean": raw}
        mean = number(figure.get("mean"))
        if mean is not None:
            rows.append((name, mean, number(figure.get("low")), number(figure.get("high"))))
    return sorted(rows, key=lambda row: (row[0] == "trained", row[1]))


# Notation ---------------------------------------------------------------------------------------


def seconds_text(seconds: float | None) -> str:
    """Two digits of meaning: 0.4 s, 12 s, 7.6 s, 14.4 min, 2.5 h, 3.1 d."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    limits = ((120, 1, "s"), (7200, 60, "min"), (2 * 86400, 3600, "h"), (math.inf, 86400, "d"))
    unit, name = next((unit, name) for limit, unit, name in limits if abs(seconds) < limit)
    value = seconds / unit
    if abs(value) < 0.1:
        return "0 s" if abs(value) < 0.005 else f"{value:.2f} {name}"
    return f"{value:.1f} {name}" if abs(value) < 100 else f"{value:,.0f} {name}"


def clock_text(seconds: float | None) -> str:
    """h:mm:ss, for what counts down."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--:--"
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def bytes_text(count: float | None) -> str:
    """Decimal units, as disks and links are sold: 28.8 GB is 28.8e9 bytes."""
    if count is None or not math.isfinite(count):
        return "-"
    for power, name in enumerate(("B", "kB", "MB", "GB", "TB", "PB")):
        value = count / 1000**power
        if abs(value) < 999.5 or name == "PB":
            break
    return f"{value:.0f} {name}" if power == 0 or value >= 100 else f"{value:.1f} {name}"


def count_text(value: Any) -> str:
    """Thousands separated; floats to four significant digits; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def share_text(share: Any) -> str:
    """A share between 0 and 1 in percent; one too small for a tenth of a percent is said to be under it."""
    value = number(share)
    if value is None:
        return str(share)
    return "under 0.1 %" if 0 < value < 0.001 else f"{100 * value:.1f} %"


def rate_text(rate: float, unit: str) -> str:
    """`unit` is a count's name: `tokens` gives "2,912 tokens/s", `bytes` gives "1.4 GB/s"."""
    if unit == "bytes" or unit.endswith("_bytes"):
        return f"{bytes_text(rate)}/s"
    text = f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 1 else f"{rate:.3g}"
    return f"{text} {unit.replace('_', ' ')}/s"


def counted_text(name: str, value: Any) -> str:
    if (name == "bytes" or name.endswith("_bytes")) and number(value) is not None:
        return f"{bytes_text(value)} {name.removesuffix('bytes').replace('_', ' ')}".strip()
    plain = name.replace("_", " ")
    if isinstance(value, bool):
        return plain if value else f"not {plain}"
    # "64 sequences", but "coverage 0.98" and "best ngram": only a number of things stands before its name.
    return counted(value, plain) if isinstance(value, int) and name.endswith("s") else f"{plain} {count_text(value)}"


def money_text(amount: float | None, currency: str = "") -> str:
    return "-" if amount is None else f"{amount:,.2f} {currency}".strip()


def is_shown(name: str) -> bool:
    """Counts that have no place of their own beside the counts: what was dropped and rates have."""
    return not name.startswith("dropped") and name not in LEFT_OUT and not name.endswith(PER_SECOND)


def main_counts(row: StageRow, limit: int = 4) -> str:
    """The counts worth a table cell: scalars only, in the order the stage gave them; of what there is none nothing is said."""
    scalar = {key: value for key, value in row.counts.items() if isinstance(value, float | str) or (isinstance(value, int) and value)}
    shown = [counted_text(key, value) for key, value in scalar.items() if is_shown(key)][:limit]
    if row.dropped:
        shown.append(f"{sum(row.dropped.values()):,} dropped")
    return ", ".join(shown)
