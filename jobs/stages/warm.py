"""Which existing head training starts from, as `heads.warm_start` and the baseline decide."""

import json
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import MustFix
from jobs.run import Context


@dataclass(frozen=True)
class WarmStart:
    name: str
    folder: Path
    taps: tuple[int, ...]  # the reading of its tap ids under which it scored better on the eval states


def chosen(context: Context) -> WarmStart | None:
    """The head to start from; None means from scratch. MustFix if the one asked for could not be judged."""
    wanted = context.settings.heads.warm_start
    judged = json.loads((context.path / "baseline.json").read_text())["heads"]
    candidates = {c.name: judged[c.name] for c in context.settings.heads.candidates if c.name in judged}
    if wanted == "none" or (wanted == "best" and not candidates):
        return None
    if wanted == "best":
        wanted = max(candidates, key=lambda name: candidates[name]["acceptance_length"]["mean"])
    if wanted not in candidates:
        raise MustFix(f"The head {wanted!r} could not be judged, so training cannot start from it", where="heads.warm_start", remedy="see the baseline's notes, or choose `best` or `none`")
    return WarmStart(wanted, Path(context.locations()["heads"][wanted]), tuple(candidates[wanted]["taps"]))
