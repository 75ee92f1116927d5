"""A link of a given rate and round trip on this machine, between two network namespaces that nobody else is in.

    with limited_link(gbps=1, round_trip=0.02) as link:      # from here on this process is at the near end
        with link.far_end():                                 # what is started in this block is at the far one
            ...

Decision: the namespaces have no name, so the kernel takes them and all that is in them away with the last process
that is in one, however it ends. Without a round trip the link is a veth pair; many kernels lack netem, so with one
it is two tun devices and a process that hands each packet on after its time (large ones whole, as the kernel segments
late). A token bucket (tbf) at both ends limits the rate, with 50 ms of queue. Nothing is remembered from one connection
to the next, or the first to be measured would pay for the others. Congestion control is the machine's.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

NEAR, FAR = "198.18.0.1", "198.18.0.2"  # from the range that is set aside for benchmarks
_NEWNET = 0x40000000  # CLONE_NEWNET; `os.unshare` begins with Python 3.12
_TUNSETIFF, _TUNSETOFFLOAD, _TUN_NO_PI_VNET_HDR, _CSUM_TSO4 = 0x400454CA, 0x400454D0, 0x0001 | 0x1000 | 0x4000, 0x01 | 0x02
_libc = ctypes.CDLL(None, use_errno=True)


class NoLink(Exception):
    """One sentence: why this machine cannot make one."""


@dataclass(frozen=True)
class Link:
    gbps: float
    carrier: int | None  # the process id of what carries it, which is no server
    _near: int  # descriptors of the namespaces
    _far: int

    @contextlib.contextmanager
    def far_end(self) -> Iterator[None]:
        _enter(self._far)
        try:
            yield
        finally:
            _enter(self._near)


@contextlib.contextmanager
def limited_link(gbps: float, round_trip: float = 0.0) -> Iterator[Link]:
    """Moves this thread, and those and the processes it starts, to the near end; back at the end. [Gbit/s], [s]"""
    if os.geteuid() != 0:
        raise NoLink("A limited link needs a network namespace, so root.")
    home, carrier = _namespace(), None
    try:
        near, far = _new_namespace(), _new_namespace()
        try:
            if round_trip:
                carrier = _start_carrier(near, far, round_trip / 2)
            else:
                _enter(near)
                _command(f"ip link add wire type veth peer name wire netns /proc/{os.getpid()}/fd/{far}")
            for namespace, address in ((far, FAR), (near, NEAR)):
                _enter(namespace)
                _set_up(address, gbps)
            yield Link(gbps, carrier, near, far)
        finally:
            if carrier:
                os.kill(carrier, signal.SIGKILL)
                os.waitpid(carrier, 0)
            os.close(near)
            os.close(far)
    finally:
        _enter(home)
        os.close(home)


def bytes_so_far() -> tuple[int, int]:
    """(received, sent) over the link by this end."""
    with open("/proc/thread-self/net/dev") as lines:
        fields = next(line for line in lines if line.lstrip().startswith("wire:")).split()
    return int(fields[1]), int(fields[9])


def _set_up(address: str, gbps: float) -> None:
    with open("/proc/sys/net/ipv4/tcp_no_metrics_save", "w") as file:
        file.write("1")
    burst = max(256 << 10, int(gbps * 1e9 / 8 * 0.001))  # a packet of 64 KiB must fit; 1 ms, because timers are late on a busy machine
    _command("ip link set lo up")
    _command(f"ip address add {address}/30 dev wire")
    _command("ip link set wire up")
    _command(f"tc qdisc add dev wire root tbf rate {int(gbps * 1e9)} burst {burst} latency 50ms")


def _start_carrier(near: int, far: int, delay: float) -> int:
    """The process behind the two tun devices; its end is theirs."""
    ends = []
    for namespace in (near, far):
        _enter(namespace)
        try:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", b"wire", _TUN_NO_PI_VNET_HDR))
            fcntl.ioctl(end, _TUNSETOFFLOAD, _CSUM_TSO4)
        except OSError as error:
            raise NoLink(f"A round trip needs a tun device here: {error}.") from None
        ends.append(end)
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
            _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            os.nice(-20)  # who comes late is a slower link
            _carry(ends[0], ends[1], delay)
        finally:
            os._exit(1)
    for end in ends:
        os.close(end)
    return child


def _carry(near: int, far: int, delay: float) -> None:
    """Hand on what comes in at either end, `delay` seconds later, for ever."""
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        timeout = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select([near, far], [], [], timeout)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(end, 1 << 17)
                    under_way.append((time.monotonic() + delay, far if end == near else near, packet))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, end, packet = under_way.popleft()
            with contextlib.suppress(OSError):  # an end that is not up yet
                os.write(end, packet)


def _new_namespace() -> int:
    if _libc.unshare(_NEWNET) != 0:
        raise NoLink(f"A limited link needs a network namespace, which is refused here: {os.strerror(ctypes.get_errno())}.")
    return _namespace()


def _namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _command(line: str) -> None:
    try:
        done = subprocess.run(line.split(), capture_output=True, text=True)
    except FileNotFoundError:
        raise NoLink(f"A limited link needs `{line.split()[0]}` (Debian package iproute2).") from None
    if done.returncode:
        raise NoLink(f"A limited link is refused here: `{line}` says {' '.join(done.stderr.split())}.")
