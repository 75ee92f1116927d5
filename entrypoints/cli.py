"""`eagle3-job`: the command line. Parses, starts, and turns every ending into an exit code and one sentence.

Standard output carries results only (with `--json` exactly one line, always, on failure too);
everything else, worker processes and libraries included, goes to standard error.
"""

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jobs.errors import EXIT_DONE, Interrupted, JobError, as_job_error

# Before torch and vLLM are imported, in this process and all it starts. vLLM logs to standard output unless told
# otherwise, and reports its use to its makers. OpenMP's active waiting makes two threads on a busy machine 20 to 60
# times slower than one.
ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # A lost connection ends what somebody sees, not the run: what is started from here (workers, on_finish) inherits this.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    arguments = sys.argv[1:] if arguments is None else arguments
    output = _send_everything_to_standard_error()
    code, result = _run(arguments)
    if "--json" in arguments:
        _write(output, json.dumps(result, default=str))
    elif isinstance(result.get("text"), str):
        _write(output, result["text"])
    sys.stderr.flush()
    sys.exit(code)


def _send_everything_to_standard_error() -> int:
    """Point file descriptor 1 at standard error; returns a descriptor of the real standard output."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    return real


def _write(output: int, text: str) -> None:
    with open(output, "w", encoding="utf-8", errors="replace", closefd=False) as file:
        file.write(text.rstrip("\n") + "\n")


def _run(arguments: list[str]) -> tuple[int, dict[str, Any]]:
    try:
        result = cli.main(args=arguments, prog_name="eagle3-job", standalone_mode=False)
        result = result if isinstance(result, dict) else {}
        return result.pop("exit_code", EXIT_DONE), {"status": "done", "exit_code": EXIT_DONE, "error": None} | result
    except click.exceptions.Exit as error:
        return error.exit_code, {"status": "done", "exit_code": error.exit_code, "error": None}
    except click.ClickException as error:
        error.show()
        return error.exit_code, _failure(
            "failed", error.exit_code, {"message": error.format_message(), "where": "command line", "remedy": "see --help"}
        )
    except (KeyboardInterrupt, click.Abort) as error:
        return _report(Interrupted("Stopped by SIGINT", remedy="run the same command again"), arguments, error)
    except Exception as error:
        return _report(as_job_error(error), arguments, error)


def _report(error: JobError, arguments: list[str], cause: BaseException | None = None) -> tuple[int, dict[str, Any]]:
    if "--debug" in arguments:
        traceback.print_exception(cause or error)
    with contextlib.suppress(OSError):  # nobody may be listening any more; the exit code still has to be this one
        click.echo(f"eagle3-job: {_sentence_or_list(error)}", err=True)
    status = "interrupted" if isinstance(error, Interrupted) else "failed"
    return error.exit_code, _failure(status, error.exit_code, error.as_dict()) | getattr(error, "summary", {})


def _sentence_or_list(error: JobError) -> str:
    if len(error.problems) < 2:
        return error.sentence()
    place = f" ({error.where})" if error.where else ""
    return "\n".join([f"{len(error.problems)} things to mend{place}:", *(f"  - {problem}" for problem in error.problems)])


def _failure(status: str, code: int, error: dict[str, Any]) -> dict[str, Any]:
    return {"status": status, "exit_code": code, "error": error}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="eagle3-job")
def cli() -> None:
    """From prompts to a verified EAGLE-3 draft head in object storage.

    Exit codes: 0 done or no-go, 2 wrong command line, 75 interrupted or a passing fault (run it
    again), 78 something you must fix first, 1 a bug.
    """


json_option = click.option("--json", "as_json", is_flag=True, help="One line of JSON on standard output, on failure too.")
debug_option = click.option("--debug", is_flag=True, help="Show the traceback of an error.")
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="One setting, e.g. train.epochs=2 (TOML's notation)."
)
run_argument = click.argument("run", type=click.Path(path_type=Path))


run_dir_option = click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Where everything of the run lives; default runs/<job.name>."
)


def _job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed((
        run_dir_option,
        set_option,
        click.option("--dry-run", is_flag=True, help="Say what would run, and stop."),
        click.option("--redo", multiple=True, metavar="STAGE", help="Run a stage again although it is done; its files are kept aside."),
        click.option("--force", is_flag=True, help="Go on although the gate says no-go; recorded in the ledger."),
        click.option("--resume-from", metavar="URI", help="On a machine with an empty run directory: continue the run saved at this s3:// or file:// address."),
        json_option,
        debug_option,
    )):  # fmt: skip
        command = option(command)
    return command


def _job(name: str, help_text: str) -> None:
    @cli.command(name, help=help_text)
    @_job_options
    def command(**options: Any) -> dict[str, Any]:
        return _start(name, **options)


def _start(name: str, *, as_json: bool, debug: bool, **options: Any) -> dict[str, Any]:
    from entrypoints import launch

    return launch.job(name, **options)


_job("hero", "The real run: Kimi-K2.5 on 8 x B300.")
_job("local-test", "The rehearsal on 8 x RTX PRO 6000.")
_job("smoke", "The whole job in miniature, on any machine.")


@cli.command("run")
@click.argument("job", metavar="FILE")
@_job_options
def run_(job: str, **options: Any) -> dict[str, Any]:
    """A job of your own: a TOML file like jobs/hero.toml."""
    return _start(job, **options)


@cli.command()
@click.argument("job")
@run_dir_option
@set_option
@json_option
@debug_option
def preflight(job: str, run_dir: Path | None, overrides: tuple[str, ...], as_json: bool, debug: bool) -> dict[str, Any]:
    """Everything that can fail, before money is spent."""
    from entrypoints import launch

    return launch.preflight(job, run_dir, overrides)


@cli.command()
@click.argument("job")
@set_option
@click.option("--calibrate", type=click.Path(path_type=Path), metavar="RUN", help="Take the rates from a finished run.")
@click.option(
    "--for",
    "amount",
    type=click.FloatRange(min=0, min_open=True),
    metavar="AMOUNT",
    help="How many training samples this much money pays for.",
)
@json_option
@debug_option
def plan(job: str, overrides: tuple[str, ...], calibrate: Path | None, amount: float | None, as_json: bool, debug: bool) -> dict[str, Any]:
    """Time, bytes and money, stage by stage.

    For every machine type; where, on spot or on demand, and how many samples for how much money.
    """
    from entrypoints import launch

    return launch.plan(job, overrides, calibrate, amount)


@cli.command()
@click.argument("name")
@click.option("--run-dir", type=click.Path(path_type=Path), required=True, help="An existing run directory.")
@set_option
@json_option
@debug_option
def stage(name: str, run_dir: Path, overrides: tuple[str, ...], as_json: bool, debug: bool) -> dict[str, Any]:
    """One stage of a run, with the run's own settings."""
    from entrypoints import launch

    return launch.stage(name, run_dir, overrides)


@cli.command()
@run_argument
@json_option
@debug_option
def status(run: Path, as_json: bool, debug: bool) -> dict[str, Any]:
    """Where a run stands."""
    from entrypoints import launch

    return launch.status(run)


@cli.command()
@run_argument
@json_option
@debug_option
def report(run: Path, as_json: bool, debug: bool) -> dict[str, Any]:
    """Write report.html of a run, finished or not."""
    from jobs.reporting.report import write_report
    from jobs.run import RunDirectory

    path = write_report(RunDirectory(run, read_only=True).path)
    return {"report": str(path), "text": str(path)}


@cli.command()
@run_argument
@set_option
@click.option(
    "--whole", metavar="URI", help="Save the run itself there, hidden states included, to go on with on another machine (--resume-from)."
)
@json_option
@debug_option
def push(run: Path, overrides: tuple[str, ...], whole: str | None, as_json: bool, debug: bool) -> dict[str, Any]:
    """Publish a run's head (again), or save the run."""
    from entrypoints import launch

    return launch.save(run, whole, overrides) if whole else launch.stage("push", run, overrides)


@cli.command()
@click.argument("uri")
@click.argument("folder", type=click.Path(path_type=Path))
@set_option
@json_option
@debug_option
def pull(uri: str, folder: Path, overrides: tuple[str, ...], as_json: bool, debug: bool) -> dict[str, Any]:
    """Fetch a published head or a saved run, verified."""
    from entrypoints import launch

    return launch.pull(uri, folder, overrides)


@cli.group()
def states() -> None:
    """The stored hidden states of a run."""


@states.command("verify")
@run_argument
@json_option
@debug_option
def states_verify(run: Path, as_json: bool, debug: bool) -> dict[str, Any]:
    """Every row, checksum and log-probability of a run's stores."""
    from entrypoints import launch

    return launch.verify_states(run)


@cli.command()
@json_option
@debug_option
def doctor(as_json: bool, debug: bool) -> dict[str, Any]:
    """Versions, devices and shims.

    Each shim: needed, applied, why, and which release makes it needless.
    """
    from compat import doctor as doctors

    report = doctors.report()
    return report | {"text": doctors.render(report)}


@cli.command("settings")
@json_option
@debug_option
def settings_(as_json: bool, debug: bool) -> dict[str, Any]:
    """Every setting with its meaning, as --set takes it."""
    from jobs.job_file import documented

    known = documented()
    return {"settings": dict(known), "text": "\n".join(f"{key:40} {text}" for key, text in known)}


if __name__ == "__main__":
    main()
