"""The settings of a job from where they are said, later wins: the schema's defaults, the job's TOML file, the environment
(`EAGLE3_<SECTION>__<KEY>`, see `jobs.environment`), `--set section.key=value` (the value in TOML's notation; a bare word
counts as a string).

An unknown key anywhere is an error that names the nearest known one: a misspelt learning rate must not cost a night of
eight GPUs.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from jobs.environment import settings_in, unknown_in
from jobs.errors import MustFix
from jobs.settings import Settings
from jobs.wrong_settings import places, problem, unknown_keys

JOBS = ("hero", "local-test", "smoke")


def job_file(job: str | Path) -> Path:
    """The settings file of a job: one of the three shipped by name, or any .toml file by path."""
    path = Path(__file__).parent / f"{job}.toml" if str(job) in JOBS else Path(job)
    if not path.is_file():
        raise MustFix(
            f"There is no job {str(job)!r}", where=str(path.absolute()), remedy=f"take one of {', '.join(JOBS)} or a path to a .toml file"
        )
    return path


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))  # TOML is UTF-8 in any locale
    except UnicodeDecodeError as error:
        raise MustFix("The job file is not text in UTF-8", where=str(path), remedy="name a TOML file, or save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise MustFix(f"The job file is not valid TOML: {error}", where=str(path), remedy="correct that line") from error
    except OSError as error:
        raise MustFix(f"The job file cannot be read: {error.strerror}", where=str(path), remedy="give this user read permission") from error


def load(
    job: str | Path,
    *,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    base: Mapping[str, Any] | None = None,
) -> Settings:
    """The resolved settings of a job.

    overrides: `section.key=value` items of `--set`. base: settings of the run that is continued;
    they replace the job file. Raises MustFix naming every unknown key, or else every wrong value, at
    once, and where it was said: the file, the variable or the --set.
    """
    path = job_file(job)
    values: dict[str, Any] = {}
    _merge(values, _parsed(path) if base is None else base)
    known = [key for key, _ in documented()]
    said = settings_in(environment, known)  # dotted key -> what said it last, where that was not the file
    for key, name in said.items():
        _merge(values, _nested(key, environment[name], where=name))
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals:
            raise MustFix(f"--set {item} has no value", where="command line", remedy="write --set section.key=value")
        _merge(values, _nested(key.strip(), text, where=f"--set {item}"))
        said[key.strip()] = f"--set {key.strip()}"
    rental = values.get("rental")
    webhook = str(rental.get("webhook_variable")) if isinstance(rental, Mapping) else ""
    return validated(values, str(path), said, unknown_in(environment, known, also=[webhook]))


def validated(
    values: Mapping[str, Any], where: str, said: Mapping[str, str] = MappingProxyType({}), unread: Sequence[str] = ()
) -> Settings:
    """The settings of these values. where: what they come from, but for the keys of `said`, which has a place for each.

    unread: clauses about variables of the environment, which are as wrong as an unknown key. Raises MustFix.
    """
    problems = list(unknown_keys(values, Settings, [key for key, _ in documented()]))
    if problems or unread:
        found = ["environment"] * bool(unread) + places(problems, where, said)
        texts = [*unread, *(text for _, text in problems)]
        raise MustFix(
            "; ".join(texts), where=", ".join(found), remedy="correct the name, or unset the variable" if unread else "correct the key"
        )
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = [problem(e) for e in error.errors()]
        texts = [text for _, text in problems]
        raise MustFix("; ".join(texts), where=", ".join(places(problems, where, said)), remedy="correct the values") from error


def _nested(key: str, text: str, where: str) -> dict[str, Any]:
    """`a.b` and TOML text -> {"a": {"b": value}}; text that is no TOML value counts as a string."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    parts = key.split(".")
    if len(parts) < 2 or not all(parts):
        known = ", ".join(Settings.model_fields)
        raise MustFix(f"{key!r} names no setting", where=where, remedy=f"write section.key; the sections are {known}")
    for part in reversed(parts):
        value = {part: value}
    return value


def _merge(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def documented(model: type[BaseModel] = Settings, prefix: str = "") -> list[tuple[str, str]]:
    """Every settable key with its line of documentation, in the order of the schema."""
    rows = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            rows += documented(field.annotation, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, field.description or ""))
    return rows
