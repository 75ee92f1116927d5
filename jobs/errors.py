"""What a run can end with, as exceptions that carry their exit code.

Every error a person sees is one sentence with the value, the place and the remedy; a traceback
is only for `--debug`. Exit codes follow sysexits.h where it has a word for the case:

=====  ==================================================================================
code   meaning
=====  ==================================================================================
0      done, or a reasoned no-go of the gate
1      a bug in this project
2      wrong command line (click's own)
75     interrupted or a passing fault (EX_TEMPFAIL): run the same command again
78     something the person must fix first (EX_CONFIG)
=====  ==================================================================================
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_TRY_AGAIN = 75
EXIT_MUST_FIX = 78


class JobError(Exception):
    """Base of all expected failures: `message` (what), `where` (the place), `remedy` (what to do).

    `problems` are the sentences of an error that names several things at once; `message` holds them all, too.
    """

    exit_code = EXIT_BUG

    def __init__(self, message: str, *, where: str | None = None, remedy: str | None = None, problems: Sequence[str] = ()):
        self.problems = list(problems)
        self.message = message
        self.where = where
        self.remedy = remedy
        super().__init__(self.sentence())

    def sentence(self) -> str:
        text = self.message.rstrip(".")
        if self.where:
            text += f" ({self.where})"
        if self.remedy:
            text += f": {self.remedy.rstrip('.')}"
        return text + "."

    def as_dict(self) -> dict[str, str | None]:
        return {"message": self.message, "where": self.where, "remedy": self.remedy}


class MustFix(JobError):
    """The person has to change something (settings, input, disk, credentials) before a new try."""

    exit_code = EXIT_MUST_FIX


class TryAgain(JobError):
    """A passing fault (dead worker, hung engine, network, machine taken): the same command may succeed."""

    exit_code = EXIT_TRY_AGAIN


class Interrupted(TryAgain):
    """SIGTERM, SIGINT or a deadline: everything finished so far is saved."""


def unwritable_run_directory(path: Path, error: OSError) -> MustFix:
    remedies = {
        errno.EROFS: "mount it writable",
        errno.ENOSPC: "free space there",
        errno.EDQUOT: "free space there",
        errno.EACCES: f"give user {os.getuid()} write permission there",
    }
    # The others are refusals of file systems that hold no files of anybody, as /proc and /sys.
    remedy = (
        f"{remedies[error.errno]} or take another --run-dir"
        if error.errno in remedies
        else "take another --run-dir, nothing can be made there"
    )
    return MustFix(f"The run directory cannot be written: {error.strerror}", where=str(path), remedy=remedy)


def as_job_error(error: BaseException, where: str | None = None) -> JobError:
    """The operating system's refusals in the form every other error has; anything else that is not one of ours is a bug.

    where: the place that is told if the error names no file of its own.
    """
    if isinstance(error, JobError):
        return error
    number, file = (error.errno, str(error.filename or where or "the output")) if isinstance(error, OSError) else (None, "")
    if number in (errno.ENOSPC, errno.EDQUOT):
        return MustFix("The disk is full", where=file, remedy="free space there and run the same command again, nothing finished is lost")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "mount it writable" if number == errno.EROFS else "give this user permission there"
        return MustFix(f"{file} cannot be written: {error.strerror}", where=where, remedy=remedy)
    return JobError(
        f"This is a bug: {type(error).__name__}: {error}", where=where, remedy="run again with --debug and report the traceback"
    )
