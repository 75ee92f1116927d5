"""An engine whose driver is gone must end: it holds the GPUs, and the lock of the state store.

vLLM 0.16.0 tells a worker when its engine core dies, but a core and the data-parallel coordinator live on when the
process that started them is killed: they wait for requests for ever.
"""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Sequence


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
    ended = [psutil.Process(pid) for pid in [*others, *([parent] if parent != driver else [])]]  # by start time too: an id may be used again

    def wait() -> None:
        watched.wait()
        for process in ended:
            with contextlib.suppress(psutil.Error):
                process.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="end-with-driver", daemon=True).start()
