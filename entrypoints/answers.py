"""What commands answer about a run, as `--json` prints it: where it stands, and what it would do."""

import time
from pathlib import Path
from typing import Any

from jobs.errors import EXIT_DONE, JobError, MustFix
from jobs.reporting.figures import seconds_text
from jobs.run import METER_SECONDS, ON_REQUEST, STAGES, RunDirectory, is_asked_for
from jobs.settings import Settings

NOT_BEGUN = {"state": "pending", "seconds": 0.0, "counts": {}}


def summary(ledger: dict[str, Any], path: Path, loads: int) -> dict[str, Any]:
    return {
        "status": ledger.get("status"), "exit_code": ledger.get("exit_code"), "error": ledger.get("error"), "run_dir": str(path.absolute()),
        "stages": _stages(ledger), "verifier_loads": loads, "acceptance": {name: figure["mean"] for name, figure in ledger.get("acceptance", {}).items()},
        "published": ledger.get("published"), "cost": ledger.get("cost"), "saved": _saved(path),
    }  # fmt: skip


def standing(ledger: dict[str, Any], path: Path) -> str:
    """How a run ended, in a sentence, or whether somebody is at it: a run that was killed says `running` for ever."""
    status, error = str(ledger.get("status")), ledger.get("error")
    if error:
        return f"{status.capitalize()} with exit code {ledger.get('exit_code')}: {JobError(**error).sentence()}"
    if status == "done":
        return f"Done, published at {ledger['published']}." if ledger.get("published") else "Done."
    if status == "no_go":
        return f"No go: {(ledger.get('gate') or {}).get('why')}."
    quiet = time.time() - (path / "run.json").stat().st_mtime
    if quiet < 3 * METER_SECONDS:
        return f"Under way, last written {seconds_text(max(quiet, 0.0))} ago."
    return f"Nothing was written for {seconds_text(quiet)}, so no process seems to be at it: the same command again continues it."


def _stages(ledger: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {"state": stage["state"], "seconds": stage.get("seconds", 0.0), "counts": stage.get("counts") or {}}
        for name, stage in ledger.get("stages", {}).items()
    }


def _saved(path: Path) -> dict[str, Any] | None:
    """Where the run itself was saved last, for --resume-from."""
    from jobs.storage.saved_run import record_of

    record = record_of(path)
    return {"uri": record["uri"], "at": record["saved"]} if "uri" in record else None


def planned(settings: Settings, path: Path) -> dict[str, Any]:
    """`--dry-run`: the stages, with their states where a run would be continued, and the plan."""
    from jobs.reporting import plan as planning

    ledger = RunDirectory(path, read_only=True).ledger if (path / "run.json").exists() else {}
    stages, asked = _stages(ledger), [name for name in STAGES if is_asked_for(name, settings)]
    lines = [f"{settings.job.name} would {'go on' if ledger else 'run'} in {path.absolute()}:", ""]
    lines += [f"  {name:16} {stages.get(name, NOT_BEGUN)['state']}" if ledger else f"  {name}" for name in asked]
    try:
        plans = planning.for_all_machines(settings, None)
        lines += ["", *(["The whole job, what is done already included:"] if ledger else []), planning.render_plans(plans)]
    except MustFix as error:  # a verifier of unknown shape: fetch will tell it, the run needs no plan
        plans = []
        lines += ["", f"No plan: {error.sentence()}"]
    return {
        "status": "planned", "exit_code": EXIT_DONE, "error": None, "run_dir": str(path.absolute()),
        "stages": {name: stages.get(name, NOT_BEGUN) for name in STAGES if name not in ON_REQUEST}, "verifier_loads": 0, "acceptance": {}, "published": None,
        "on_request": [name for name in asked if name in ON_REQUEST],
        "cost": {"amount": 0.0, "currency": settings.rental.currency}, "settings": settings.as_dict(), "plans": [p.as_dict() for p in plans], "text": "\n".join(lines),
    }  # fmt: skip
