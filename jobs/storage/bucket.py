"""Publishing a folder to `s3://` or `file://`, and bringing it back.

Decision: a publication is its manifest. Files go first, `manifest.json` last and only where none stands,
so a reader, who begins with the manifest, never sees half a checkpoint; and the reader checks every
sha256 and lets the folder appear by one rename, so it never leaves half a one either.

Two heads cannot mix. Before the first file a publisher writes its claim (`publishing.json`: the sha256
of its manifest) where none stands, and looks at it again before every file and before the manifest;
another claim, or another manifest, is a MustFix. Servers that honour `If-None-Match: *` (AWS, R2,
MinIO, moto) decide claim and manifest atomically. On servers that ignore it (rclone) the look before
and after leaves a window of one request; a mix made in it is found by the reader's sha256.

Nothing is sent twice that arrived: a file counts as there when its size and its sha256 agree (the
object's metadata, our own upload record, or the bytes themselves in a folder), and a killed multipart
upload goes on at its missing parts, so at most one part a thread is sent again.
"""

import datetime
import hashlib
import json
import os
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import Interrupted, MustFix, TryAgain
from jobs.settings import PushSettings
from jobs.storage.destination import Destination, Progress, ShouldStop, destination
from jobs.storage.download import Streams, download
from jobs.storage.files import disk_full_named, fsync_folder, held, sha256_file, write_atomically
from jobs.storage.manifest import CLAIM, MANIFEST, WANTED, FileEntry, Manifest, UploadState
from jobs.storage.s3 import S3Destination

PROBED_BYTES, SMALLEST_PART_MIB = 12 << 20, 5  # three parts, the last one short


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
    manifest = _local_manifest(Path(folder), should_stop)
    place = destination(uri, settings)
    upload_state = UploadState(state, uri)
    report, counts = progress or (lambda done, total: None), {"done": 0, "sent": 0}

    def arrived(size: int, *, sent: bool) -> None:
        counts["done"] += size
        counts["sent"] += size if sent else 0
        report(counts["done"], manifest.bytes)

    with place.hold():
        standing = place.read_small(MANIFEST)
        if standing is not None and standing != manifest.content:
            if not replace:
                raise _another_head(uri)
            place.delete(MANIFEST)
        _claim(place, manifest, upload_state)
        for entry in manifest.files:
            if should_stop():
                raise Interrupted("The upload was stopped", where=uri, remedy="run the same command to go on")
            if place.holds(entry, standing == manifest.content or upload_state.arrived(entry)):
                arrived(entry.bytes, sent=False)
                continue
            _require_claim(place, manifest)
            before = counts["done"]
            place.upload(
                entry, Path(folder) / entry.name, upload_state, lambda size: arrived(size, sent=True), should_stop
            )
            arrived(before + entry.bytes - counts["done"], sent=False)  # parts an earlier call had sent
            if settings.read_back:
                _read_back(place, entry, upload_state)
        _seal(place, manifest, upload_state)
    seconds = time.monotonic() - started
    return Published(uri, manifest.sha256, len(manifest.files), manifest.bytes, counts["sent"], seconds)


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
            done = 0
            with ThreadPoolExecutor(settings.threads, thread_name_prefix="download") as pool:
                for entry in manifest.files:
                    streams = Streams(pool, settings, place, should_stop)
                    download(streams, entry, staging, lambda size, base=done: _tell(progress, base + size, manifest))
                    done += entry.bytes
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
    bytes a second up and down, and whether an existing object is refused to be overwritten conditionally.
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
            conditional = not place.write_small(name, data, only_if_absent=True)
        finally:
            place.delete(name)
        return _probe_parts(place, f"{name}-parts", settings) | {"conditional_put": conditional}


def _probe_parts(place: Destination, name: str, settings: PushSettings) -> dict[str, float]:
    small_parts = destination(place.uri, settings.model_copy(update={"part_mib": SMALLEST_PART_MIB}))
    with tempfile.NamedTemporaryFile(prefix="eagle3-probe-") as file:
        file.write(os.urandom(PROBED_BYTES))
        file.flush()
        entry = FileEntry(name, sha256_file(Path(file.name)), PROBED_BYTES)
        began = time.monotonic()
        try:
            small_parts.upload(entry, Path(file.name), UploadState(None, place.uri), lambda size: None, lambda: False)
            sent = time.monotonic()
            came = hashlib.sha256(b"".join(place.read(name))).hexdigest()
            ended = time.monotonic()
        finally:
            place.delete(name)
            small_parts.clean_up((entry,))
    if came != entry.sha256:
        raise TryAgain("A test object of several parts came back changed", where=place.uri, remedy="check the endpoint")
    return {"sent_per_second": PROBED_BYTES / (sent - began), "read_per_second": PROBED_BYTES / (ended - sent)}


# -- publishing ----------------------------------------------------------------------------------------


def _local_manifest(folder: Path, should_stop: ShouldStop) -> Manifest:
    """The manifest, after every file it names was found with its size and sha256: damage is not published."""
    manifest = Manifest.load(folder)
    for entry in manifest.files:
        path = folder / entry.name
        if should_stop():
            raise Interrupted("The upload was stopped", where=str(folder), remedy="run the same command to go on")
        if not path.is_file():
            what = "is named in its manifest but missing"
        elif path.stat().st_size != entry.bytes:
            what = f"has {path.stat().st_size:,} bytes instead of the {entry.bytes:,} of its manifest"
        elif sha256_file(path) != entry.sha256:
            what = "has another sha256 than its manifest says"
        else:
            continue
        raise MustFix(f"{entry.name} {what}", where=str(folder), remedy="run the package stage again")
    return manifest


def _another_head(uri: str) -> MustFix:
    return MustFix(
        "Another head is published there", where=uri, remedy="choose another push.uri, or remove that one first"
    )


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
            remedy=f"let it end, choose another push.uri, or delete the object {CLAIM} there",
        )


def _read_back(place: Destination, entry: FileEntry, state: UploadState) -> None:
    digest = hashlib.sha256()
    for block in place.read(entry.name):
        digest.update(block)
    if digest.hexdigest() != entry.sha256:
        state.forget(entry.name)
        place.delete(entry.name)
        raise TryAgain(
            f"{entry.name} came back with another sha256", where=place.uri, remedy="run the same command again"
        )


def _seal(place: Destination, manifest: Manifest, state: UploadState) -> None:
    """Check that all of it is there and ours, put the manifest, take the claim away."""
    _require_claim(place, manifest)
    for entry in manifest.files:
        found = place.found(entry.name)
        if found is None or found[0] != entry.bytes or found[1] not in (None, entry.sha256):
            state.forget(entry.name)
            raise TryAgain(
                f"{entry.name} was changed by somebody else", where=place.uri, remedy="run the same command again"
            )
    place.write_small(MANIFEST, manifest.content, only_if_absent=True)
    if place.read_small(MANIFEST) != manifest.content:
        raise _another_head(place.uri)
    place.delete(CLAIM)
    place.clean_up(manifest.files)


# -- pulling -------------------------------------------------------------------------------------------


def _tell(progress: Progress | None, done: int, manifest: Manifest) -> None:
    if progress:
        progress(done, manifest.bytes)


def _remote_manifest(place: Destination) -> Manifest:
    content = place.read_small(MANIFEST)
    if content is not None:
        return Manifest.parse(content, where=f"{place.uri}/{MANIFEST}")
    if isinstance(place, S3Destination):
        with place.hold():  # a missing bucket or wrong credentials are named as such
            pass
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
        raise MustFix(
            "The folder is a mount point and cannot appear whole", where=str(folder), remedy="name a folder in it"
        )
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
