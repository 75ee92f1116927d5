"""An engine whose driver is gone must end: it holds the GPUs, and the lock of the state store.

vLLM 0.16.0 tells a worker when its engine core dies, but a core and the data-parallel coordinator live on when the
process that started them is killed: they wait for requests for ever.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

# Of a process that was killed and frees gigabytes.
DYING_SECONDS = 20


class _Ending:
    """A process that will end; one that has ended and that nobody has waited for counts as ended."""

    def __init__(self, pid: int):
        import psutil

        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError:  # a kernel, or a sandbox, without it
            self._descriptor, self._process = -1, psutil.Process(pid)

    def wait(self) -> None:
        if self._descriptor >= 0:
            select.select([self._descriptor], [], [])
        else:
            self._process.wait()


def end_with(driver: int, others: Sequence[int]) -> None:
    """From now on: when process `driver` ends, kill `others`, this worker's engine core and this worker. Nothing for the driver itself."""
    import psutil

    if driver == os.getpid():
        return
    parent = os.getppid()  # the core, where the worker is not in the core's own process
    watched = _Ending(driver)
    ended = [
        psutil.Process(pid) for pid in [*others, *([parent] if parent != driver else [])]
    ]  # by start time too: an id may be used again

    def wait() -> None:
        watched.wait()
        for process in ended:
            with contextlib.suppress(psutil.Error):
                process.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-driver", daemon=True).start()


class Started:
    """The processes that `multiprocessing` starts from here on, and all below them: an engine's cores, workers, compilers.

    Until the engine is up nothing ends them with the driver. Those of a core that is gone are no descendants any more, so
    `look` has to be called now and then while it starts.
    """

    def __init__(self) -> None:
        self._before = set(multiprocessing.active_children())
        self._seen: set[Any] = set()  # of psutil.Process, which an id that is used again does not equal
        self._lock = threading.Lock()

    def look(self) -> None:
        import psutil

        with self._lock:
            below: dict[int, list[Any]] = {}
            for process in psutil.process_iter(["ppid"]):
                below.setdefault(process.info["ppid"], []).append(process)
            cores = {child.pid for child in set(multiprocessing.active_children()) - self._before}
            self._seen = {process for process in self._seen if _lives(process)}
            new = {child for child in below.get(os.getpid(), []) if child.pid in cores} | self._seen
            while new:
                self._seen |= new
                new = {child for process in new for child in below.get(process.pid, [])} - self._seen

    def end(self) -> None:
        """Kill those that live; returns when they have ended, or after DYING_SECONDS."""
        import psutil

        self.look()
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                process.kill()
        deadline = time.monotonic() + DYING_SECONDS
        while any(map(_lives, self._seen)) and time.monotonic() < deadline:
            time.sleep(0.05)
        multiprocessing.active_children()  # takes their exit codes


def _lives(process: Any) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
