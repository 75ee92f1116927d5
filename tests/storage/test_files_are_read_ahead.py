"""Files are in the page cache after a read-ahead, in their order and within its limit; its process never outlives its use."""

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jobs.storage.read_ahead import RANGE_BYTES, ReadAhead, read, room

MIB = 1 << 20


def resident(file: Path) -> float:
    """Share of the file's pages in memory, by mincore(2)."""
    with file.open("rb") as handle:
        size = file.stat().st_size
        mapped = mmap.mmap(handle.fileno(), size, prot=mmap.PROT_READ)
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages.ctypes.data_as(ctypes.c_void_p)) == 0
        return float((pages & 1).mean())


def cold(file: Path) -> None:
    """Out of the page cache; a file system that lives in it (tmpfs) cannot do that."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident(file) > 0.02:
        pytest.skip("this file system keeps its files in memory")


@pytest.fixture
def files(tmp_path):
    made = [tmp_path / f"model-{n}.safetensors" for n in range(3)]
    for file in made:
        file.write_bytes(os.urandom(MIB) * 70)  # more than one range each
    return made


def test_everything_is_in_memory_afterwards(files):
    for file in files:
        cold(file)
    done = read(files, 4, 1 << 40)
    assert done.whole and done.bytes == 210 * MIB > 3 * RANGE_BYTES
    assert all(resident(file) > 0.99 for file in files)


def test_no_more_than_the_limit_is_read_and_that_from_the_front(files):
    for file in files:
        cold(file)
    done = read(files, 4, 80 * MIB)
    assert (done.bytes, done.whole) == (80 * MIB, False)
    assert resident(files[0]) > 0.99 and resident(files[2]) < 0.1


def test_the_process_reads_and_says_what_it_read(files):
    reading = ReadAhead(files, 2)
    os.waitid(os.P_PID, reading.pid, os.WEXITED | os.WNOWAIT)  # it ends by itself when all is read
    done = reading.stop()
    assert done.whole and done.bytes == 210 * MIB and done.seconds > 0
    assert 0 < room() <= int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10


def test_what_vllm_calls_multi_threaded_loading_reads_nothing(tmp_path):
    """Why the read-ahead is there: each of those threads calls `load_file`, which maps the file and leaves it on the disk."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    file = tmp_path / "model.safetensors"
    save_file({f"tensor{n}": torch.zeros(32 * MIB, dtype=torch.uint8) for n in range(4)}, file)
    cold(file)
    tensors = load_file(file, device="cpu")
    assert resident(file) < 0.5
    assert sum(int(tensor.sum()) for tensor in tensors.values()) == 0 and resident(file) > 0.99


def endless(folder: Path) -> Path:
    """A sparse file of 2 TiB, which nobody reads to the end."""
    file = folder / "endless"
    with file.open("wb") as handle:
        handle.truncate(2 << 40)
    return file


def test_it_stops_in_the_middle_when_it_is_told_to(tmp_path):
    reading = ReadAhead([endless(tmp_path)], 2)
    status = Path(f"/proc/{reading.pid}/io")
    while "rchar: " not in (text := status.read_text()) or int(text.split("rchar: ")[1].split()[0]) < 64 * MIB:
        time.sleep(0.01)
    done = reading.stop()
    assert done is not None and 0 < done.bytes < 2 << 40 and not done.whole
    assert not Path(f"/proc/{reading.pid}").exists()


def test_it_ends_with_the_process_that_started_it(tmp_path):
    code = (
        "import json, sys, time; from pathlib import Path; from jobs.storage.read_ahead import ReadAhead\n"
        "reading = ReadAhead([Path(sys.argv[1])], 1); print(json.dumps(reading.pid), flush=True); time.sleep(1000)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(endless(tmp_path))], stdout=subprocess.PIPE, text=True)
    pid = json.loads(parent.stdout.readline())
    io = Path(f"/proc/{pid}/io")
    while int(io.read_text().split("rchar: ")[1].split()[0]) < 64 * MIB:
        time.sleep(0.01)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if state == "Z":  # nobody reaps it in a container without an init
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists(), "the reading process outlived its parent"
