"""Fetch: the verifier, the heads to be judged and the prompts' revision, then no network any more.

A revision that the settings leave open is the newest commit at the first start of the run: it is
resolved once, recorded in `fetched.json` and kept for every later start of this run.

`fetched.json` says what was fetched and is what later stages depend on; `locations.json` says where
it lies on this machine, so that a run continued on another machine is not stale for its paths.
"""

from pathlib import Path
from typing import Any

from jobs.context import Context
from jobs.errors import MustFix
from jobs.run import HASHED_BYTES, digest
from jobs.stages import hub, prompts
from jobs.stages.preflight import misfits
from jobs.storage.files import sha256_file, write_json_atomically
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.tiny import CHECKPOINT

NAME = "fetch"
SETTINGS = ("verifier.model", "verifier.revision", "verifier.taps", "heads.candidates", "prompts")
# Nothing to do costs a moment, and the files may be gone on another machine.
ALWAYS = True


def inputs(context: Context) -> list[Path]:
    return []


def outputs(context: Context) -> list[Path]:
    return [context.path / "fetched.json", context.path / "locations.json"]


def run(context: Context) -> dict[str, Any]:
    settings = context.settings
    earlier = context.fetched() if (context.path / "fetched.json").exists() else {}
    found: dict[str, Any] = {"verifier": None, "heads": {}, "prompts": {}}
    places: dict[str, Any] = {"verifier": None, "heads": {}}
    for source, revision in hub.prompt_repositories(settings.prompts):
        found["prompts"][source] = _commit(source, revision, "prompts", "dataset", earlier.get("prompts", {}).get(source))
    if earlier.get("prompts") != found["prompts"]:
        # A wrong column is found in seconds here, and after half a terabyte below.
        prompts.check_data_sets(settings.prompts, {source: entry["revision"] for source, entry in found["prompts"].items()})
    verifier = settings.verifier
    found["verifier"], places["verifier"] = _one(context, verifier.model, verifier.revision, "verifier.revision", earlier.get("verifier"))
    for head in settings.heads.candidates:
        known = earlier.get("heads", {}).get(head.name)
        found["heads"][head.name], places["heads"][head.name] = _one(
            context, head.model, head.revision, f"heads.candidates, {head.name}", known
        )
    problems = misfits(settings, VerifierFacts.read(Path(places["verifier"])))
    if problems:
        raise MustFix("; ".join(problems), where=places["verifier"], remedy="correct the settings")
    write_json_atomically(context.path / "fetched.json", found)
    write_json_atomically(context.path / "locations.json", places)
    return {"repositories": 1 + len(found["heads"]), "bytes": found["verifier"]["bytes"] + sum(h["bytes"] for h in found["heads"].values())}


def _commit(name: str, revision: str | None, key: str, kind: str, earlier: dict[str, Any] | None) -> dict[str, Any]:
    revision = hub.require_commit(name, revision, key)
    if revision is None and earlier and earlier["model"] == name:
        revision = earlier["revision"]
    return {"model": name, "revision": hub.resolve(name, revision, kind)}


def _one(context: Context, model: str, revision: str | None, key: str, earlier: dict[str, Any] | None) -> tuple[dict[str, Any], str]:
    """(what it is, where it lies) of a checkpoint: the tiny one, one from the hub, or a local folder."""
    if hub.is_hub_id(model):
        chosen = _commit(model, revision, key, "model", earlier)
        folder = hub.download(context, model, chosen["revision"])
        return chosen | {"bytes": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())}, str(folder)
    folder = CHECKPOINT if model == "tiny" else Path(model).absolute()
    if not (folder / "config.json").is_file():
        raise MustFix(
            f"{model!r} holds no config.json", where=str(folder), remedy="name a checkpoint folder, a hub id (owner/name) or `tiny`"
        )
    files = [f for f in sorted(folder.iterdir()) if f.is_file()]
    with context.should_stop.breakable():
        # Weights of 540 GB are named by their sizes: reading them all would cost as long as loading them.
        content = {f.name: sha256_file(f) if f.stat().st_size <= HASHED_BYTES else f.stat().st_size for f in files}
    return {"model": model, "revision": digest(content)[:40], "bytes": sum(f.stat().st_size for f in files)}, str(folder)
