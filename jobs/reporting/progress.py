"""What the display knows while a stage runs: how fast it goes, and a line about the whole run."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jobs.reporting import figures

RATE_WINDOW_SECONDS = 60.0
OUTLOOK_SECONDS = 5.0  # a forecast takes half a millisecond of the interpreter


class RateMeter:
    """Rate and ETA from the last minute, so that a resumed or a slowing stage shows its present speed.

    `begun` is the first (seconds of the clock, done) of this start, for the rate over all of it.
    """

    def __init__(self, clock: Callable[[], float] | None = None):
        self._clock = clock or time.monotonic
        self._points: deque[tuple[float, float]] = deque()
        self.begun: tuple[float, float] | None = None

    def add(self, done: float) -> None:
        now = self._clock()
        if self._points and done < self._points[-1][1]:
            self._points.clear()
            self.begun = None
        self._points.append((now, done))
        self.begun = self.begun or (now, done)
        while len(self._points) > 2 and now - self._points[0][0] > RATE_WINDOW_SECONDS:
            self._points.popleft()

    def rate(self) -> float | None:
        """Units a second, or None before two points in time."""
        if len(self._points) < 2:
            return None
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start and last > first else None

    def measured(self, total: float | None, unit: str) -> dict[str, Any]:
        """How far the stage is, for the ledger: done `from` where this start began, in `seconds`; `per_second` of the last minute or None."""
        (begun, first), (now, done) = self.begun or self._points[-1], self._points[-1]
        return {"done": done, "total": total, "unit": unit, "from": first, "seconds": round(now - begun, 3), "per_second": self.rate()}

    def eta(self, total: float | None) -> float | None:
        rate = self.rate()
        return None if rate is None or total is None else max(0.0, total - self._points[-1][1]) / rate


class Outlook:
    """One line about the whole run, asked for at most every OUTLOOK_SECONDS; `ask` gives None where nothing is known yet."""

    def __init__(self, ask: Callable[[], str | None] | None):
        self._ask, self._began, self._asked, self._text = ask, time.monotonic(), -math.inf, None
        self._busy = threading.Lock()

    def line(self, at_once: bool = False) -> str:
        """From any thread. Never waits: the screen's own thread may ask while it is holding what another one wants."""
        now = time.monotonic()
        if self._ask and (at_once or now - self._asked >= OUTLOOK_SECONDS) and self._busy.acquire(blocking=False):
            try:
                self._asked, self._text = now, self._ask()
            except Exception:  # whatever is wrong with an estimate, the run that it is about goes on
                self._text = None
            finally:
                self._busy.release()
        return self._text or f"elapsed {figures.clock_text(now - self._began)}"
