"""Bringing a saved run back to an empty disk, with many streams; what saved_run.py wrote.

Files appear in a hidden folder first and take their places at the end, the ledger last: a restore that
is killed leaves no run, and the next one goes on with the files that are whole. Modification times are
restored, because the ledger names large files by size and time.
"""

import errno
import hashlib
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path, PurePosixPath
from typing import Any

from jobs.errors import Interrupted, MustFix, TryAgain, unwritable_run_directory
from jobs.settings import PushSettings
from jobs.storage.destination import Destination, Progress, ShouldStop, destination
from jobs.storage.files import disk_full_named, fsync_file, fsync_folder, held, write_all, write_json_atomically
from jobs.storage.saved_run import MOST_THREADS, RECORD, find, object_of

STAGING = ".restoring"
ATTEMPTS = 5


def restore(
    uri: str,
    folder: Path,
    settings: PushSettings,
    *,
    progress: Progress | None = None,
    should_stop: ShouldStop = lambda: False,
) -> dict[str, Any] | None:
    """The run saved at `uri` (or beside the head there) into `folder`; returns its state, None where none is saved.

    MustFix: `folder` cannot be written, holds a run already, or another process works in it; the disk is too small.
    """
    found = find(uri, settings)
    if found is None:
        return None
    place, state, folder = destination(found[0], settings), found[1], Path(folder).absolute()
    for name in state["files"]:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise MustFix(f"The saved run names an impossible file {name!r}", where=uri, remedy="it was not saved by this program")
    with disk_full_named(folder):
        _make(folder)
        with held(folder / ".lock", what="this run directory"):
            if (folder / "run.json").exists():
                raise MustFix(
                    "The folder holds a run already",
                    where=str(folder),
                    remedy="take an empty --run-dir, or leave --resume-from out to continue the run there",
                )
            staging = folder / STAGING
            staging.mkdir(exist_ok=True)
            _require_room(staging, state)
            _bring(place, state, staging, settings, progress, should_stop)
            _settle(staging, folder, state)
            write_json_atomically(folder / RECORD, state | {"uri": found[0]})
            os.replace(staging / "run.json", folder / "run.json")
            fsync_folder(folder)
            shutil.rmtree(staging)
    return state


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".lock").touch()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise unwritable_run_directory(folder, error) from error


def _require_room(staging: Path, state: dict[str, Any]) -> None:
    needed = sum(file["bytes"] for name, file in state["files"].items() if not (staging / name).exists())
    free = shutil.disk_usage(staging).free
    if needed > free:
        raise MustFix(
            f"The saved run has {needed / 1e9:.1f} GB more and the disk {free / 1e9:.1f} GB free",
            where=str(staging.parent),
            remedy="take a larger disk",
        )


def _bring(
    place: Destination, state: dict[str, Any], staging: Path, settings: PushSettings, progress: Progress | None, should_stop: ShouldStop
) -> None:
    total, done, lock = sum(file["bytes"] for file in state["files"].values()), 0, threading.Lock()
    failed = threading.Event()
    with ThreadPoolExecutor(min(settings.threads, MOST_THREADS), thread_name_prefix="restore") as pool:
        tasks = []
        missing: dict[str, int] = {}

        def bring_block(name: str, block: str, start: int) -> int:
            if failed.is_set() or should_stop():
                raise Interrupted("The download was stopped", where=place.uri, remedy="run the same command to go on")
            data = _block(place, block)
            _write(_partial(staging, name), data, start)
            with lock:
                missing[name] -= 1
                last = missing[name] == 0
            if last:
                _finish(staging, name, state["files"][name])
            return len(data)

        for name, file in state["files"].items():
            target = staging / name
            if target.exists() and (target.stat().st_size, target.stat().st_mtime_ns) == (file["bytes"], file["mtime_ns"]):
                done += file["bytes"]
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            _partial(staging, name).write_bytes(b"")
            missing[name] = len(file["blocks"])
            if not file["blocks"]:
                _finish(staging, name, file)
            for number, block in enumerate(file["blocks"]):
                tasks.append(pool.submit(bring_block, name, block, number * file["block_bytes"]))
        try:
            if progress:
                progress(done, total)
            for task in as_completed(tasks):
                done += task.result()
                if progress:
                    progress(done, total)
        except BaseException:
            failed.set()
            raise


def _partial(staging: Path, name: str) -> Path:
    path = staging / name
    return path.with_name(path.name + ".part")


def _block(place: Destination, block: str) -> bytes:
    for attempt in range(ATTEMPTS):
        try:
            data = place.read_small(object_of(block))
        except TryAgain:
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(min(0.2 * 2**attempt, 5.0))
            continue
        if data is None:
            raise TryAgain(
                "A block of the saved run is missing: it is being saved anew, or was removed",
                where=place.uri,
                remedy="run the same command again",
            )
        if hashlib.sha256(data).hexdigest() == block:
            return data
    raise MustFix(
        f"The block {block[:16]}… of the saved run is damaged",
        where=place.uri,
        remedy="there is no sound copy of this state; begin the run anew",
    )


def _write(path: Path, data: bytes, start: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_all(descriptor, data, start)
    finally:
        os.close(descriptor)


def _finish(staging: Path, name: str, file: dict[str, Any]) -> None:
    partial = _partial(staging, name)
    fsync_file(partial)
    os.utime(partial, ns=(file["mtime_ns"], file["mtime_ns"]))
    os.replace(partial, staging / name)


def _settle(staging: Path, folder: Path, state: dict[str, Any]) -> None:
    for name in sorted(state["files"]):
        if name != "run.json":
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / name, target)
    for path in {(folder / name).parent for name in state["files"]}:
        fsync_folder(path)
