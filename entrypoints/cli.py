"""`eagle3-job`: starts a command, and turns every ending into an exit code and one sentence.

Standard output carries results only (with `--json` exactly one line, always, on failure too);
everything else, worker processes and libraries included, goes to standard error.

Decision: what is imported here is little, and the command line itself (commands.py) when SIGTERM is heard. A machine may be taken
in the very moment in which it starts, and 143 is no code on which a managed job is started again.
"""

import contextlib
import functools
import json
import os
import signal
import sys
import traceback
from typing import Any

from jobs.errors import Interrupted, JobError, as_job_error

# Before torch and vLLM are imported, in this process and all it starts. vLLM logs to standard output unless told
# otherwise, and reports its use to its makers. OpenMP's active waiting makes two threads on a busy machine 20 to 60
# times slower than one.
ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    output = _send_everything_to_standard_error()
    signal.signal(signal.SIGTERM, functools.partial(_stopped, output, arguments))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # A lost connection ends what somebody sees, not the run: what is started from here (workers, on_finish) inherits this.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    code, result = _run(arguments)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # one line of JSON, whatever happens now
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


def _stopped(output: int, arguments: list[str], number: int, frame: Any) -> None:
    """SIGTERM outside of a run, which hears it for itself. Ends here: an exception may be lost in the middle of an import."""
    error = Interrupted(f"Stopped by {signal.Signals(number).name}", remedy="run the same command again")
    told = {2: f"eagle3-job: {error.sentence()}"}
    if "--json" in arguments:
        told[output] = json.dumps(_failure("interrupted", error.exit_code, error.as_dict()))
    for descriptor, line in told.items():
        with contextlib.suppress(OSError):
            os.write(descriptor, f"{line}\n".encode())  # not `print`, which may be what was interrupted
    os._exit(error.exit_code)


def _run(arguments: list[str]) -> tuple[int, dict[str, Any]]:
    try:
        from entrypoints.commands import NoCommand, answer

        try:
            result = answer(arguments)
        except NoCommand as error:
            why = {"message": error.message, "where": "command line", "remedy": "see --help"}
            return error.exit_code, _failure("failed", error.exit_code, why)
        code = result.pop("exit_code")
        return code, {"status": "done", "exit_code": code, "error": None} | result
    except KeyboardInterrupt as error:
        return _report(Interrupted("Stopped by SIGINT", remedy="run the same command again"), arguments, error)
    except Exception as error:
        return _report(as_job_error(error), arguments, error)


def _report(error: JobError, arguments: list[str], cause: BaseException | None = None) -> tuple[int, dict[str, Any]]:
    if "--debug" in arguments:
        traceback.print_exception(cause or error)
    with contextlib.suppress(OSError):  # nobody may be listening any more; the exit code still has to be this one
        print(f"eagle3-job: {_sentence_or_list(error)}", file=sys.stderr, flush=True)
    status = "interrupted" if isinstance(error, Interrupted) else "failed"
    return error.exit_code, _failure(status, error.exit_code, error.as_dict()) | getattr(error, "summary", {})


def _sentence_or_list(error: JobError) -> str:
    if len(error.problems) < 2:
        return error.sentence()
    place = f" ({error.where})" if error.where else ""
    return "\n".join([f"{len(error.problems)} things to mend{place}:", *(f"  - {problem}" for problem in error.problems)])


def _failure(status: str, code: int, error: dict[str, Any]) -> dict[str, Any]:
    return {"status": status, "exit_code": code, "error": error}


if __name__ == "__main__":
    main()
