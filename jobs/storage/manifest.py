"""What a publication consists of (`manifest.json`), and how far an upload of it got.

`manifest.json` names every file of a published folder with its sha256 and size, among whatever else
the package stage puts there (settings, versions, figures). Its exact bytes identify the publication:
two heads are the same exactly when their manifests are byte for byte the same.
"""

import hashlib
import json
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jobs.errors import MustFix
from jobs.storage.files import write_json_atomically

MANIFEST = "manifest.json"
CLAIM = "publishing.json"  # stands at the destination while an upload is under way
LOCK = ".publishing.lock"  # flock of a file:// destination
WANTED = ".manifest.wanted"  # in a download's staging folder: the manifest its files belong to


@dataclass(frozen=True)
class FileEntry:
    name: str  # path relative to the publication, with "/"
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    content: bytes  # exactly as it stands in the file
    value: dict
    files: tuple[FileEntry, ...]  # sorted by name

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files)

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> "Manifest":
        """Check form and names: a manifest comes from outside, and none of its files may land elsewhere."""
        try:
            value = json.loads(content)
            files = tuple(FileEntry(name, str(entry["sha256"]), int(entry["bytes"])) for name, entry in sorted(value["files"].items()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise MustFix(f"The manifest is malformed: {type(error).__name__} {error}", where=where, remedy="publish again") from None
        for entry in files:
            path = PurePosixPath(entry.name)
            unsafe = path.is_absolute() or ".." in path.parts or str(path) != entry.name or "\\" in entry.name
            ours = entry.name in (MANIFEST, CLAIM, LOCK, WANTED) or entry.name.endswith(".partial")
            if unsafe or ours or entry.bytes < 0:
                raise MustFix(f"The manifest names an impossible file {entry.name!r}", where=where, remedy="publish again")
        return cls(content, value, files)

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        path = Path(folder) / MANIFEST
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise MustFix("The folder has no manifest.json", where=str(folder), remedy="run the package stage first") from None
        return cls.parse(content, where=str(path))


class UploadState:
    """What this machine knows about an upload: which files arrived, and the ids of multipart uploads.

    Kept in a JSON file, written atomically, so that a killed upload goes on at the missing parts: at once when an
    upload in parts begins, once a second for files that arrived (the server knows them too, mostly), and by `save`.
    Without a path it lives in memory only. A state of another destination is ignored.
    """

    def __init__(self, path: Path | None, uri: str):
        self._path, self._lock, self._saved = path, threading.Lock(), 0.0
        value: dict = {}
        if path is not None and path.exists():
            try:
                value = json.loads(path.read_bytes())
            except ValueError:
                value = {}  # it only saves work: without it parts are sent again
        if value.get("uri") != uri:
            value = {}
        self._value = {"uri": uri, "token": value.get("token") or uuid.uuid4().hex, "files": value.get("files") or {}}
        self._save()

    @property
    def token(self) -> str:
        """Marks this run's own claim on the destination."""
        return self._value["token"]

    def arrived(self, entry: FileEntry) -> bool:
        known = self._value["files"].get(entry.name, {})
        return known.get("sha256") == entry.sha256 and bool(known.get("done"))

    def upload(self, name: str) -> dict:
        """What is known of a file's multipart upload: sha256, part_bytes, upload_id; or nothing."""
        with self._lock:
            return dict(self._value["files"].get(name, {}))

    def record(self, entry: FileEntry, **fields: object) -> None:
        with self._lock:
            self._value["files"][entry.name] = {"sha256": entry.sha256, "bytes": entry.bytes, **fields}
            if not fields.get("done") or time.monotonic() - self._saved > 1.0:
                self._save()

    def forget(self, name: str) -> None:
        with self._lock:
            self._value["files"].pop(name, None)
            self._save()

    def save(self) -> None:
        with self._lock:
            self._save()

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomically(self._path, self._value)
