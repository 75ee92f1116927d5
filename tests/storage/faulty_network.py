"""A TCP relay before a real server: breaks connections off, changes bytes on their way to it, or is slow; and it counts."""

import collections
import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_METHOD = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) /\S* HTTP/1")  # no body of the tests has it


@dataclass
class FaultyNetwork:
    upstream: tuple[str, int]
    endpoint_url: str = ""
    break_after: int | None = None  # bytes of an answer after which its connection is closed ...
    breaks_left: int = 0  # ... for so many connections
    swap: tuple[bytes, bytes] | None = None  # in requests, the first for the second
    requests_per_second: int | None = None  # bytes of each connection's requests
    answers_per_second: int | None = None  # bytes of each connection's answers
    starved: int = 0  # so many connections get a hundredth of that from their second MiB on
    broken: int = 0
    answered: int = 0  # bytes of all answers
    requests: collections.Counter = field(default_factory=collections.Counter)  # by method
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.upstream)
            threading.Thread(target=self._relay, args=(client, server, self._request), daemon=True).start()
            threading.Thread(target=self._relay, args=(server, client, self._answer()), daemon=True).start()

    def _relay(self, source: socket.socket, target: socket.socket, change) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                changed = change(data)
                if changed is None:
                    break
                target.sendall(changed)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _request(self, data: bytes) -> bytes:
        with self._lock:
            self.requests.update(found.decode() for found in _METHOD.findall(data))
        if self.requests_per_second:
            time.sleep(len(data) / self.requests_per_second)
        return data.replace(*self.swap) if self.swap else data

    def _answer(self):
        passed, slower = 0, 1

        def change(data: bytes) -> bytes | None:
            nonlocal passed, slower
            passed += len(data)
            if self.answers_per_second:
                time.sleep(slower * len(data) / self.answers_per_second)
            with self._lock:
                self.answered += len(data)
                if self.starved and passed > 1 << 20:
                    self.starved -= 1
                    slower = 100
                if self.break_after is not None and self.breaks_left and passed > self.break_after:
                    self.breaks_left -= 1
                    self.broken += 1
                    return None
            return data

        return change


@contextlib.contextmanager
def faulty_network(endpoint_url: str, **faults) -> Iterator[FaultyNetwork]:
    parts = urlsplit(endpoint_url)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if "requests_per_second" in faults:  # or the kernel takes a whole part at once
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        network = FaultyNetwork((parts.hostname, parts.port), f"http://127.0.0.1:{listener.getsockname()[1]}", **faults)
        threading.Thread(target=network.serve, args=(listener,), daemon=True).start()
        yield network
        listener.shutdown(socket.SHUT_RDWR)
