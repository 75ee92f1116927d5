"""The stages in order, and what happens between them: resume, staleness, signals, exit codes.

    preflight        everything that can fail, before money is spent
    fetch            verifier and existing heads, at pinned revisions
    prompts          conversations, split into train and eval by content
    generate.eval    the verifier answers the eval prompts; its states are kept     (one engine start
    baseline         existing heads judged on them; the gate may end the run here    serves all three)
    generate.train   the verifier answers the train prompts; its states are kept
    vocab            the draft vocabulary from what the verifier wrote
    train            the head
    evaluate         the head judged like the baseline
    live             on request: none and the winner through the real server
    package          the head as vLLM loads it, card and manifest
    push             to its destination, verified, manifest last
    scaling          on request: what less data would have given

The order spends money last. A stage whose inputs, settings and outputs are unchanged does nothing,
so running the same command again continues the run. Cheap stages that became stale run again by
themselves; paid ones refuse and say what changed, unless `--redo STAGE`.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from jobs.context import Context
from jobs.errors import EXIT_DONE, Interrupted, JobError, MustFix, as_job_error
from jobs.run import ON_REQUEST, PAID_STAGES, STAGES, identify, is_asked_for, now
from jobs.stages import baseline, evaluate, fetch, generate, live, package, preflight, prompts, push, scaling, train, vocab

PIPELINE = (
    preflight,
    fetch,
    prompts,
    generate.stage("eval"),
    baseline,
    generate.stage("train"),
    vocab,
    train,
    evaluate,
    live,
    package,
    push,
    scaling,
)
assert tuple(stage.NAME for stage in PIPELINE) == STAGES
# The last stage that talks to the verifier: its memory is given back afterwards.
LAST_ENGINE_STAGE = "generate.train"


def run_pipeline(context: Context, *, redo: Iterable[str] = (), only: str | None = None) -> str:
    """Run what is not done yet; returns `done` or `no_go`. Raises JobError, with the ledger saved."""
    ledger = context.run.ledger
    for name in redo:
        set_aside(context, name)
    gate = ledger["gate"]
    if only is None and gate and gate["verdict"] == "no_go":
        # What was forced once stays so: its paid stages would otherwise be lost to the next start that lacks the flag.
        gate["forced"] = gate["forced"] or context.force
    missed: JobError | None = None
    try:
        for stage in PIPELINE:
            if only not in (None, stage.NAME) or not is_asked_for(stage.NAME, context.settings):
                continue
            context.should_stop.raise_if_set()
            if _stopped_by_gate(context, stage.NAME):
                if ledger["stages"][stage.NAME]["state"] != "done":  # a baseline done again may say no after the training
                    ledger["stages"][stage.NAME] = {"state": "skipped"}
            elif getattr(stage, "ALWAYS", False) or not is_fresh(context, stage):
                missed = _run_or_miss(context, stage) or missed
            if stage.NAME == "fetch" and only is None and not _stopped_by_gate(context, LAST_ENGINE_STAGE):
                generate.read_ahead(context)
            if stage.NAME == LAST_ENGINE_STAGE:
                context.release_engine()
        if missed is not None:
            raise missed
        status = "no_go" if _says_no(context) else "done"
        finished = all(s["state"] in ("done", "skipped") for name, s in ledger["stages"].items() if is_asked_for(name, context.settings))
        _end(context, status if finished else "running", EXIT_DONE, None)
        return status
    except Exception as error:
        translated = translate(error, context.path)
        if isinstance(translated, Interrupted) and context.should_stop.reason:
            translated = context.should_stop.reason
        status = "interrupted" if isinstance(translated, Interrupted) else "failed"
        _end(context, status, translated.exit_code, translated.as_dict())
        if translated is error:
            raise
        raise translated from error
    finally:
        context.release_engine()


def _run_or_miss(context: Context, stage: Any) -> JobError | None:
    """Run a stage; the failure of a measurement that was asked for is returned, since the head can be published without it."""
    try:
        run_stage(context, stage)
    except Interrupted:
        raise
    except JobError as error:
        if stage.NAME not in ON_REQUEST:
            raise
        context.note(f"{stage.NAME} failed, the run goes on without it: {error}")
        return error
    return None


def run_stage(context: Context, stage: Any) -> None:
    """Run one stage and write its line of the ledger, whatever happens."""
    run, record = context.run, context.run.stage(stage.NAME)
    refuse_stale_work(context, stage)
    before = record.get("seconds", 0.0)
    record |= {
        "state": "running", "started": now(), "settings": declared_settings(context, stage), "inputs": _identities(context, stage.inputs(context)),
    }  # fmt: skip
    record.pop("error", None)
    run.save()
    run.event("stage started", stage=stage.NAME)
    context.display.stage_started(stage.NAME)
    try:
        with run.metered(stage.NAME, context.settings.rental.price_per_hour, context.display.measured):
            counts = stage.run(context)
        record |= {"state": "done", "counts": counts, "outputs": _identities(context, stage.outputs(context))}
        record["bytes"] = sum(item["bytes"] for item in record["outputs"].values())
    except Interrupted:
        record["state"] = "pending"
        raise
    except Exception as error:
        record |= {"state": "failed", "error": str(error)}
        raise
    finally:
        run.save()
        seconds = record["seconds"] - before
        run.event("stage ended", stage=stage.NAME, state=record["state"], seconds=round(seconds, 3))
        context.display.stage_finished(stage.NAME, record["state"], seconds, record.get("counts") or {})
        if context.backup and record["state"] == "done":
            context.backup.nudge()


def declared_settings(context: Context, stage: Any) -> dict[str, Any]:
    """The settings a stage says it depends on, flat: {"train.epochs": 1.0, …}."""
    flat: dict[str, Any] = {}
    for prefix in stage.SETTINGS:
        value = context.settings.value(prefix)
        if isinstance(value, dict):
            flat |= {f"{prefix}.{key}": item for key, item in value.items()}
        else:
            flat[prefix] = value
    return flat


def what_changed(context: Context, stage: Any) -> list[str]:
    """Why an earlier result of this stage no longer stands; empty if it does, or if there is none."""
    record = context.run.stage(stage.NAME)
    if "settings" not in record:
        return []
    current, earlier = declared_settings(context, stage), record["settings"]
    deciding = sorted((current.keys() | earlier.keys()) - getattr(stage, "FREE_SETTINGS", frozenset()))
    changes = [f"{key} was {earlier.get(key)!r}, is {current.get(key)!r}" for key in deciding if current.get(key) != earlier.get(key)]
    inputs, known = _identities(context, stage.inputs(context)), record.get("inputs", {})
    changes += [f"the input {path} is another one" for path in sorted(inputs.keys() | known.keys()) if inputs.get(path) != known.get(path)]
    return changes


def is_fresh(context: Context, stage: Any) -> bool:
    record = context.run.stage(stage.NAME)
    if record["state"] != "done" or what_changed(context, stage):
        return False
    for path, identity in record["outputs"].items():
        full = context.path / path
        if not full.exists():
            if stage.NAME in PAID_STAGES:
                raise MustFix(
                    f"Stage {stage.NAME} is done but {path} is gone", where=str(full), remedy=f"restore it or pay for it again with --redo {stage.NAME}"
                )  # fmt: skip
            return False
        if identify(full)["bytes"] != identity["bytes"] and stage.NAME not in PAID_STAGES:
            return False
    return True


def refuse_stale_work(context: Context, stage: Any) -> None:
    """Paid work, finished or begun, is not thrown away because a setting changed."""
    changes = what_changed(context, stage)
    if changes and stage.NAME in PAID_STAGES:
        context.run.take_settings_back()
        raise MustFix(
            f"Stage {stage.NAME} was begun under other settings or inputs: {'; '.join(changes)}",
            where=str(context.path), remedy=f"go back to them, take another --run-dir, or pay again with --redo {stage.NAME}",
        )  # fmt: skip


def set_aside(context: Context, name: str) -> None:
    """Forget a stage's result for `--redo`; its files are kept under `superseded/`, never deleted."""
    stage = {stage.NAME: stage for stage in PIPELINE}[name]
    folder = context.path / "superseded" / f"{name}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    for path in stage.outputs(context):
        if path.exists() and path.is_relative_to(context.path):
            target = folder / path.relative_to(context.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    if name == "baseline":
        context.run.ledger["gate"] = None
    context.run.ledger["stages"][name] = {"state": "pending"}
    context.run.save()
    context.run.event("redo", stage=name, kept=str(folder))


def translate(error: Exception, path: Path) -> JobError:
    """Any error in the form every expected one has."""
    if isinstance(error, torch.OutOfMemoryError):
        return MustFix(
            f"The GPU's memory is used up: {str(error).splitlines()[0]}", where=str(path),
            remedy="lower verifier.gpu_memory_utilization if the verifier is loaded, and see what else runs on that GPU",
        )  # fmt: skip
    return as_job_error(error, str(path))


def _stopped_by_gate(context: Context, name: str) -> bool:
    return _says_no(context) and STAGES.index(name) > STAGES.index("baseline")


def _says_no(context: Context) -> bool:
    gate = context.run.ledger["gate"]
    return bool(gate) and gate["verdict"] == "no_go" and not gate["forced"]


def _identities(context: Context, paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    named = {}
    for path in paths:
        key = str(path.relative_to(context.path)) if path.is_relative_to(context.path) else str(path)
        if path.exists():
            named[key] = identify(path)
    return named


def _end(context: Context, status: str, exit_code: int, error: dict[str, Any] | None) -> None:
    context.run.ledger |= {"status": status, "exit_code": exit_code, "error": error}
    context.run.save()
    context.run.event("run ended", status=status, exit_code=exit_code)
