"""Writing behind: a thread that runs writes in their order and syncs once for all who wait.

Decision: what is decoded in a second is written in a second or two, but not evenly (a thousand answers begun together
fill their extents together), and a sync waits for the disk. So neither holds up the thread that takes rows in; only
full memory does. A sync is put off while there is more to write, for at most SYNC_EVERY seconds: one for many samples.
"""

import queue
import threading
import time
from collections.abc import Callable

SYNC_EVERY = 0.5


class DiskThread:
    """Runs what it is given, in order. After a failure (`failure`) nothing is run but what was given with `always`."""

    def __init__(self, sync: Callable[[], None]):
        self.failure: BaseException | None = None
        self._sync, self._waiting, self._synced = sync, [], time.monotonic()
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="state-disk", daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], None], always: bool = False) -> None:
        """Run `job` after everything given before; the caller bounds what waits here."""
        self._queue.put((job, always))

    def sync_then(self, then: Callable[[], None]) -> None:
        """Call `then` once everything given before is durable."""
        self._queue.put((lambda: self._waiting.append(then), False))

    def join(self) -> None:
        """Returns when everything given before is durable, or has failed."""
        done = threading.Event()
        self.sync_then(done.set)
        while not done.wait(0.05) and self.failure is None and self._thread.is_alive():
            pass

    def close(self) -> None:
        """End the thread, after everything given before."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            job, always = item
            self._attempt(job, always)
            del item, job  # they hold a step's memory
            if self._waiting and (self._queue.empty() or time.monotonic() - self._synced > SYNC_EVERY):
                self._attempt(self._tell)
        self._attempt(self._tell)

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._sync()
        self._synced = time.monotonic()
        for then in waiting:
            then()

    def _attempt(self, job: Callable[[], None], always: bool = False) -> None:
        try:
            if always or self.failure is None:
                job()
        except BaseException as error:  # noqa: BLE001  its owner raises it, see `failure`
            self.failure = self.failure or error
