"""Folders that look like a packaged head, and processes that die while publishing or pulling one."""

import contextlib
import hashlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from jobs.storage import s3

MIB = 1 << 20
MODEL_BYTES = 17 * MIB + 7  # four parts of 5 MiB, the last one short


def make_head(folder: Path, seed: int, model_bytes: int = MODEL_BYTES) -> Path:
    """A manifest and three files, one of them in a folder; heads of two seeds differ in content, not in size."""
    files = {
        "model.safetensors": random.Random(seed).randbytes(model_bytes),
        "config.json": b'{"seed": %d}' % seed,
        "sglang/config.json": b'{"sglang": %d}' % seed,
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    entries = {name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)} for name, content in files.items()}
    (folder / "manifest.json").write_text(json.dumps({"files": entries, "seed": seed}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed_at(bytes_done: int, work: Callable[[Callable[[int, int], None]], object]) -> int:
    """Run work(progress) in a process that SIGKILLs itself once `bytes_done` are reported; returns the report."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:

        def progress(done: int, total: int) -> None:
            if done >= bytes_done:
                os.write(write_end, str(done).encode())
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            work(progress)
        finally:
            os._exit(1)  # it should not have got so far
    os.close(write_end)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "the process was not killed in the middle"
    done = int(os.read(read_end, 100))
    os.close(read_end)
    return done


@contextlib.contextmanager
def sent_bodies_counted(ledger: Path, least: int | None = None) -> Iterator[None]:
    """A line in the file `ledger` with the bytes of every part that a client begins to send, retries too; what a
    killed process began is counted. With `least`, every body of at least so many bytes, part or object."""
    clients_for = s3.clients_for

    def counting(*arguments):
        asking, sending = clients_for(*arguments)

        def begun(request, **_):
            size = int(request.headers.get("Content-Length", 0))
            if size >= (least or 0):
                with open(ledger, "ab", buffering=0) as file:
                    file.write(b"%d\n" % size)

        sending.meta.events.register("before-send.s3.UploadPart" if least is None else "before-send.s3", begun)
        return asking, sending

    with mock.patch.object(s3, "clients_for", counting):
        yield


def bodies_sent(ledger: Path) -> int:
    return sum(int(line) for line in ledger.read_text().splitlines())
