"""One question for many threads that ask it at the same time."""

import threading
from collections.abc import Callable


class SharedLook:
    """look() for every thread that calls this, once for all that wait: it always begins after each of them asked.

    What it raises is raised in all of them, and in those that come later.
    """

    def __init__(self, look: Callable[[], None]):
        self._look, self._changed = look, threading.Condition()
        self._begun, self._ended, self._error = 0, 0, None

    def __call__(self) -> None:
        with self._changed:
            needed = self._begun + 1  # the one under way began before we asked
            while self._ended < needed and not self._error:
                if self._begun > self._ended:
                    self._changed.wait()
                else:
                    self._begin()
            if self._error:
                raise self._error

    def _begin(self) -> None:
        """Called, and left, with the lock held."""
        self._begun += 1
        self._changed.release()
        try:
            self._look()
            error = None
        except BaseException as raised:
            error = raised
        finally:
            self._changed.acquire()
        self._ended, self._error = self._begun, error
        self._changed.notify_all()
