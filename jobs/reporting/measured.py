"""What the report shows beside the acceptance of the heads: groups, standard prompts, live speed, scaling.

Every value comes with the file and the path it stands at, so that the page can be held to it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from jobs.reporting.figures import mapping, number
from jobs.reporting.public_cards import PublicCard, cards_for, differences
from jobs.settings import Settings
from jobs.wording import counted

ORDER = ("domain", "thinking", "position", "source")
TITLES = {"domain": "By domain", "thinking": "Inside and outside <think>", "position": "By position in the answer", "source": "By source"}
LABELS_SHOWN = 8


@dataclass(frozen=True)
class Cell:
    """A value and where it stands; `low` and `high` stand beside it under those names."""

    value: float | None
    file: str = ""
    path: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    beside: tuple[Any, ...] = ()  # path of the object that holds low and high


def group_tables(heads: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One table a dimension: acceptance length of each head by label, the smallest labels of a long one summed."""
    found = {name for head in heads for name in head["groups"]}
    tables = []
    for dimension in [name for name in ORDER if name in found] + sorted(found - set(ORDER)):
        labels = {label for head in heads for label in mapping(head["groups"].get(dimension))}
        shown = next((mapping(head["others"].get(dimension)).get("shown") for head in heads if head["others"].get(dimension)), None)
        labels = [label for label in shown if label in labels] if isinstance(shown, list) else sorted(labels, key=_in_order)
        rows = [(label, [_group_cell(head, dimension, label) for head in heads]) for label in labels]
        rest = next((count for head in heads if (count := number(mapping(head["others"].get(dimension)).get("labels")))), None)
        if rest and isinstance(shown, list):
            rows.append((f"the {counted(int(rest), 'others')} together", [_rest_cell(head, dimension) for head in heads]))
        elif len(rows) > LABELS_SHOWN:  # judged before the sum of the others was kept
            left = len(rows) - LABELS_SHOWN
            rows = [*rows[:LABELS_SHOWN], (f"and {left} more in {heads[-1]['file']}", [Cell(None) for _ in heads])]
        if len(rows) > 1 or dimension not in TITLES:  # one label is the whole again
            tables.append(
                {
                    "title": TITLES.get(dimension, f"By {dimension}"),
                    "dimension": dimension,
                    "heads": [head["name"] for head in heads],
                    "rows": rows,
                }
            )
    return tables


def _in_order(label: str) -> tuple[float, str]:
    """Ranges of positions by where they begin, other labels by name."""
    begin = re.match(r"\d+", label)
    return (float(begin[0]) if begin else -1.0), label


def _group_cell(head: Mapping[str, Any], dimension: str, label: str) -> Cell:
    raw = mapping(head["groups"].get(dimension)).get(label)
    beside = (*head["path"], "groups", dimension, label)
    if not isinstance(raw, Mapping):
        return Cell(number(raw), head["file"], beside)
    key = "mean_acceptance_length" if "mean_acceptance_length" in raw else "mean"
    return Cell(number(raw.get(key)), head["file"], (*beside, key), number(raw.get("low")), number(raw.get("high")), beside)


def _rest_cell(head: Mapping[str, Any], dimension: str) -> Cell:
    value = number(mapping(head["others"].get(dimension)).get("mean_acceptance_length"))
    return Cell(value, head["file"], (*head["path"], "others", dimension, "mean_acceptance_length"))


def domain_gains(evaluation: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (label, mapping(raw))
        for label, raw in mapping(evaluation.get("gains_by_domain")).items()
        if _has(mapping(raw), "mean", "low", "high")
    ]


def standard_table(heads: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Judged heads and public cards by standard set, with what differs between them; None without a set."""
    judged = [head for head in heads if head["standard"]]
    if not judged:
        return None
    sets = list(dict.fromkeys(name for head in judged for name in head["standard"]))
    rows = [(head["name"], [_standard_cell(head, name) for name in sets]) for head in judged]
    cards, differ = _cards(settings)
    return {
        "sets": sets,
        "rows": rows,
        "cards": [(card, [card.lengths.get(name) for name in sets]) for card in cards],
        "differences": differ,
    }


def _standard_cell(head: Mapping[str, Any], name: str) -> Cell:
    length = mapping(mapping(head["standard"].get(name)).get("acceptance_length"))
    beside = (*head["path"], "standard", name, "acceptance_length")
    return Cell(number(length.get("mean")), head["file"], (*beside, "mean"), number(length.get("low")), number(length.get("high")), beside)


def _cards(settings: Mapping[str, Any]) -> tuple[tuple[PublicCard, ...], list[str]]:
    """A ledger of another version may hold settings this program does not know: then there is nothing to compare with."""
    try:
        known = Settings.model_validate(settings)
    except (ValidationError, ImportError):
        return (), []
    return cards_for(known), differences(known) if cards_for(known) else []


def live_table(live: Mapping[str, Any]) -> dict[str, Any] | None:
    """Measurements by concurrency and way; None where nothing was measured."""
    ways, winner = mapping(live.get("ways")), str(live.get("winner"))
    errors = [(way, str(mapping(of).get("error"))) for way, of in ways.items() if mapping(of).get("error")]
    numbers = sorted({c for of in ways.values() for c in mapping(mapping(of).get("runs"))}, key=lambda c: (len(c), c))
    rows = []
    for concurrency in numbers:
        for way, of in ways.items():
            run = mapping(mapping(mapping(of).get("runs")).get(concurrency))
            if run:
                path = ("ways", way, "runs", concurrency)
                cells = {key: Cell(number(run.get(key)), "live.json", (*path, key)) for key in LIVE_COLUMNS}
                gain = Cell(
                    number(mapping(live.get("speedup")).get(concurrency)) if way == winner else None, "live.json", ("speedup", concurrency)
                )
                rows.append((concurrency, way, cells, gain))
    if not rows and not errors:
        return None
    same = [
        (kind.replace("_", " "), concurrency, Cell(number(value), "live.json", ("same_answers", kind, concurrency)))
        for kind, of in mapping(live.get("same_answers")).items() for concurrency, value in mapping(of).items() if number(value) is not None
    ]  # fmt: skip
    replay = Cell(number(mapping(live.get("replay")).get("mean")), "live.json", ("replay", "mean"))
    told = {"requests": number(live.get("requests")), "sampling": mapping(live.get("sampling")), "replay": replay, "winner": winner}
    return {"rows": rows, "same": same, "parted": _parted(live), "errors": errors, **told}


def _parted(live: Mapping[str, Any]) -> list[tuple[str, str, dict[str, Cell], Any]]:
    """(pair of ways, concurrency, figures, whether the winner's rate is above chance) of every comparison token by token."""
    pairs = [(kind, c, mapping(one)) for kind, of in mapping(live.get("first_divergences")).items() for c, one in mapping(of).items()]
    return [
        (
            kind.replace("_", " "),
            concurrency,
            {key: Cell(number(one[key]), "live.json", ("first_divergences", kind, concurrency, key)) for key in DIVERGENCES},
            one.get("more_than_chance"),
        )
        for kind, concurrency, one in pairs
        if _has(one, *DIVERGENCES)
    ]


def drafted(head: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's own count of a head that drafted for the eval split, with the replay's beside it; empty where it did not."""
    live = mapping(head.get("live"))
    if not _has(live, "mean", "drafts"):
        return {}
    return live | {"replay": replay if _has(replay := mapping(live.get("replay")), "mean") else {}}


LIVE_COLUMNS = ("output_throughput", "median_itl_ms", "p99_itl_ms", "median_tpot_ms", "median_ttft_ms", "spec_decode_acceptance_length")
DIVERGENCES = ("per_1000_tokens", "diverged", "answers")


def scaling_rows(scaling: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """(place in scaling.json, row) of every share that was judged."""
    rows = scaling.get("rows")
    found = enumerate(map(mapping, rows)) if isinstance(rows, list) else ()
    return [
        (place, row)
        for place, row in found
        if _has(row, "share", "samples", "tokens") and _has(mapping(row.get("acceptance_length")), "mean")
    ]


def _has(entry: Mapping[str, Any], *keys: str) -> bool:
    return all(number(entry.get(key)) is not None for key in keys)
