"""An engine that hangs must end the run: nobody pays for eight GPUs that wait for each other for ever."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jobs.errors import EXIT_TRY_AGAIN, TryAgain
from jobs.verifier.orphans import Started

# A hung C call ignores signals: after this many more seconds the process ends itself.
HARD_EXIT_AFTER = 60


@dataclass
class Watchdog:
    """Ends a run whose engine gives no token for `seconds`: nobody pays for eight GPUs that hang.

    `look` notes progress from the loop. If none came in time, a thread interrupts the main thread
    by a signal whose handler raises TryAgain; where even that is not delivered (a hung C call) the
    process ends with exit code 75 after HARD_EXIT_AFTER more seconds: what is committed is safe.

    error: what is raised instead. started: processes that no worker ends with this one yet; they are ended before such an exit.
    """

    seconds: float
    count: Callable[[], int]
    hard_exit_after: float = HARD_EXIT_AFTER
    error: TryAgain | None = None
    started: Started | None = None
    struck: bool = False  # it has interrupted the main thread
    _last: int = -1
    _moved: float = 0.0
    _end: threading.Event = field(default_factory=threading.Event)
    _previous: Any = None

    def look(self) -> None:
        tokens = self.count()
        if tokens != self._last:
            self._last, self._moved = tokens, time.monotonic()

    def __enter__(self) -> "Watchdog":
        self._moved = time.monotonic()
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGALRM, self._raise)
            threading.Thread(target=self._watch, name="stall-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._previous is not None:
            signal.signal(signal.SIGALRM, self._previous)

    def _watch(self) -> None:
        while not self._end.wait(min(1.0, self.seconds / 4)):
            if self.started:
                with contextlib.suppress(Exception):  # the limit holds whatever becomes of a look
                    self.started.look()
            if time.monotonic() - self._moved > self.seconds:
                self._strike()

    def _strike(self) -> None:
        self.struck = True
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        if not self._end.wait(self.hard_exit_after):
            if self.started:
                with contextlib.suppress(Exception):
                    self.started.end()
            print(self._error().sentence(), file=sys.stderr, flush=True)
            os._exit(EXIT_TRY_AGAIN)

    def _error(self) -> TryAgain:
        return self.error or TryAgain(
            f"The verifier engine gave no token for {self.seconds:g} s", where="verifier.stall_seconds",
            remedy="run the same command again, finished answers are kept",
        )  # fmt: skip

    def _raise(self, *_: object) -> None:
        if not self._end.is_set():
            raise self._error()
