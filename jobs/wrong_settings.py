"""What is wrong with settings, in words: which key, the nearest known one, and where it was said.

A problem is a dotted key and the clause that is told of it; settings that contradict each other have no
key of their own ("") and name theirs in the clause.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

Problem = tuple[str, str]


def unknown_keys(values: Mapping[str, Any], model: type[BaseModel], known: Collection[str], prefix: str = "") -> Iterator[Problem]:
    """Keys that the model of settings does not have. known: all that can be set, for the nearest one."""
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is None:
            yield prefix + key, f"unknown setting {prefix}{key}{_nearest(prefix + key, known)}"
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            if isinstance(value, Mapping):
                yield from unknown_keys(value, field.annotation, known, f"{prefix}{key}.")
            else:
                yield prefix + key, f"{prefix}{key} is a section, not a value"


def _nearest(key: str, known: Collection[str]) -> str:
    """` (did you mean …?)` with the nearest known key or section, comparing whole keys and, failing that, last parts."""
    names = [*known, *dict.fromkeys(name.partition(".")[0] for name in known)]
    match = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if not match:
        last = {name.rpartition(".")[2]: name for name in names}
        match = [last[m] for m in difflib.get_close_matches(key.rpartition(".")[2], list(last), n=1, cutoff=0.6)]
    return f" (did you mean {match[0]}?)" if match else ""


def problem(error: Mapping[str, Any]) -> Problem:
    """One of pydantic's errors."""
    key = ".".join(str(part) for part in error["loc"])
    text = str(error["msg"]).removeprefix("Value error, ")
    text = text.replace("valid tuple", "list").replace("valid dictionary", "table")  # as TOML calls them
    return key, f"{key} = {error['input']!r}: {text}" if key else text


def places(problems: Iterable[Problem], where: str, said: Mapping[str, str]) -> list[str]:
    """Where the wrong keys were said, each place once: `said` has one for a key, all others are from `where`."""
    found = []
    for key, text in problems:
        of = [
            place
            for name, place in said.items()
            if (_related(name, key) if key else re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text))
        ]
        found += of or [where]
    return list(dict.fromkeys(found))


def _related(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
