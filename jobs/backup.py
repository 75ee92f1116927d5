"""The run itself, saved elsewhere while it runs, so that a lost machine loses minutes and not the run.

A thread saves every `push.backup_minutes` and at the end of each stage; training and generation go on
meanwhile. A save that fails for a passing reason is told once and tried again later: the run is worth
more than its copy. One that must not go on (another machine has taken the run over, another run is
saved there) ends the run, because it would be paid for twice.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from jobs.errors import JobError
from jobs.run import Context
from jobs.settings import Settings
from jobs.storage.saved_run import NotOurs, RunSaver, Saved, place_beside

# A signal leaves half a minute: a provider kills soon after, and what was saved before still stands.
SECONDS_AFTER_A_SIGNAL = 15.0


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
    if push.backup_uri is None and folder is not None and os.stat(folder).st_dev == os.stat(_existing(run_dir)).st_dev:
        return None
    return uri


def folder_of(uri: str) -> Path | None:
    """The folder of a file:// address, or its nearest one that exists; None for a bucket."""
    return _existing(Path(unquote(urlsplit(uri).path))) if uri.startswith("file://") else None


def _existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


class Backup:
    """Use as a context manager around the pipeline; its end saves a last time."""

    def __init__(self, context: Context, uri: str):
        push = context.settings.push
        self._context, self._seconds = context, push.backup_minutes * 60
        self._saver = RunSaver(context.path, uri, push, run_id=context.run.ledger["run_id"], states=push.backup == "all")
        self._wake, self._ended = threading.Event(), threading.Event()
        self._saving = threading.Lock()
        self._until = float("inf")  # time.monotonic() at which a save gives up
        self._told: str | None = None
        self._begun = False
        self._thread = threading.Thread(target=self._work, name="backup", daemon=True)

    def __enter__(self) -> "Backup":
        self._context.note(f"the run is saved to {self._saver.uri} every {self._seconds / 60:g} minutes; on another machine --resume-from it")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the thread; `finish` has saved before."""
        self._ended.set()
        self._until = 0.0
        self._wake.set()
        self._thread.join()

    def nudge(self) -> None:
        """A stage has ended: save soon."""
        self._wake.set()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._saving:
            yield

    def finish(self, seconds: float) -> None:
        """The last save of this process, within so many seconds; what it cannot send the next save of this run will."""
        if not self._wake.is_set() and not self._begun:
            return  # preflight has not passed: the destination may be what was wrong
        self._ended.set()
        self._until = time.monotonic() + seconds
        done = self._save()
        if done:
            size, sent = done.bytes / 1e9, done.bytes_sent / 1e9
            self._context.display.note(f"the run is saved to {done.uri}: {done.files} files, {size:.2f} GB, {sent:.2f} GB of them sent now")

    def _work(self) -> None:
        self._wake.wait()  # not before preflight has looked at the destination
        self._begun = True
        while not self._ended.is_set():
            self._wake.clear()
            self._save()
            self._wake.wait(self._seconds)

    def _save(self) -> Saved | None:
        stopping = self._context.should_stop()
        with self._saving:
            try:
                done = self._saver.save(lambda: time.monotonic() > self._until or (self._context.should_stop() and not stopping))
                self._told = None
                return done
            except NotOurs as error:
                if not self._ended.is_set():
                    self._ended.set()
                    self._context.should_stop.stop_for(error)
                self._tell(error)
            except (JobError, OSError) as error:
                self._tell(error)
        return None

    def _tell(self, error: Exception) -> None:
        if str(error) != self._told:
            self._told = str(error)
            self._context.display.note(f"the run was not saved: {error}")
