"""The commands and their options, as click parses them; each starts what stands in launch.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from jobs.errors import EXIT_DONE


class NoCommand(Exception):
    """The command line names none, or names it wrong; click has said so. `exit_code`, and the `message` it said."""

    def __init__(self, exit_code: int, message: str):
        self.exit_code, self.message = exit_code, message


def answer(arguments: list[str]) -> dict[str, Any]:
    """What the command answers, with its `exit_code`. Raises NoCommand, KeyboardInterrupt, and whatever the command raises."""
    try:
        result = cli.main(args=arguments, prog_name="eagle3-job", standalone_mode=False)
    except click.exceptions.Exit as error:
        return {"exit_code": error.exit_code}
    except click.ClickException as error:
        error.show()
        raise NoCommand(error.exit_code, error.format_message()) from error
    except click.Abort as error:  # click's word for it
        raise KeyboardInterrupt from error
    return {"exit_code": EXIT_DONE} | (result if isinstance(result, dict) else {})


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
@click.option(
    "--share",
    type=click.FloatRange(min=0, min_open=True, max=1),
    default=1.0,
    metavar="SHARE",
    help="Compute the log-probabilities of this share of every sample's rows only (seeded), e.g. 0.01 where there is no GPU.",
)
@json_option
@debug_option
def states_verify(run: Path, share: float, as_json: bool, debug: bool) -> dict[str, Any]:
    """Every row, checksum and log-probability of a run's stores."""
    from entrypoints.state_check import verify_states

    return verify_states(run, share)


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
