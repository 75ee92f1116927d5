"""Threads that send, and that a process which has been told to stop need not wait for.

Decision: no ThreadPoolExecutor, whose threads the interpreter joins at its end. A server may take a request and stay
silent for its whole time limit (rclone holds back parts that are far ahead); a machine that goes back cannot wait.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any

STOP_SECONDS = 5.0  # for what is on its way when a stop is asked for; on a slow link it would take minutes
IDLE_SECONDS = 5.0  # a thread without work ends
LOOK_SECONDS = 0.5  # between two looks at whether to give up


class Senders:
    """At most `threads` daemon threads, begun when there is work for them."""

    def __init__(self, threads: int, name: str):
        self._threads, self._name = threads, name
        self._work: queue.SimpleQueue[tuple[Future, Callable, tuple]] = queue.SimpleQueue()
        self._lock, self._running = threading.Lock(), 0

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future:
        future: Future = Future()
        with self._lock:
            self._work.put((future, work, arguments))
            begin = self._running < self._threads
            self._running += begin
        if begin:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            try:
                future, work, arguments = self._work.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._work.empty():
                        self._running -= 1
                        return
                continue
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*arguments))
                except BaseException as error:
                    future.set_exception(error)


class Grace:
    """Whether `should_stop` has been true for STOP_SECONDS."""

    def __init__(self, should_stop: Callable[[], bool]):
        self._should_stop, self._since = should_stop, math.inf

    def __call__(self) -> bool:
        if not self._should_stop():
            return False
        self._since = min(self._since, time.monotonic())
        return time.monotonic() - self._since >= STOP_SECONDS


def settled(futures: Iterable[Future], give_up: Callable[[], bool]) -> bool:
    """Wait until all have ended; False, with those that have not begun cancelled, where `give_up` says so before.

    One after the other: a store of terabytes is a hundred thousand blocks.
    """
    futures = list(futures)
    for future in futures:
        while not wait([future], timeout=LOOK_SECONDS).done:
            if give_up():
                for waiting in futures:
                    waiting.cancel()
                return False
    return True
