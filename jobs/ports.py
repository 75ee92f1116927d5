"""A TCP port for a server or a process group on this machine."""

import socket


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened on a moment ago; whoever takes it first has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
