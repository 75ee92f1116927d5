"""Large files read into the page cache before somebody maps them: the verifier's shards while the set-up still runs.

Why: vLLM 0.16.0 maps its shards, and a mapped tensor is read by page faults, one after the other. Its
`enable_multithread_load` does not change that: with safetensors 0.7.0 `load_file` maps as well (measured: 12 % of a
file is in memory after it). Many ranges read at once by plain reads go as fast as the disk does, for all
tensor-parallel workers together, and the time of imports, process groups and graphs is used.

Decision: a process of its own at low priority, `python -m jobs.storage.read_ahead`, so that it shares no interpreter
lock with the imports and none of its threads is there when workers are forked. It ends with the process that started
it, and reads no more than memory has room for: what does not fit would push out what was read first.
"""

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

RANGE_BYTES, PIECE_BYTES = 64 << 20, 4 << 20
# Of the memory that is free or could be: the workers need some of it too.
SHARE_OF_ROOM = 0.8
END_SECONDS = 5.0
LOWEST_PRIORITY = 19
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Read:
    """What was read, and whether that is all of it."""

    bytes: int
    seconds: float
    whole: bool


def read(files: Sequence[Path], threads: int, limit: int, should_stop: Callable[[], bool] = lambda: False) -> Read:
    """Read the first `limit` bytes of the files, in their order, by so many threads at once; what cannot be read is left out."""
    ranges, total = [], 0
    for file in files:
        size = file.stat().st_size
        ranges.append((file, 0, min(size, max(limit - total, 0))))
        total += size
    done = read_ranges(ranges, threads, should_stop)
    return Read(done.bytes, done.seconds, done.bytes == total)


def read_ranges(wanted: Iterable[tuple[Path, int, int]], threads: int, should_stop: Callable[[], bool]) -> Read:
    """Read (file, first byte, bytes) of each, in pieces that the threads take in order."""
    pieces: queue.SimpleQueue[tuple[Path, int, int]] = queue.SimpleQueue()
    total = 0
    for file, first, length in wanted:
        total += length
        for begin in range(first, first + length, RANGE_BYTES):
            pieces.put((file, begin, min(RANGE_BYTES, first + length - begin)))
    done = [0] * threads

    def reader(number: int) -> None:
        buffer = bytearray(PIECE_BYTES)
        with contextlib.suppress(queue.Empty):
            while not should_stop():
                file, begin, length = pieces.get_nowait()
                with contextlib.suppress(OSError):
                    done[number] += _read_range(file, begin, length, buffer, should_stop)

    began = time.monotonic()
    running = [threading.Thread(target=reader, args=(number,), daemon=True) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return Read(sum(done), time.monotonic() - began, sum(done) == total)


def _read_range(file: Path, begin: int, length: int, buffer: bytearray, should_stop: Callable[[], bool]) -> int:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, begin, length, os.POSIX_FADV_WILLNEED)  # the whole range in flight at once
        at = begin
        while at < begin + length and not should_stop():
            got = os.preadv(handle, [memoryview(buffer)[: begin + length - at]], at)
            if not got:
                break
            at += got
        return at - begin
    finally:
        os.close(handle)


def room() -> int:
    """Bytes that the page cache could take without pushing anything else out, in this machine and in this container."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = [int(fields["MemAvailable"].split()[0]) << 10]
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):  # no limit says `max`
        limit = int((group / "memory.max").read_text())
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        found.append(max(limit - int(used["anon"]) - int(used.get("unevictable", 0)), 0))
    return min(found)


class ReadAhead:
    """The reading process, from its start to `stop`."""

    def __init__(self, files: Sequence[Path], threads: int):
        wanted = {"files": [str(file) for file in files], "threads": threads, "limit": int(SHARE_OF_ROOM * room())}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jobs.storage.read_ahead"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
            self._process.stdin.flush()

    def __enter__(self) -> "ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> Read | None:
        """End it; what it read, or None if it does not say so in time."""
        self._process.terminate()
        try:
            told, _ = self._process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            told, _ = self._process.communicate()
        try:
            return Read(**json.loads(told))
        except ValueError:
            return None


def main() -> None:
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    parent = os.getppid()
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before that was set
        return
    os.nice(LOWEST_PRIORITY)
    wanted = json.loads(sys.stdin.readline())
    result = read([Path(file) for file in wanted["files"]], wanted["threads"], wanted["limit"], stopped.is_set)
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(vars(result)), flush=True)


if __name__ == "__main__":
    main()
