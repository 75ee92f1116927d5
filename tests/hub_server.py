"""A Hugging Face hub on loopback: the two routes that a pinned download needs, over real HTTP.

It serves repositories from folders and can be told to hang in the middle of a file, as the real one
is known to do, to refuse a token, and to be busy for a while.
"""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    def __init__(self, repositories: dict[str, Path]):
        self.repositories = repositories
        self.hang_once: set[str] = set()  # file names whose first download stops half way
        self.downloads: list[tuple[str, str | None]] = []  # (file, Range header)
        self.stop = threading.Event()
        self.gated: set[str] = set()  # repositories whose files this account may not read
        self.status: int | None = None  # every answer: 401 and 403 as for a token that is invalid, or lacks a permission
        self.free, self.busy = 0, 0  # after `free` more questions, `busy` ones are answered with 503
        self.url = ""


@contextlib.contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[Hub]:
    state = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": state}))
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.stop.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.hub.free > 0:
            self.hub.free -= 1
        elif self.hub.busy > 0:
            self.hub.busy -= 1
            return self._answer(503, b"{}", {})
        if self.hub.status:
            return self._answer(
                self.hub.status, b"{}", {"X-Error-Message": "Invalid credentials in Authorization header"} if self.hub.status == 401 else {}
            )
        path = self.path.split("?")[0]
        for name, folder in self.hub.repositories.items():
            if path == f"/api/models/{name}/auth-check":
                gated = name in self.hub.gated
                return self._answer(403 if gated else 200, b"{}", {"X-Error-Code": "GatedRepo"} if gated else {})
            if path.startswith(f"/api/models/{name}"):
                return self._info(name, folder, path)
            if path.startswith(f"/{name}/resolve/"):
                return self._file(folder, path.removeprefix(f"/{name}/resolve/"))
        self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _info(self, name: str, folder: Path, path: str) -> None:
        revision = path.partition("/revision/")[2]
        if revision not in ("", "main", COMMIT):
            return self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = [{"rfilename": str(f.relative_to(folder)), "size": f.stat().st_size} for f in sorted(folder.rglob("*")) if f.is_file()]
        body = {"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": [], "private": False, "downloads": 0}
        self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, folder: Path, rest: str) -> None:
        revision, _, name = rest.partition("/")
        target = folder / name
        if revision != COMMIT or not target.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = target.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if self.command == "GET":
            self.hub.downloads.append((name, wanted))
        start, _, last = wanted.removeprefix("bytes=").partition("-") if wanted else ("0", "", "")
        start, end = int(start), min(int(last or len(data)) + 1, len(data))
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        hang = self.command == "GET" and name in self.hub.hang_once
        if hang:
            self.hub.hang_once.discard(name)
        self._answer(206 if wanted else 200, data[start:end], headers, hang=hang)

    def _answer(self, code: int, body: bytes, headers: dict[str, str], *, hang: bool = False) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body[: len(body) // 2] if hang else body)
            self.wfile.flush()
            if hang:
                self.hub.stop.wait(60)
