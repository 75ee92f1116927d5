"""What a stage is given, and how it hears that it is to stop."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.errors import Interrupted, JobError
from jobs.run import RunDirectory
from jobs.settings import Settings
from jobs.storage.files import read_json


class StopSignal:
    """SIGTERM and SIGINT as a flag that stages ask for, or as an exception where they cannot ask.

    The first signal sets the flag: the stage saves and raises Interrupted. While a stage is inside
    `breakable()` (a load of twenty minutes, nothing to save) the exception comes at once. A second
    SIGINT always breaks off: the person means it.
    """

    def __init__(self) -> None:
        self.reason: JobError | None = None  # why, where it was not a person or the provider
        self._event = threading.Event()
        self._breakable = 0
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._received)

    def restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _received(self, number: int, frame: Any) -> None:
        again = self._event.is_set()
        self._event.set()
        if self._breakable or (again and number == signal.SIGINT):
            raise Interrupted(f"Stopped by {signal.Signals(number).name}", remedy="run the same command again to continue")

    def stop_for(self, reason: JobError) -> None:
        """Stop the run as SIGTERM does, from another thread; it ends with `reason` instead of a signal's name."""
        self.reason = self.reason or reason
        if self._previous:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._event.set()

    def __call__(self) -> bool:
        return self._event.is_set()

    def raise_if_set(self) -> None:
        if self():
            raise Interrupted("Stopped by a signal", remedy="run the same command again to continue")

    @contextlib.contextmanager
    def breakable(self) -> Iterator[None]:
        self.raise_if_set()
        self._breakable += 1
        try:
            yield
        finally:
            self._breakable -= 1


@dataclass
class Context:
    """What a stage is given: settings, the run directory, and the few things it may ask of the pipeline."""

    settings: Settings
    run: RunDirectory
    display: Any
    should_stop: StopSignal = field(default_factory=StopSignal)
    start_engine: Callable[["Context"], Any] | None = None
    force: bool = False
    backup: Any = None  # jobs.backup.Backup, where the run is saved elsewhere while it runs
    loads: int = 0
    pulse: float = 0.0  # time.time() of the last progress
    reading: Any = None  # jobs.storage.read_ahead.ReadAhead, from fetch until the engine is up
    _engine: Any = None

    @property
    def path(self) -> Path:
        return self.run.path

    @property
    def verifier_path(self) -> Path:
        """Folder of the verifier's checkpoint on this machine, after `fetch`."""
        return Path(self.locations()["verifier"])

    def locations(self) -> dict[str, Any]:
        """{"verifier": folder, "heads": {name: folder}} on this machine, after `fetch`."""
        return read_json(self.path / "locations.json")

    def fetched(self) -> dict[str, Any]:
        """{"verifier": {model, revision, bytes}, "heads": {name: …}}, the same on every machine."""
        return read_json(self.path / "fetched.json")

    def states(self, split: str) -> Path:
        return self.path / "states" / split

    def progress(self, done: float, total: float | None = None, unit: str = "", **extra: Any) -> None:
        self.pulse = time.time()
        self.display.progress(done, total, unit, **extra)

    def note(self, text: str) -> None:
        """A remark for the person and for the record."""
        self.display.note(text)
        self.run.event("note", text=text)

    def engine(self) -> Any:
        """The one verifier engine of this run, started when it is first needed."""
        if self._engine is None:
            assert self.start_engine is not None
            # No save meanwhile: workers are forked, and a thread that holds a lock then would hold it in them for ever.
            with self.should_stop.breakable(), self.backup.paused() if self.backup else contextlib.nullcontext():
                self._engine = self.start_engine(self)
            self.stop_reading()
            self.count_load()
        return self._engine

    def count_load(self) -> None:
        """Note a start of the verifier, by this process or by a server it started: each costs the time of a load."""
        self.loads += 1
        self.run.ledger["verifier_loads"] += 1
        self.run.save()
        self.run.event("verifier loaded", load=self.run.ledger["verifier_loads"])

    def stop_reading(self) -> None:
        """End the read-ahead of the verifier's files, and keep for the record what it read."""
        if self.reading is not None:
            (reading, self.reading) = (self.reading, None)
            if (done := reading.stop()) is not None and done.bytes:
                self.run.event("verifier read ahead", bytes=done.bytes, seconds=round(done.seconds, 3), whole=done.whole)

    def release_engine(self) -> None:
        """Give the verifier's memory back; training needs it."""
        self.stop_reading()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
