"""The run itself, saved elsewhere while it runs and brought back, so that a lost machine loses minutes and not the run.

A thread saves every `push.backup_minutes` and at the end of each stage; training and generation go on
meanwhile. A save that fails for a passing reason is told once and tried again later: the run is worth
more than its copy. One that must not go on (another machine has taken the run over, another run is
saved there) ends the run, because it would be paid for twice. The last save is tried again while there is
time, ends when there is none, and says what is on this machine alone: on_finish may end that next.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from jobs.context import Context, StopSignal
from jobs.errors import Interrupted, JobError, MustFix, TryAgain
from jobs.rental import RentalClock, say_what_is_saved
from jobs.settings import Settings
from jobs.storage.restored_run import restore
from jobs.storage.saved_run import NotOurs, RunSaver, Saved, find, place_beside, record_of
from jobs.storage.senders import STOP_SECONDS
from jobs.wording import counted

# A signal leaves half a minute: a provider kills soon after, and what was saved before still stands.
SECONDS_AFTER_A_SIGNAL = 15.0
SECONDS_AT_MOST = 3600.0
SECONDS_OF_TRIES = 60.0  # where nothing ends the machine: its disk has everything
FIRST_PAUSE, LAST_PAUSE = 1.0, 30.0  # seconds between two tries of the last save


def time_to_save(context: Context, left: float) -> tuple[float, float]:
    """(seconds for the last save, seconds in which it may be tried again), `left` being those of the rental.

    Never less than after a signal: a stage that took longer than the reserve has left work that is worth a try.
    """
    stop, rental = context.should_stop, context.settings.rental
    if stop() and stop.reason is None:
        return SECONDS_AFTER_A_SIGNAL, 0.0
    seconds = max(SECONDS_AFTER_A_SIGNAL, min(SECONDS_AT_MOST, left))
    if getattr(stop.reason, "ends_rental", False):
        return seconds, seconds
    return seconds, min(seconds, rental.reserve_minutes * 60 if rental.on_finish else SECONDS_OF_TRIES)


def backup_uri(settings: Settings, run_dir: Path) -> str | None:
    """Where the run is saved; None where it is not.

    A folder on the run's own disk is lost with it and would hold terabytes of states twice: it is taken only
    where `push.backup_uri` names it.
    """
    push = settings.push
    if push.backup == "off" or (push.backup_uri is None and push.uri is None):
        return None
    uri = push.backup_uri or place_beside(push.uri)
    folder = folder_of(uri)
    if push.backup_uri is None and folder is not None and os.stat(existing(folder)).st_dev == os.stat(existing(run_dir)).st_dev:
        return None
    return uri


def folder_of(uri: str) -> Path | None:
    """The folder of a file:// address, whether it is there or not; None for a bucket."""
    return Path(unquote(urlsplit(uri).path)) if uri.startswith("file://") else None


def existing(path: Path) -> Path:
    """The folder, or the nearest above it that is there, as far as this user can see."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))


class Backup:
    """Use as a context manager around the pipeline; its end saves a last time."""

    def __init__(self, context: Context, uri: str):
        push = context.settings.push
        self.uri = uri
        self.unsaved: str | None = None  # after `finish`: since when nothing was saved, and why
        self._context, self._seconds = context, push.backup_minutes * 60
        self._saver = RunSaver(context.path, uri, push, run_id=context.run.ledger["run_id"], states=push.backup == "all")
        self._wake, self._ended = threading.Event(), threading.Event()
        self._saving = threading.Lock()
        self._until = float("inf")  # time.monotonic() at which a save gives up
        self._told: str | None = None
        self._begun = False
        self._thread = threading.Thread(target=self._work, name="backup", daemon=True)

    def __enter__(self) -> "Backup":
        self._context.note(
            f"the run is saved to {self._saver.uri} every {self._seconds / 60:g} minutes; on another machine --resume-from it"
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the thread; `finish` has saved before."""
        self._ended.set()
        self._until = 0.0
        self._wake.set()
        self._thread.join(STOP_SECONDS)  # a silent server may hold a request for minutes, and the process ends without it

    def nudge(self) -> None:
        """A stage has ended: save soon."""
        self._wake.set()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._saving:
            yield

    def finish(self, seconds: float, patience: float = 0.0) -> None:
        """The last save of this process, within so many seconds; what it cannot send the next save of this run will.

        For `patience` seconds one that failed for a passing reason is tried again. `unsaved` says what came of it.
        """
        stop, began = self._context.should_stop, time.monotonic()
        if not self._wake.is_set() and not self._begun and stop.reason is None:
            return  # preflight has not passed: the destination may be what was wrong
        if isinstance(stop.reason, NotOurs):
            return  # another machine saves there: blocks of this one have no place among its own
        self._ended.set()
        self._until = began + seconds
        stopped = stop()

        def broken_off() -> bool:
            # A deadline that comes near meanwhile is what `seconds` ends before.
            return not stopped and stop() and stop.reason is None

        pause = FIRST_PAUSE
        while True:
            done = self._save_in_time(lambda: time.monotonic() > self._until or broken_off())
            if isinstance(done, Saved):
                size, sent = done.bytes / 1e9, done.bytes_sent / 1e9
                self._context.display.note(
                    f"the run is saved to {done.uri}: {counted(done.files, 'files')}, {size:.2f} GB, {sent:.2f} GB of them sent now"
                )
                return
            passing = isinstance(done, (TryAgain, OSError))
            if not passing or broken_off() or time.monotonic() + pause > began + min(seconds, patience):
                break
            self._tell(done)
            _wait(pause, broken_off)
            pause = min(2 * pause, LAST_PAUSE)
        self.unsaved = self._not_saved(done)
        self._context.display.note(self.unsaved)

    def _work(self) -> None:
        self._wake.wait()  # not before preflight has looked at the destination
        self._begun = True
        while not self._ended.is_set():
            self._wake.clear()
            stop, stopped = self._context.should_stop, self._context.should_stop()
            done = self._save(lambda stop=stop, stopped=stopped: time.monotonic() > self._until or (not stopped and stop()))
            if isinstance(done, NotOurs) and not self._ended.is_set():
                self._ended.set()
                stop.stop_for(done)
            if isinstance(done, Exception):
                self._tell(done)
            self._wake.wait(self._seconds)

    def _save_in_time(self, give_up: Callable[[], bool]) -> Saved | Exception:
        """`_save`, waited for no longer than its time: a server that stays silent holds a request for minutes."""
        done: list[Saved | Exception] = []
        saving = threading.Thread(target=lambda: done.append(self._save(give_up)), name="last-save", daemon=True)
        saving.start()
        saving.join(max(0.0, self._until - time.monotonic()) + STOP_SECONDS)
        return done[0] if done else TryAgain("The save did not end in time", where=self.uri)

    def _save(self, give_up: Callable[[], bool]) -> Saved | Exception:
        with self._saving:
            try:
                done = self._saver.save(give_up)
                self._told = None
                return done
            except Exception as error:  # a bug, too: it must cost neither the later saves nor how the run ended
                return error

    def _tell(self, error: Exception) -> None:
        if str(error) != self._told:
            self._told = str(error)
            self._context.display.note(f"the run was not saved: {error}")

    def _not_saved(self, error: Exception) -> str:
        record = record_of(self._context.path)
        since = f"since {record['saved']}" if record.get("uri") == self.uri else "yet"
        reason = error.message if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
        return f"nothing was saved to {self.uri} {since}: {reason}"


def _wait(seconds: float, broken_off: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not broken_off():
        time.sleep(min(0.2, seconds))


def bring_back(uri: str, path: Path, settings: Settings) -> None:
    """`--resume-from`: the saved run into an empty run directory; a run that is there already goes on as it is.

    MustFix where no run is saved and none is to be; else as `restored`.
    """
    if (path / "run.json").exists():
        print(f"eagle3-job: {path} holds a run already: it continues, nothing is brought from {uri}", file=sys.stderr)
    elif restored(uri, path, settings, RentalClock(settings.rental)) is None:
        # A managed job has one command for its first machine and for the later ones.
        if uri not in (settings.push.uri, backup_uri(settings, path)):
            raise MustFix(
                "No run is saved there", where=uri, remedy="check the address; to begin a run that is saved there, give it as push.uri, too"
            )
        print(f"eagle3-job: no run is saved at {uri} yet: this one begins", file=sys.stderr)


def restored(uri: str, path: Path, settings: Settings, clock: RentalClock) -> dict[str, Any] | None:
    """The state of the run that was saved at `uri`, now in `path`; None where none is.

    Raises what the rental ends with where that comes near meanwhile: hours of a download cost money, too.
    """
    shown = [time.monotonic()]

    def progress(done: int, total: int) -> None:
        if time.monotonic() - shown[0] > 5:
            shown[0] = time.monotonic()
            print(f"eagle3-job: bringing the run from {uri}: {done / 1e9:.1f} of {total / 1e9:.1f} GB", file=sys.stderr)

    should_stop = StopSignal()
    should_stop.install()
    try:
        if find(uri, settings.push):
            clock.require_time()
        return restore(uri, path, settings.push, progress=progress, should_stop=lambda: should_stop() or clock.end() is not None)
    except Interrupted:
        end = clock.end()
        if end is None or should_stop():
            raise
        say_what_is_saved(end, uri, None)
        raise end from None
    finally:
        should_stop.restore()
