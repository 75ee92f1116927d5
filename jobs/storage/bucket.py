"""Publishing a folder to `s3://` or `file://`, and bringing it back.

Decision: a publication is its manifest. Files go first, `manifest.json` last and only where none stands,
so a reader, who begins with the manifest, never sees half a checkpoint; and the reader checks every
sha256 and lets the folder appear by one rename, so it never leaves half a one either.

Two heads cannot mix. Before the first file a publisher writes its claim (`publishing.json`: the sha256
of its manifest) where none stands, and looks at it again before every file (one look serves all files
that waited when it began) and before the manifest; another claim, or another manifest, is a MustFix.
Servers that honour `If-None-Match: *` (AWS, R2, Ceph, MinIO, moto) decide claim and manifest atomically. On
servers that ignore it (rclone) the look before and after leaves a window of one request; a mix made in it is
found by the reader's sha256.

Nothing is sent twice that arrived: a file counts as there when its size and its sha256 agree (the
object's metadata, our own upload record, or the bytes themselves in a folder), and a killed multipart
upload goes on at its missing parts, so at most one part a thread is sent again.

Several files go at once, because each costs round trips; the parts of all share one set of threads.
"""

import datetime
import hashlib
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import Interrupted, JobError, MustFix, TryAgain
from jobs.settings import PushSettings
from jobs.storage.destination import Destination, Progress, ShouldStop, destination
from jobs.storage.download import Streams, download
from jobs.storage.files import disk_full_named, fsync_folder, held, sha256_file, write_atomically
from jobs.storage.local_files import LocalFiles
from jobs.storage.looks import SharedLook
from jobs.storage.manifest import CLAIM, MANIFEST, WANTED, FileEntry, Manifest, UploadState
from jobs.storage.s3_client import SMALL_FILES_AT_ONCE

PROBED_BYTES, SMALLEST_PART_MIB = 12 << 20, 5  # three parts, the last one short
FILES_AT_ONCE, SMALL = 4, 8 << 20  # a small file is round trips and little else


@dataclass(frozen=True)
class Published:
    uri: str
    manifest_sha256: str
    files: int
    bytes: int  # of all files, without the manifest
    bytes_sent: int  # by this call: less where an earlier call had sent some already
    seconds: float


def publish(
    folder: Path,
    uri: str,
    settings: PushSettings,
    *,
    state: Path | None,
    progress: Progress | None = None,
    should_stop: ShouldStop = lambda: False,
    replace: bool = False,
) -> Published:
    """Upload every file that `folder/manifest.json` names, the manifest last.

    `state` is a JSON file of this run in which an interrupted upload is remembered (None: it starts anew).
    Another head at `uri` is a MustFix, unless `replace`: then its manifest is taken away first. What stands
    there already is not sent again. `should_stop` raises Interrupted between parts.
    """
    started = time.monotonic()
    manifest = Manifest.load(Path(folder))
    local = LocalFiles(Path(folder), manifest.files, should_stop)
    place = destination(uri, settings)
    upload_state, tally = UploadState(state, uri), _Tally(progress, manifest.bytes)
    with place.hold():
        standing = place.read_small(MANIFEST)
        if standing is not None and standing != manifest.content:
            if not replace:
                raise _another_head(uri)
            place.delete(MANIFEST)
        _claim(place, manifest, upload_state)
        place.look(manifest.files)
        still_ours = SharedLook(lambda: _require_claim(place, manifest))

        def send(entry: FileEntry, stop: ShouldStop) -> None:
            if place.holds(entry, standing == manifest.content or upload_state.arrived(entry)):
                local.confirm(entry)
                return tally.add(entry.bytes)

            def before_it_appears() -> None:
                local.confirm(entry)
                still_ours()

            counted = tally.of_one_file()
            place.upload(entry, local, upload_state, counted, stop, before_it_appears)
            tally.add(entry.bytes - counted.bytes)  # parts an earlier call had sent
            if settings.read_back:
                _read_back(place, entry, upload_state)

        try:
            _several_at_once(manifest.files, send, lambda: local.damage is not None or should_stop(), "upload", uri)
            for entry in manifest.files:
                local.confirm(entry)
        except JobError:
            if local.damage is None:
                raise
            _withdraw(place, manifest, upload_state)
            raise local.damage from None
        finally:
            upload_state.save()
        _seal(place, manifest, upload_state)
    seconds = time.monotonic() - started
    return Published(uri, manifest.sha256, len(manifest.files), manifest.bytes, tally.sent, seconds)


def pull(
    uri: str,
    folder: Path,
    settings: PushSettings,
    *,
    progress: Progress | None = None,
    should_stop: ShouldStop = lambda: False,
) -> dict:
    """Bring a publication to `folder`, which appears whole or not at all; returns the parsed manifest.

    Downloads into the hidden folder `.<name>.partial` beside it, which a later call goes on with. Every
    file's sha256 is checked. A folder that already holds this publication is checked and left alone;
    one that holds anything else is a MustFix, and so is a place without a manifest.
    """
    folder = Path(os.path.abspath(folder))
    place = destination(uri, settings)
    manifest = _remote_manifest(place)
    if _already_there(folder, manifest):
        return manifest.value
    staging = folder.with_name(f".{folder.name}.partial")
    with disk_full_named(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with held(folder.with_name(f".{folder.name}.lock"), what=f"the download to {folder}", remove=True):
            _prepare_staging(staging, manifest)
            tally = _Tally(progress, manifest.bytes)
            with ThreadPoolExecutor(settings.threads, thread_name_prefix="download") as pool:  # of large files

                def bring(entry: FileEntry, stop: ShouldStop) -> None:
                    download(Streams(pool, settings, place, stop), entry, staging, tally.add)

                _several_at_once(manifest.files, bring, should_stop, "download", uri)
            write_atomically(staging / MANIFEST, manifest.content)
            (staging / WANTED).unlink()
            for path in [staging, *(path for path in staging.rglob("*") if path.is_dir())]:
                fsync_folder(path)
            os.rename(staging, folder)  # replaces an empty folder, never one with files
            fsync_folder(folder.parent)
    return manifest.value


def probe(uri: str, settings: PushSettings) -> dict[str, float | bool]:
    """Everything a push asks of a place, under its prefix: what preflight asks before money is spent.

    Puts, reads, compares and deletes a small object, and one of PROBED_BYTES in several parts. Returns the
    bytes a second up and down, and whether the place itself refuses the second of two writers (`If-None-Match: *`).
    MustFix: no credentials or wrong ones, no permission, no such bucket, an unwritable folder.
    TryAgain: an endpoint that does not answer (known after a few seconds).
    """
    place = destination(uri, settings)
    with place.hold():
        name, data = f".probe-{uuid.uuid4().hex}", uuid.uuid4().bytes
        place.write_small(name, data)
        try:
            if place.read_small(name) != data:
                raise TryAgain("A test object came back changed", where=uri, remedy="check the endpoint")
            conditional = place.keeps_writers_apart(name, data)
        finally:
            place.delete(name)
        return _probe_parts(place, f"{name}-parts", settings) | {"conditional_put": conditional}


def _probe_parts(place: Destination, name: str, settings: PushSettings) -> dict[str, float]:
    small_parts = destination(place.uri, settings.model_copy(update={"part_mib": SMALLEST_PART_MIB}))
    content = os.urandom(PROBED_BYTES)
    entry = FileEntry(name, hashlib.sha256(content).hexdigest(), PROBED_BYTES)
    with tempfile.TemporaryDirectory(prefix="eagle3-probe-") as folder:
        Path(folder, name).write_bytes(content)
        local = LocalFiles(Path(folder), (entry,), lambda: False)
        began = time.monotonic()
        try:
            small_parts.upload(entry, local, UploadState(None, place.uri), lambda size: None, lambda: False, lambda: None)
            sent = time.monotonic()
            came = hashlib.sha256(b"".join(place.read(name))).hexdigest()
            ended = time.monotonic()
        finally:
            place.delete(name)
            small_parts.clean_up((entry,))
    if came != entry.sha256:
        raise TryAgain("A test object of several parts came back changed", where=place.uri, remedy="check the endpoint")
    return {"sent_per_second": PROBED_BYTES / (sent - began), "read_per_second": PROBED_BYTES / (ended - sent)}


class _Tally:
    """Bytes done of all files together, told to `progress` from any thread, one call at a time."""

    def __init__(self, progress: Progress | None, total: int):
        self._progress, self._total, self._lock = progress or (lambda done, total: None), total, threading.Lock()
        self.done, self.sent = 0, 0

    def add(self, size: int, *, sent: bool = False) -> None:
        with self._lock:
            self.done += size
            self.sent += size if sent else 0
            self._progress(self.done, self._total)

    def of_one_file(self) -> "_FileTally":
        return _FileTally(self)


class _FileTally:
    """Bytes of one file that this call has sent."""

    def __init__(self, all_files: _Tally):
        self._all, self._lock, self.bytes = all_files, threading.Lock(), 0

    def __call__(self, size: int) -> None:
        with self._lock:
            self.bytes += size
        self._all.add(size, sent=True)


def _several_at_once(
    files: tuple[FileEntry, ...], work: Callable[[FileEntry, ShouldStop], None], should_stop: ShouldStop, what: str, uri: str
) -> None:
    """work(file, stop) for every file, several at a time; one that fails stops the others and is raised."""
    failed, are_small = threading.Event(), sum(entry.bytes for entry in files) < SMALL * len(files)

    def stop() -> bool:
        return failed.is_set() or should_stop()

    def guarded(entry: FileEntry) -> None:
        try:
            if stop():
                raise Interrupted(f"The {what} was stopped", where=uri, remedy="run the same command to go on")
            work(entry, stop)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(SMALL_FILES_AT_ONCE if are_small else FILES_AT_ONCE, thread_name_prefix=what) as pool:
        futures = [pool.submit(guarded, entry) for entry in files]
        try:
            wait(futures)
        except BaseException:  # Ctrl-C in this thread
            failed.set()
            raise
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, Interrupted)):  # the cause before its consequences
        raise error


# -- publishing ----------------------------------------------------------------------------------------


def _withdraw(place: Destination, manifest: Manifest, state: UploadState) -> None:
    """Take back what an upload of damaged files left: its parts cost money, its claim keeps others out."""
    place.clean_up(manifest.files)
    for entry in manifest.files:
        state.forget(entry.name)
    place.delete(CLAIM)


def _another_head(uri: str) -> MustFix:
    return MustFix("Another head is published there", where=uri, remedy="choose another address, or remove that one first")


def _claim(place: Destination, manifest: Manifest, state: UploadState) -> None:
    """Say in the destination what is being published, unless somebody else is publishing something else."""
    ours = json.dumps(
        {
            "manifest_sha256": manifest.sha256,
            "token": state.token,
            "begun": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
    ).encode()
    if place.write_small(CLAIM, ours, only_if_absent=True):
        return _require_claim(place, manifest)
    standing = _standing_claim(place)
    if standing.get("manifest_sha256") == manifest.sha256:
        return None
    if place.exclusive or standing.get("token") == state.token:  # nobody else is there, or it was us
        place.write_small(CLAIM, ours)
    return _require_claim(place, manifest)


def _standing_claim(place: Destination) -> dict:
    try:
        value = json.loads(place.read_small(CLAIM) or b"{}")
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def _require_claim(place: Destination, manifest: Manifest) -> None:
    standing = _standing_claim(place)
    if standing.get("manifest_sha256") != manifest.sha256:
        raise MustFix(
            f"Another head's upload was begun there at {standing.get('begun', 'an unknown time')}",
            where=place.uri,
            remedy=f"let it end, choose another address, or delete the object {CLAIM} there",
        )


def _read_back(place: Destination, entry: FileEntry, state: UploadState) -> None:
    digest = hashlib.sha256()
    for block in place.read(entry.name):
        digest.update(block)
    if digest.hexdigest() != entry.sha256:
        state.forget(entry.name)
        place.delete(entry.name)
        raise TryAgain(f"{entry.name} came back with another sha256", where=place.uri, remedy="run the same command again")


def _seal(place: Destination, manifest: Manifest, state: UploadState) -> None:
    """Check that all of it is there and ours, put the manifest, take the claim away."""
    proven = place.proven(manifest.files)
    doubtful = [entry for entry in manifest.files if entry.name not in proven]
    with ThreadPoolExecutor(SMALL_FILES_AT_ONCE) as pool:
        standing = list(pool.map(lambda entry: place.found(entry.name), doubtful))
    _require_claim(place, manifest)
    for entry, found in zip(doubtful, standing, strict=True):
        if found is None or found[0] != entry.bytes:
            state.forget(entry.name)
            size = "nothing" if found is None else f"{found[0]:,} bytes"
            raise TryAgain(
                f"{entry.name} arrived as {size} instead of {entry.bytes:,} bytes",
                where=place.uri,
                remedy="run the same command again",
            )
        if found[1] not in (None, entry.sha256):
            state.forget(entry.name)
            raise TryAgain(f"{entry.name} was changed by somebody else", where=place.uri, remedy="run the same command again")
    place.write_small(MANIFEST, manifest.content, only_if_absent=True)
    if place.read_small(MANIFEST) != manifest.content:
        raise _another_head(place.uri)
    place.delete(CLAIM)
    place.clean_up(manifest.files)


# -- pulling -------------------------------------------------------------------------------------------


def _remote_manifest(place: Destination) -> Manifest:
    content = place.read_small(MANIFEST)
    if content is not None:
        return Manifest.parse(content, where=f"{place.uri}/{MANIFEST}")
    if place.read_small(CLAIM) is not None:
        raise MustFix(
            "The publication there is not complete: its upload was begun and has no manifest yet",
            where=place.uri,
            remedy="let the upload end, or run the push again, then pull",
        )
    raise MustFix("Nothing is published there: no manifest.json", where=place.uri, remedy="check the address")


def _already_there(folder: Path, manifest: Manifest) -> bool:
    if not folder.exists():
        return False
    if os.path.ismount(folder):
        raise MustFix("The folder is a mount point and cannot appear whole", where=str(folder), remedy="name a folder in it")
    if not folder.is_dir():
        raise MustFix("The destination of the download is a file", where=str(folder), remedy="name another folder")
    if not any(folder.iterdir()):
        return False
    ours = (folder / MANIFEST).is_file() and (folder / MANIFEST).read_bytes() == manifest.content
    if ours and all((folder / e.name).is_file() and sha256_file(folder / e.name) == e.sha256 for e in manifest.files):
        return True
    raise MustFix(
        "The folder holds something else" if not ours else "The folder holds this publication, damaged",
        where=str(folder),
        remedy="name an empty folder, or remove it",
    )


def _prepare_staging(staging: Path, manifest: Manifest) -> None:
    """Keep what an interrupted download of the same manifest left, remove that of another."""
    wanted = staging / WANTED
    if staging.exists() and not (wanted.is_file() and wanted.read_bytes() == manifest.content):
        for path in sorted(staging.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    staging.mkdir(exist_ok=True)
    write_atomically(wanted, manifest.content)
