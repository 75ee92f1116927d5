"""The files that a run left, as the report reads them: a torn or missing one is a sentence on the page, never an error."""

import json
from pathlib import Path
from typing import Any

from jobs.reporting.figures import mapping


class RunFiles:
    """The files of a run as far as they can be read; what cannot be is said on the page."""

    def __init__(self, path: Path):
        self.path = path
        self.problems: list[str] = []
        self.run = self._object("run.json", expected=True)
        self.baseline = self._object("baseline.json")
        self.evaluation = self._object("evaluation.json")
        self.live = self._object("live.json")
        self.scaling = self._object("scaling.json")
        self.events = self._lines("events.jsonl")
        self.training = self._lines("train.jsonl")

    def _object(self, name: str, expected: bool = False) -> dict[str, Any]:
        file = self.path / name
        try:
            return mapping(json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            if expected:
                self.problems.append(f"{name} is not there: the run stopped before its ledger was written")
        except (OSError, ValueError) as error:
            self.problems.append(f"{name} cannot be read: {error}")
        return {}

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """Lines of a log; a torn last line is what a killed run leaves behind, any other bad line is said."""
        try:
            lines = (self.path / name).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            self.problems.append(f"{name} cannot be read: {error}")
            return []
        found = []
        for place, line in enumerate(lines, start=1):
            try:
                found.append(mapping(json.loads(line)))
            except ValueError:
                if line.strip() and place < len(lines):
                    self.problems.append(f"{name}, line {place}, is not JSON and was left out")
        return found
