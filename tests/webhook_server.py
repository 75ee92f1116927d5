"""A webhook on loopback: a real HTTP server that keeps what was posted to it."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Webhook:
    def __init__(self) -> None:
        self.messages: list[dict] = []
        self.refusals = 0  # answer so many posts with 503 first
        self.url = ""

    def events(self) -> list[str]:
        return [message["event"] for message in self.messages]


@contextlib.contextmanager
def webhook() -> Iterator[Webhook]:
    state = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            refused, state.refusals = state.refusals > 0, state.refusals - 1
            if not refused:
                state.messages.append(json.loads(body))
            self.send_response(503 if refused else 200)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}/hook"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
