"""The rented machine: a deadline and a spending limit while the run goes on, a message and a command at its end.

What happens at which end:

    done, no-go            message; `rental.on_finish` at once: the head is published and verified
    deadline               saved in time, exit code 75, `on_finish` at once: the next machine continues
    spending limit         saved in time, exit code 78, `on_finish` at once: a restart must not spend on
    any of them, unsaved   where the last save failed and no head was published, as any other failure
    any other failure      message; `on_finish` after `rental.hold_minutes`, so that somebody can look
    a signal               nothing: a person or the provider stopped it, and knows

A message or a command that fails never changes how the run ended.
"""

import contextlib
import datetime
import http.client
import json
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.context import Context
from jobs.errors import Interrupted, JobError, MustFix
from jobs.run import now
from jobs.settings import RentalSettings, Settings
from jobs.storage.files import files_under, held
from jobs.wording import counted

TICK_SECONDS = 1.0
LOOKS_PER_STALL = 20  # a stall is known at the latest by so small a part of `stall_minutes` too late
POST_SECONDS, POST_ATTEMPTS = 10, 3
LAST_WORDS_SECONDS = POST_SECONDS * POST_ATTEMPTS  # kept of what is left, for the message that says how it ended


class RentalClock:
    """Deadline and spending limit for one start of a run, counted from `began` (time.monotonic(); now where None)."""

    def __init__(self, rental: RentalSettings, spent_before: float = 0.0, began: float | None = None):
        self.rental, self._spent_before = rental, spent_before
        self._began = time.monotonic() if began is None else began

    def spent(self) -> float:
        """Money of all starts of this run so far; this one counts from its beginning."""
        return self._spent_before + (time.monotonic() - self._began) / 3600 * self.rental.price_per_hour

    def seconds_left(self) -> float:
        """Seconds until the deadline, or until the money is spent; inf without either."""
        left = math.inf
        if self.rental.deadline is not None:
            left = self.rental.deadline.timestamp() - time.time()
        if self.rental.spending_limit is not None:
            left = min(left, (self.rental.spending_limit - self.spent()) / self.rental.price_per_hour * 3600)
        return left

    def end(self) -> JobError | None:
        """Which end has come near, as what the run ends with; None while there is time and money."""
        rental, reserve = self.rental, self.rental.reserve_minutes * 60
        if rental.deadline is not None and time.time() + reserve >= rental.deadline.timestamp():
            reason: JobError = Interrupted(
                f"The deadline {rental.deadline.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC is {counted(rental.reserve_minutes, 'minutes')} away or past",
                where="rental.deadline", remedy="run the same command on the next machine, with --resume-from and a later rental.deadline",
            )  # fmt: skip
            reason.ends_rental = True
            return reason
        reserved = rental.price_per_hour * reserve / 3600
        if rental.spending_limit is not None and self.spent() + reserved >= rental.spending_limit:
            reason = MustFix(
                f"The run has cost {self.spent():.2f} of at most {rental.spending_limit:.2f} {rental.currency}, {reserved:.2f} of it kept for saving",
                where="rental.spending_limit", remedy="raise it and run the same command again, it continues",
            )  # fmt: skip
            reason.ends_rental = True
            return reason
        return None

    def require_time(self) -> None:
        """MustFix where there is no time or money left to begin with."""
        end = self.end()
        if end is not None:
            raise MustFix(
                f"{end.message}, and this start would pass it",
                where="rental",
                remedy="set rental.deadline or rental.spending_limit to what is meant now",
            )


def say_what_is_saved(error: JobError, uri: str | None, unsaved: str | None) -> None:
    """Complete what a run ends with by where its work is now, which only the last save knows.

    uri: where the run is saved, None where nowhere; unsaved: the sentence of a last save that failed.
    """
    ends_rental = getattr(error, "ends_rental", False)
    if unsaved and error.message not in unsaved:
        error.message = f"{error.message.rstrip('.')}; {unsaved}"
    elif ends_rental:
        error.message += f"; everything is saved {f'to {uri}' if uri else 'in the run directory'}"
    if ends_rental and isinstance(error, Interrupted) and (unsaved or uri is None):
        error.remedy = "run the same command again with this run directory and a later rental.deadline"


class RentalWatch:
    """Use as a context manager around the pipeline: ends the run in time, tells the webhook of a stall.

    Entering raises MustFix where there is no time or money left to begin with.
    """

    def __init__(self, context: Context, began: float | None = None):
        self._context, self._rental = context, context.settings.rental
        self.clock = RentalClock(self._rental, context.run.ledger["cost"]["amount"], began)
        self._ended = threading.Event()
        self._stalled = False
        self._thread = threading.Thread(target=self._work, name="rental", daemon=True)

    def __enter__(self) -> "RentalWatch":
        self.clock.require_time()
        self._context.pulse = time.time()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        looked = time.monotonic()
        while not self._ended.wait(TICK_SECONDS):
            end = self.clock.end()
            if end is not None:
                return self._context.should_stop.stop_for(end)
            if time.monotonic() - looked > self._rental.stall_minutes * 60 / LOOKS_PER_STALL:
                looked = time.monotonic()
                self._look_for_progress()

    def _look_for_progress(self) -> None:
        quiet = time.time() - max(self._context.pulse, last_written(self._context.path))
        stalled = quiet > self._rental.stall_minutes * 60
        if stalled and not self._stalled:
            ledger = self._context.run.ledger
            running = next((name for name, stage in ledger["stages"].items() if stage["state"] == "running"), "no stage")
            self._context.display.note(f"{running}: nothing was written for {counted(round(quiet / 60), 'minutes')}")
            tell(self._context.settings, "stalled", {**ledger, "run_dir": str(self._context.path), "stage": running})
        self._stalled = stalled


def last_written(folder: Path) -> float:
    """time.time() at which a file of the run was written last, but for the ledger: its meter runs on beside a stage that hangs."""
    return max(
        (found.st_mtime for path, found in files_under(folder) if path.name != "run.json" and not path.name.startswith(".")), default=0.0
    )


def tell(settings: Settings, event: str, result: Mapping[str, Any]) -> None:
    """POST what happened as JSON to the webhook, if there is one; `text` is what Slack and its like show."""
    url = os.environ.get(settings.rental.webhook_variable)
    if not url:
        return
    error = result.get("error") or {}
    text = f"eagle3-job {settings.job.name} on {platform.node()}: {event}"
    text += f": {error['message']}" if error.get("message") else f", published to {result['published']}" if result.get("published") else ""
    if result.get("unsaved") and result["unsaved"] not in text:
        text += f"; {result['unsaved']}"
    message = {
        "event": event, "text": text, "job": settings.job.name, "host": platform.node(), "time": now(), "machine": settings.rental.machine,
        **{key: result.get(key) for key in ("run_dir", "run_id", "status", "exit_code", "error", "published", "acceptance", "cost", "stage", "saved", "unsaved")},
    }  # fmt: skip
    for attempt in range(1, POST_ATTEMPTS + 1):
        try:
            request = urllib.request.Request(url, json.dumps(message, default=str).encode(), {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=POST_SECONDS).close()
            return
        except (OSError, ValueError, http.client.HTTPException) as failure:  # its URL may be a secret: name the variable only
            if attempt == POST_ATTEMPTS or isinstance(failure, ValueError):
                _say(f"the webhook in {settings.rental.webhook_variable} did not take the message: {type(failure).__name__}")
                return
            time.sleep(attempt)


def ended(settings: Settings, path: Path, result: Mapping[str, Any], error: JobError | None) -> None:
    """The last act, after the run directory is let go: the message, and `on_finish` when its time has come.

    result: as `--json` prints it; `unsaved` in it is the sentence of a last save that failed.
    """
    tell(settings, str(result["status"]), result)
    rental, ends_rental = settings.rental, getattr(error, "ends_rental", False)
    if not rental.on_finish or (isinstance(error, Interrupted) and not ends_rental):
        return
    # The head at its destination is what the run was for. Without it, what was not saved is on this machine alone.
    delivered = error is None and settings.push.uri is not None and result.get("published") == settings.push.uri
    unsaved = None if delivered else result.get("unsaved")
    if unsaved or not (error is None or ends_rental):
        _say(error.sentence() if error else f"{unsaved}.")  # the command line's own last word comes after the hold
        if not _held(rental, path):
            return
    _say(f"on_finish: {rental.on_finish}")
    environment = os.environ | {
        "EAGLE3_STATUS": str(result["status"]), "EAGLE3_EXIT_CODE": str(result["exit_code"]),
        "EAGLE3_RUN_DIR": str(path.absolute()), "EAGLE3_PUBLISHED": str(result.get("published") or ""),
    }  # fmt: skip
    code = subprocess.run(rental.on_finish, shell=True, env=environment, stdout=sys.stderr).returncode
    if code:
        _say(f"on_finish ended with exit code {code}: look whether the machine still costs money")


def _held(rental: RentalSettings, path: Path) -> bool:
    """Wait out the hold; False where a signal ended it, or somebody runs the job again meanwhile."""
    _say(f"the machine is kept for {counted(rental.hold_minutes, 'minutes')}, then on_finish runs; stop this process to keep it longer")
    stopped = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if stopped.wait(rental.hold_minutes * 60):
            return False
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    try:
        with held(path / ".lock", what="this run directory"):
            return True
    except OSError:
        return True  # a run directory that cannot be written is in nobody's use, and the machine still costs money
    except MustFix:
        _say("the run directory is in use again: on_finish is left to that run")
        return False


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone must not keep on_finish from running
        print(f"eagle3-job: {text}", file=sys.stderr, flush=True)
