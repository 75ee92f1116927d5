"""Files that appear whole or not at all, and line logs that survive a crash.

Decision: everything that outlives a stage goes through `write_atomically` (temporary name in the
same folder, fsync, rename, fsync of the folder), because a run on a rented machine ends by SIGKILL
as often as by itself, and a half-written `run.json` would cost the whole run. Logs are appended to
instead, one JSON object a line, and their torn last line is cut off when they are opened again: a
line is either there with its newline or it never happened.

A full disk is the one write error a person can cure in the middle of a run, so it becomes a
`MustFix` with the path and the free bytes wherever this package writes.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jobs.errors import MustFix

LOCK_WAIT_SECONDS = 5.0  # the workers of a killed engine need a second or two to notice and let go
_BLOCK = 1 << 22  # bytes read at once when hashing: large enough for a network disk


@contextlib.contextmanager
def disk_full_named(path: Path) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT of the block into a MustFix with the path, the free bytes and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = next(p for p in (path, *path.absolute().parents) if p.is_dir())
        free = shutil.disk_usage(folder).free
        raise MustFix(
            f"The disk is full: {free:,} bytes are free",
            where=str(path),
            remedy="free space or move the run directory to a larger disk, then run the same command again",
        ) from error


def fsync_file(path: Path) -> None:
    """Have the kernel write a file's bytes to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Have the kernel write a folder's entries: without it a renamed file can be gone after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write every byte, at `offset` or at the descriptor's own place: one call may write less than it was given."""
    view = memoryview(data).cast("B")
    while len(view):
        written = os.write(descriptor, view) if offset is None else os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset = None if offset is None else offset + written


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` under `path`: readers see the old bytes or the new ones, never a part, also after a power cut."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident():x}.tmp")
    try:
        with disk_full_named(path):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
            fsync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json_atomically(path: Path, value: Any) -> None:
    """`write_atomically` of indented JSON; NaN is refused, because JSON has none and other readers stop at it."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text.encode() + b"\n")


def read_json(path: Path) -> Any:
    """Parse a JSON file; missing or malformed is a MustFix naming it."""
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise MustFix(f"{Path(path).name} does not exist", where=str(path), remedy="check the folder's name") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise MustFix(f"{Path(path).name} is not JSON: {error}", where=str(path), remedy="restore the file") from None


def sha256_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Hex sha256 of a file; `progress` is called with the bytes of each block read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            if progress:
                progress(len(block))
    return digest.hexdigest()


@contextlib.contextmanager
def held(path: Path, *, what: str, remove: bool = False) -> Iterator[None]:
    """Hold an exclusive flock on the file `path` (created where missing); held by another process -> MustFix.

    The kernel lets go of it when the process ends, however it ends; it is waited for LOCK_WAIT_SECONDS.
    `remove` takes the file away at the end, for folders that should hold nothing but their contents.
    """
    descriptor = _locked(path, fcntl.LOCK_EX, what)
    try:
        yield
        if remove:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held_by_others_too(path: Path, *, what: str, first: bool) -> Iterator[None]:
    """Hold a flock on `path` that a group of processes holds together and nobody beside it.

    first: this process takes it alone, which only succeeds where nobody has it, and then lets the others of its group
    in, who come after that. Otherwise as `held`.
    """
    descriptor = _locked(path, fcntl.LOCK_EX if first else fcntl.LOCK_SH, what)
    try:
        if first:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _locked(path: Path, kind: int, what: str) -> int:
    """A descriptor of `path` with the lock; MustFix where another process keeps it for LOCK_WAIT_SECONDS."""
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise MustFix(
                        f"Another process is using {what}",
                        where=str(path),
                        remedy="wait for it to end, or end it, then run the same command again",
                    ) from None
                time.sleep(0.1)
                continue
            if _is_still(path, descriptor):
                return descriptor
            os.close(descriptor)  # its last holder removed it: a lock on a nameless file keeps nobody out
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except BaseException:
        os.close(descriptor)
        raise


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def whole_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield (line number from 1, byte offset, line without its newline) of every whole line; a missing file has none.

    A torn tail is skipped: an unterminated last line, or trailing lines with NUL bytes, which is how a
    file system shows a block that was allocated and never written. NULs before a good line are damage
    no crash makes: MustFix.
    """
    if not path.exists():
        return
    offset, torn_at = 0, None
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n") or b"\0" in line:
                torn_at = torn_at or number
            elif torn_at:
                raise MustFix(f"Line {torn_at} of {path.name} is damaged", where=str(path), remedy="restore the file from a copy")
            else:
                yield number, offset, line[:-1]
            offset += len(line)


def files_under(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every regular file below, links aside, with its stat; what vanishes meanwhile is passed over.

    Others write where this looks, and `Path.rglob` raises for a folder or file that goes away under it.
    """
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield path, found


class LineLog:
    """An append-only file of lines; opening it cuts a torn tail off (`cut_bytes` says how much)."""

    def __init__(self, path: Path):
        self.path = Path(path)
        end = 0
        for _, offset, line in whole_lines(self.path):
            end = offset + len(line) + 1
        created = not self.path.exists()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with disk_full_named(self.path):
            self._descriptor = os.open(self.path, flags, 0o666)
            self.cut_bytes = os.fstat(self._descriptor).st_size - end
            if self.cut_bytes:
                os.ftruncate(self._descriptor, end)
                os.fsync(self._descriptor)
            if created:
                fsync_folder(self.path.parent)
        self._size = end

    def append(self, line: bytes, *, sync: bool = False) -> None:
        """Append `line` and a newline; on a full disk the part that was written is taken back."""
        with disk_full_named(self.path):
            try:
                write_all(self._descriptor, line + b"\n")
                if sync:
                    os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(line) + 1

    def sync(self) -> None:
        with disk_full_named(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class JsonLog(LineLog):
    """A `LineLog` of JSON objects, e.g. `events.jsonl`."""

    def append_json(self, value: Any, *, sync: bool = False) -> None:
        self.append(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(), sync=sync)
