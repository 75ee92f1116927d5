"""The benchmark of transfers runs through a limited link, no faster than the link, and leaves nothing of it behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from limited_link import NoLink, limited_link

SCRIPT = Path(__file__).with_name("transfer_rates.py")


@pytest.fixture(params=[0, 10], ids=["without a round trip", "with one"])
def round_trip(request):
    """[ms]; skips, with the reason, where this machine can make no such link."""
    try:
        with limited_link(1.0, request.param / 1000):
            pass
    except NoLink as reason:
        pytest.skip(str(reason))
    return request.param


def living(child: subprocess.Popen) -> set[str]:
    """Network namespaces of the processes that belong to the benchmark."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            session = int(stat.read_text().rpartition(")")[2].split()[3])
            if session == child.pid:
                found.add(os.readlink(stat.with_name("ns") / "net"))
        except OSError:  # it ended
            continue
    return found


def started(round_trip: int, *more: str) -> subprocess.Popen:
    command = [
        sys.executable,
        str(SCRIPT),
        "24",
        "--link",
        "0.2",
        "--rtt",
        str(round_trip),
        "--rounds",
        "1",
        "--only",
        "publish,pull",
        *more,
    ]
    # A shell's background job ignores SIGINT, and so does what it starts.
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def test_both_ways_go_through_the_link(round_trip):
    child = started(round_trip)
    out, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors[-2000:]
    rates = {line[:28].strip(): float(re.search(r"(\d+) MB/s", line)[1]) for line in out.splitlines()}
    assert set(rates) == {"up: publish", "up: publish, when_supported", "down: pull"}
    assert all(1 < rate < 1.05 * 25 for rate in rates.values()), out  # 0.2 Gbit/s are 25 MB/s
    assert not living(child)  # the namespaces have no name: nobody is in them, so they are gone


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_takes_it_down(round_trip, sign):
    child, ours = started(round_trip, "--rounds", "50"), {os.readlink("/proc/self/ns/net")}
    ends = time.monotonic() + 60
    while len(living(child) - ours) < 2 and time.monotonic() < ends:
        time.sleep(0.1)
    assert len(living(child) - ours) == 2, "the link was never made"
    time.sleep(2)
    child.send_signal(sign)
    child.communicate(timeout=60)
    assert child.returncode != 0
    assert not living(child)  # the namespaces have no name: nobody is in them, so they are gone


def test_who_may_make_none_is_told_so():
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            with limited_link(1.0):
                pass
        except NoLink as reason:
            os.write(write_end, str(reason).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(child, 0)
    with open(read_end) as said:
        assert said.read() == "A limited link needs a network namespace, so root."
