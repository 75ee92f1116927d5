"""From a parsed command line to a run: settings, run directory, signals, display, and the final word."""

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from entrypoints.answers import planned, standing, summary
from jobs.context import Context, StopSignal
from jobs.environment import ENVIRONMENT_PREFIX
from jobs.errors import EXIT_DONE, Interrupted, JobError, MustFix, unwritable_run_directory
from jobs.job_file import load
from jobs.rental import LAST_WORDS_SECONDS, RentalClock, RentalWatch, ended, say_what_is_saved
from jobs.run import ON_REQUEST, STAGES, RunDirectory, is_asked_for
from jobs.settings import RentalSettings, Settings
from jobs.wording import counted


def job(
    name: str, *, run_dir: Path | None, overrides: Sequence[str], dry_run: bool, redo: Sequence[str], force: bool, resume_from: str | None = None
) -> dict[str, Any]:  # fmt: skip
    for stage_name in redo:
        _known_stage(stage_name)
    began = time.monotonic()
    job_name = _job_name(name, overrides)
    path = run_dir or Path("runs") / job_name
    if dry_run:
        return planned(_asked_for(redo, load(name, overrides=overrides, base=_earlier_settings(path, job_name))), path)
    with _failure_ends_rental(lambda: load(name, overrides=overrides), path):
        if resume_from:
            from jobs.backup import bring_back

            bring_back(resume_from, path, load(name, overrides=overrides))
        settings = load(name, overrides=overrides, base=_earlier_settings(path, job_name))
    _asked_for(redo, settings)
    file = None
    with contextlib.suppress(MustFix):  # by itself it may be incomplete: what counts is what it is together with the rest
        file = load(name, environment={})
    return _run(settings, path, redo=redo, force=force, file=file, began=began)


def stage(name: str, path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    _known_stage(name)
    base = RunDirectory(path, read_only=True).ledger["settings"]
    settings = _asked_for([name], load("smoke", overrides=overrides, base=base))
    if name == "train" and int(os.environ.get("RANK", 0)):
        from jobs.draft.team import train_along

        # One of the processes of `torchrun`: the first one keeps the run, and says how it goes.
        train_along(settings.train.device, settings.train.accumulate, path.absolute())
        return {"rank": int(os.environ["RANK"])}
    return _run(settings, path, only=name)


def preflight(name: str, run_dir: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Everything that can fail, on the disk the run would be on, without beginning one."""
    path = (run_dir or Path("runs") / _job_name(name, overrides)).absolute()
    settings = load(name, overrides=overrides, base=_earlier_settings(path, _job_name(name, overrides)))
    disk = next(folder for folder in (path, *path.parents) if folder.exists())
    try:
        folder = tempfile.TemporaryDirectory(prefix=".eagle3-preflight-", dir=disk)
    except OSError as error:
        raise unwritable_run_directory(path, error) from error
    with folder:
        try:
            result = _run(settings, Path(folder.name), only="preflight", report=False)
        except JobError as error:
            # The folder that was measured is gone by now: name the one it stood for, and no report in it.
            error.message, where = error.message.replace(folder.name, str(path)), error.where or ""
            error.where = None if where.endswith("preflight.json") else where.replace(folder.name, str(path)) or None
            error.problems = [problem.replace(folder.name, str(path)) for problem in error.problems]
            _as_job_error(error, path).summary |= {"error": error.as_dict(), "run_dir": str(path)}
            raise
        found = json.loads((Path(folder.name) / "preflight.json").read_text())
    text = f"{len(found['checks'])} checks passed for {settings.job.name} in {path}"
    return result | {"run_dir": str(path), "checks": found["checks"], "measured": found["measured"], "text": text}


def plan(job_name: str, overrides: Sequence[str], calibrate: Path | None, amount: float | None) -> dict[str, Any]:
    from jobs.reporting import choices
    from jobs.reporting import plan as planning

    ledger = RunDirectory(calibrate, read_only=True).ledger if calibrate else None
    settings = load(job_name, overrides=overrides)
    plans = planning.for_all_machines(settings, ledger)
    asked = choices.answers(plans, settings, amount=amount)
    text = planning.render_plans(plans, [answer["text"] for answer in asked.values()])
    return {"status": "planned", "plans": [p.as_dict() for p in plans], "answers": asked, "text": text}


def status(path: Path) -> dict[str, Any]:
    from jobs.reporting.display import summary_text
    from jobs.reporting.forecast import forecast, told

    ledger = RunDirectory(path, read_only=True).ledger
    expected, text = forecast(ledger), f"{summary_text(ledger)}\n{told(ledger)}\n{standing(ledger, path)}"
    return summary(ledger, path, loads=ledger["verifier_loads"]) | {
        "exit_code": EXIT_DONE,
        "run_exit_code": ledger["exit_code"],
        "forecast": expected,
        "text": text,
    }


def pull(uri: str, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    from jobs.backup import restored
    from jobs.storage import bucket

    settings = load("smoke", overrides=overrides)
    if bucket.destination(uri, settings.push).read_small(bucket.MANIFEST) is None:
        state = restored(uri, folder, settings, RentalClock(RentalSettings()))  # no rented machine is waiting for it
        if state is not None:
            return {
                "files": sorted(state["files"]),
                "folder": str(folder),
                "text": f"the run saved at {state['saved']} is in {folder}: {counted(len(state['files']), 'files')} verified",
            }
    manifest = bucket.pull(uri, folder, settings.push)
    return {"files": manifest["files"], "folder": str(folder), "text": f"{counted(len(manifest['files']), 'files')} verified in {folder}"}


def save(path: Path, uri: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The run itself to a bucket or folder, hidden states and newest checkpoint included; nobody may work in it meanwhile."""
    from jobs.storage.saved_run import RunSaver

    run = RunDirectory(path)
    should_stop = StopSignal()
    should_stop.install()
    try:
        if "run_id" not in run.ledger:
            raise MustFix("There is no run here that could be saved", where=str(path), remedy="name a run directory of this version")
        settings = load("smoke", overrides=overrides, base=run.ledger["settings"])
        done = RunSaver(run.path, uri, settings.push, run_id=run.ledger["run_id"]).save(should_stop)
    finally:
        should_stop.restore()
        run.close()
    return dataclasses.asdict(done) | {
        "text": f"{counted(done.files, 'files')}, {done.bytes / 1e9:.2f} GB saved to {uri}, {done.bytes_sent / 1e9:.2f} GB of them sent now; continue elsewhere with --resume-from {uri}"
    }


def _run(
    settings: Settings, path: Path, *, redo: Sequence[str] = (), force: bool = False, only: str | None = None, report: bool = True, file: Settings | None = None,
    began: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A run to its end, and then what is to happen with the rented machine. began: time.monotonic() from which this start costs money."""
    with _failure_ends_rental(lambda: settings, path) if only is None else contextlib.nullcontext():
        result = _work(settings, path, redo=redo, force=force, only=only, report=report, file=file, began=began)
    if only is None:
        ended(settings, path, result, None)
    return result


@contextlib.contextmanager
def _failure_ends_rental(settings: Callable[[], Settings], path: Path) -> Iterator[None]:
    """What fails in the block, on the way to a run too, ends the rental: the message, the hold, on_finish.

    Raises JobError. Where the settings themselves are what is wrong, nobody can be told.
    """
    try:
        yield
    except Exception as error:
        failure = _as_job_error(error, path)
        if failure.where != str(path.absolute() / ".lock"):  # another process has the run, and with it the machine's end
            # The frames hold a run directory that was refused half-way, and that its lock, which the hold asks for.
            traceback.clear_frames(error.__traceback__)
            with contextlib.suppress(MustFix):
                ended(settings(), path, failure.summary, failure)
        if failure is error:
            raise
        raise failure from error


def _as_job_error(error: Exception, path: Path) -> JobError:
    """With a `summary`, as every failure of a run has one."""
    failure = error
    if not isinstance(error, JobError):
        from jobs.pipeline import translate

        failure = translate(error, path)
    if not hasattr(failure, "summary"):
        status = "interrupted" if isinstance(failure, Interrupted) else "failed"
        failure.summary = {"status": status, "exit_code": failure.exit_code, "error": failure.as_dict(), "run_dir": str(path.absolute())}
    return failure


def _work(
    settings: Settings, path: Path, *, redo: Sequence[str], force: bool, only: str | None, report: bool, file: Settings | None, began: float | None
) -> dict[str, Any]:  # fmt: skip
    should_stop = StopSignal()
    with contextlib.ExitStack() as stack:
        # Before the imports: they take seconds, and a signal then would end the process without a word, with 143.
        should_stop.install()
        stack.callback(should_stop.restore)
        from jobs.pipeline import run_pipeline, translate
        from jobs.reporting.display import Display
        from jobs.reporting.forecast import forecast
        from jobs.stages.generate import start_engine

        run = RunDirectory(path)
        stack.callback(run.close)
        terminal = stack.enter_context(noise_in(run.path / "log.txt"))
        display = Display.open(stream=terminal, outlook=lambda: (forecast(run.counted()) or {}).get("line"))
        stack.callback(display.close)
        context = Context(settings, run, display, should_stop=should_stop, start_engine=start_engine, force=force)
        if report and only is None:
            stack.callback(_last_words, run, display)
        try:
            for edit in run.begin(settings, file):
                context.note(edit)
            run.event("run started", job=settings.job.name, force=force, redo=list(redo), only=only)
            with _guarded(context, began) if report and only != "push" else contextlib.nullcontext():
                final = run_pipeline(context, redo=redo, only=only)
            return summary(run.ledger, path, context.loads) | {"status": final, "exit_code": EXIT_DONE, "unsaved": _unsaved(context)}
        except Exception as error:
            translated = translate(error, run.path)
            if run.ledger.get("status") == "running":  # it did not come to the first stage
                run.ledger |= {"status": "failed", "exit_code": translated.exit_code, "error": translated.as_dict()}
                run.save()
            _complete(translated, context)
            # What the person reads as JSON tells where the run stands, on failure too.
            translated.summary = summary(run.ledger, path, context.loads) | {
                "exit_code": translated.exit_code,
                "error": translated.as_dict(),
                "unsaved": _unsaved(context),
            }
            if translated is error:
                raise
            raise translated from error


def _unsaved(context: Context) -> str | None:
    """Since when nothing was saved, where the last save failed."""
    return context.backup.unsaved if context.backup else None


def _complete(error: JobError, context: Context) -> None:
    """Say with what a run ended where its work is, in the ledger too: when that was written the last save was to come."""
    before = error.message
    say_what_is_saved(error, context.backup.uri if context.backup else None, _unsaved(context))
    if error.message != before:
        context.run.ledger["error"] = error.as_dict()
        with contextlib.suppress(JobError, OSError):  # a full disk, perhaps, which is what the error says
            context.run.save()


@contextlib.contextmanager
def _guarded(context: Context, began: float | None = None) -> Iterator[None]:
    """The run watched by the clock and the purse, and saved elsewhere while it goes on and once at its end."""
    from jobs.backup import Backup, backup_uri, time_to_save

    uri = backup_uri(context.settings, context.path)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(RentalWatch(context, began))
        if uri is None:
            yield
            return
        context.backup = stack.enter_context(Backup(context, uri))
        try:
            yield
        finally:
            context.backup.finish(*time_to_save(context, watch.clock.seconds_left() - LAST_WORDS_SECONDS))


@contextlib.contextmanager
def noise_in(log: Path) -> Iterator[TextIO]:
    """Send what libraries and worker processes print to `log`; yields a stream of the real standard error.

    vLLM alone prints a hundred lines at every start: the person would not see the one that counts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    real = os.dup(2)
    with open(log, "ab", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    with open(real, "w", encoding=sys.stderr.encoding, errors="backslashreplace", buffering=1, closefd=False) as terminal:
        try:
            yield terminal
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor in (1, 2):
                os.dup2(real, descriptor)
            os.close(real)


def _last_words(run: RunDirectory, display: Any) -> None:
    """The table and the report, whatever the ending; a fault in them must not replace the real one."""
    from jobs.reporting.forecast import told
    from jobs.reporting.report import write_report

    try:
        page = write_report(run.path)
        display.summary_table(run.ledger)
        display.note(told(run.ledger))
        display.note(f"report: {page}")
    except (OSError, ValueError, KeyError, TypeError, JobError) as error:
        display.note(f"the report could not be written: {error}")


def _job_name(job: str, overrides: Sequence[str]) -> str:
    """job.name as the file, the environment and --set make it: what the run directory is named after."""
    given = {name: text for name, text in os.environ.items() if name.startswith(f"{ENVIRONMENT_PREFIX}JOB__")}
    return load(job, overrides=[item for item in overrides if item.startswith("job.")], environment=given).job.name


def _earlier_settings(path: Path, name: str) -> dict[str, Any] | None:
    """The settings of the run that is continued, or None for a new one."""
    if not (path / "run.json").exists():
        return None
    ledger = RunDirectory(path, read_only=True).ledger
    if ledger["job"] != name:
        raise MustFix(
            f"The folder holds a run of the job {ledger['job']!r}, not {name!r}", where=str(path), remedy="take another --run-dir"
        )
    return ledger["settings"]


def _known_stage(name: str) -> None:
    if name not in STAGES:
        raise MustFix(f"There is no stage {name!r}", where="command line", remedy=f"the stages are {', '.join(STAGES)}")


def _asked_for(stages: Sequence[str], settings: Settings) -> Settings:
    """The settings, where a run under them has these stages: one that it has not would be passed over without a word."""
    for name in stages:
        if not is_asked_for(name, settings):
            raise MustFix(f"This run has no stage {name!r}", where="command line", remedy=f"ask for it by setting {ON_REQUEST[name]}")
    return settings
