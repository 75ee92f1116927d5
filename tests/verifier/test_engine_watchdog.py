"""An engine that gives no token ends the run with 75, even where the process is stuck in C code."""

import subprocess
import sys
import time

import psutil
import pytest

from jobs.errors import TryAgain
from jobs.verifier.watchdog import Watchdog


def test_no_token_interrupts_the_main_thread():
    begun = time.monotonic()
    with pytest.raises(TryAgain, match="no token for 1 s"), Watchdog(1, lambda: 5) as watchdog:
        watchdog.look()
        time.sleep(30)
    assert time.monotonic() - begun < 10


def test_tokens_keep_it_quiet():
    count = 0
    with Watchdog(1, lambda: count) as watchdog:
        for count in range(15):  # noqa: B007  read by the watchdog
            watchdog.look()
            time.sleep(0.2)


def test_a_process_stuck_in_c_code_ends_itself_with_75():
    """A mutex locked twice by one thread: no signal handler of Python's ever runs again."""
    code = """
import ctypes
from jobs.verifier.watchdog import Watchdog
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with Watchdog(1, lambda: 0, hard_exit_after=1):
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert ended.returncode == 75
    assert "no token for 1 s" in ended.stderr


def test_such_an_end_leaves_no_process_of_a_start_behind():
    """A core that hangs, one that has died, and the worker it left: no signal but SIGKILL ends them."""
    code = """
import ctypes, multiprocessing, os, signal, time
from jobs.errors import TryAgain
from jobs.verifier.orphans import Started
from jobs.verifier.watchdog import Watchdog

def hang():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    os.write(1, f"{os.getpid()}\\n".encode())  # one write: two processes share the pipe
    time.sleep(600)

def leave_a_worker():
    if os.fork():
        time.sleep(2)
        os._exit(1)
    hang()

started, fork = Started(), multiprocessing.get_context("fork")
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with Watchdog(4, lambda: 0, hard_exit_after=1, error=TryAgain("It was not up after 4 s"), started=started):
    for target in (hang, leave_a_worker):
        fork.Process(target=target).start()
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90
    )  # returns when nobody has its pipes any more
    assert ended.returncode == 75 and "not up after 4 s" in ended.stderr
    hanging = [int(line) for line in ended.stdout.split()]
    assert len(hanging) == 2
    assert [pid for pid in hanging if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE] == []
