"""An `s3://` destination, through boto3's client alone.

Decision: no boto3 transfer manager. `upload_file` cannot go on after a kill, and the CRT transfer
client passes no endpoint_url on (uploads meant for another provider go to AWS), so multipart is
spoken here: create, list_parts, upload_part, complete, with the upload's id kept in `UploadState`.

- Parts have equal sizes (Cloudflare R2 demands it) and travel with Content-MD5: the one integrity
  header every S3 server knows. boto3's newer CRC headers break R2, Ceph and OVH and are off
  (`when_required`) unless the settings ask for them; then a CRC, a fifth of the work, takes MD5's place.
- Small parts, all threads busy to the end: a killed upload sends at most one part a thread again.
- An ETag is never taken for a content hash (it is not one for multipart objects, nor under KMS): the
  sha256 travels as metadata where the server keeps metadata, and stands in the manifest always.
- `If-None-Match: *` is sent with the manifest; servers that ignore it (rclone) are covered by a GET
  before and after.
- Credentials come from boto3's chain only: environment, mounted file, instance role.
"""

import base64
import contextlib
import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from jobs.errors import Interrupted, MustFix, TryAgain
from jobs.settings import PushSettings
from jobs.storage.local_files import read_into
from jobs.storage.manifest import FileEntry, UploadState
from jobs.storage.s3_client import ABSENT, NO_ANSWER, NO_PERMISSION, client_for, error_code, explained, http_status

MIB = 1 << 20
LARGEST_PART_NUMBER = 10_000
PARTS_A_THREAD, SMALL_PART_MIB = 4, 8  # so many at least, unless the parts became smaller than that
_BLOCK = 1 << 18  # bytes: read, written and hashed while they are in a core's cache


class S3Destination:
    """Objects below a prefix of a bucket; see bucket.Destination for what the methods promise."""

    exclusive = False

    def __init__(self, uri: str, bucket: str, prefix: str, settings: PushSettings):
        self.uri, self.bucket, self.settings = uri, bucket, settings
        self.prefix = prefix.strip("/")
        self.client = client_for(settings, uri)
        self._pool = ThreadPoolExecutor(settings.threads, thread_name_prefix="upload")  # of all files together
        self._kept = threading.local()

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            raise explained(error, self.uri) from None

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """A bucket has no lock; the claim in it (see bucket.publish) does what can be done."""
        self._require_bucket()
        yield

    def _require_bucket(self) -> None:
        """A 404 of an object does not say whether the bucket is there, so ask for the bucket itself."""
        try:
            self.client.head_bucket(Bucket=self.bucket)
        except ClientError as error:
            if error_code(error) in ABSENT:
                raise MustFix(
                    "The bucket does not exist", where=self.uri, remedy="create it, or correct push.uri"
                ) from None
            if error_code(error) in NO_PERMISSION | {"400"}:
                self._explain_bodyless_refusal()
            raise explained(error, self.uri) from None
        except BotoCoreError as error:
            raise explained(error, self.uri) from None

    def _explain_bodyless_refusal(self) -> None:
        """HEAD has no body, so its 403 names no reason; a GET of the same bucket does."""
        with self._explaining():
            self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.key(""), MaxKeys=1)

    @contextlib.contextmanager
    def _absent_is(self, answer: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Leave the block where the object is not there, after `answer`; explain every other refusal."""
        try:
            yield
        except ClientError as error:
            if error_code(error) not in ABSENT:
                raise explained(error, self.uri) from None
            answer()
        except NO_ANSWER as error:
            raise explained(error, self.uri) from None

    def found(self, name: str) -> tuple[int, str | None] | None:
        """(bytes, sha256 from the metadata where the server kept it), or None."""
        with self._absent_is():
            head = self.client.head_object(Bucket=self.bucket, Key=self.key(name))
            metadata = {name.lower(): value for name, value in head.get("Metadata", {}).items()}  # rclone says `Sha256`
            return head["ContentLength"], metadata.get("sha256")
        return None

    def holds(self, entry: FileEntry, believed: bool) -> bool:
        """Equal size alone proves nothing (every head of one shape has it): the metadata must agree, or a record."""
        found = self.found(entry.name)
        if found is None or found[0] != entry.bytes:
            return False
        return found[1] == entry.sha256 if found[1] else believed

    def read(self, name: str, start: int = 0, size: int | None = None) -> Iterator[bytes]:
        """The object's bytes from `start` on, at most `size`."""

        def missing() -> None:
            raise MustFix(f"{name} is named in the manifest but missing", where=self.uri, remedy="publish again")

        end = "" if size is None else str(start + size - 1)
        extra = {"Range": f"bytes={start}-{end}"} if start or end else {}
        with self._absent_is(missing):
            body = self.client.get_object(Bucket=self.bucket, Key=self.key(name), **extra)["Body"]
            with contextlib.closing(body):
                yield from body.iter_chunks(_BLOCK)

    def read_small(self, name: str) -> bytes | None:
        with self._absent_is():
            return self.client.get_object(Bucket=self.bucket, Key=self.key(name))["Body"].read()
        return None

    def names(self, prefix: str) -> list[str]:
        """Names of every object below `prefix`."""
        with self._explaining():
            pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.key(prefix))
            keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
        return [key[len(self.key("")) :] for key in keys]

    def write_small(self, name: str, data: bytes, *, only_if_absent: bool = False) -> bool:
        """Put an object in one request; False where `only_if_absent` and something stands there already."""
        extra = {"IfNoneMatch": "*"} if only_if_absent else {}
        if only_if_absent and self.found(name) is not None:
            return False
        try:
            self._put(name, data, hashlib.sha256(data).hexdigest(), **extra)
        except ClientError as error:
            if only_if_absent and error_code(error) in {"PreconditionFailed", "412"}:
                return False
            if only_if_absent and error_code(error) in {"NotImplemented", "501"}:
                return self.write_small(name, data)
            raise explained(error, self.uri) from None
        except BotoCoreError as error:
            raise explained(error, self.uri) from None
        return True

    def _put(self, name: str, data: bytes, sha256: str, **extra: str) -> None:
        self.client.put_object(
            Bucket=self.bucket,
            Key=self.key(name),
            Body=data,
            Metadata={"sha256": sha256},
            **self._integrity(data),
            **extra,
        )

    def _integrity(self, data: bytes | bytearray) -> dict[str, str]:
        """What the server compares the bytes with; a CRC is botocore's own work."""
        return {"ContentMD5": _md5(data)} if self.settings.checksums == "when_required" else {}

    def delete(self, name: str) -> None:
        with self._explaining():
            self.client.delete_object(Bucket=self.bucket, Key=self.key(name))

    def upload(
        self,
        entry: FileEntry,
        path: Path,
        state: UploadState,
        sent: Callable[[int], None],
        should_stop: Callable[[], bool],
        confirm: Callable[[], None],
    ) -> None:
        """Send one file; a multipart upload that an earlier process began is continued at its missing parts.

        Every request's answer is believed here; what then stands there is looked at once, before the manifest.
        """
        part_bytes = _part_bytes(entry.bytes, self.settings.part_mib, self.settings.threads)
        with self._explaining():
            if entry.bytes <= part_bytes:
                confirm()
                self._abort_known(entry.name, state)
                self._put(entry.name, path.read_bytes(), entry.sha256)
                sent(entry.bytes)
            else:
                self._upload_parts(entry, path, part_bytes, state, sent, should_stop, confirm)
        state.record(entry, done=True)

    def _upload_parts(
        self,
        entry: FileEntry,
        path: Path,
        part_bytes: int,
        state: UploadState,
        sent: Callable[[int], None],
        should_stop: Callable[[], bool],
        confirm: Callable[[], None],
    ) -> None:
        for attempt in range(3):  # an upload can vanish: expired, or aborted by a lifecycle rule
            upload_id, part_bytes, parts = self._continue_or_begin(entry, path, part_bytes, state)
            try:
                self._send_missing(entry, path, part_bytes, upload_id, parts, sent, should_stop)
                confirm()
                self.client.complete_multipart_upload(
                    Bucket=self.bucket,
                    Key=self.key(entry.name),
                    UploadId=upload_id,
                    MultipartUpload={"Parts": [{"PartNumber": n, "ETag": parts[n]} for n in sorted(parts)]},
                )
                return
            except ClientError as error:
                if (
                    error_code(error) not in {"NoSuchUpload", "InvalidPart", "ConditionalRequestConflict"}
                    or attempt == 2
                ):
                    raise
                # A complete whose answer was lost is repeated by botocore and finds its upload gone: it is done.
                found = self.found(entry.name)
                if error_code(error) == "NoSuchUpload" and found == (entry.bytes, entry.sha256):
                    return
                # InvalidPart: a killed process's part came in late, under another ETag; look at the parts once more.
                # rclone's server says it while it works for a dead client, and drops the upload.
                if error_code(error) != "InvalidPart" or attempt == 1:
                    state.forget(entry.name)

    def _continue_or_begin(
        self, entry: FileEntry, path: Path, part_bytes: int, state: UploadState
    ) -> tuple[str, int, dict[int, str]]:
        """(upload id, its bytes a part, part number -> ETag of the parts that are there).

        Parts of another content are given up, and those of a file written since: they may have been sent
        before it was hashed.
        """
        known, written = state.upload(entry.name), path.stat().st_mtime_ns
        if known.get("upload_id"):
            if (known.get("sha256"), known.get("mtime_ns")) == (entry.sha256, written):
                parts = self._parts_there(entry, known["upload_id"], known["part_bytes"])
                if parts is not None:
                    return known["upload_id"], known["part_bytes"], parts
            else:
                self._abort(entry.name, known["upload_id"])
        answer = self.client.create_multipart_upload(
            Bucket=self.bucket, Key=self.key(entry.name), Metadata={"sha256": entry.sha256}
        )
        state.record(entry, part_bytes=part_bytes, upload_id=answer["UploadId"], mtime_ns=written)
        return answer["UploadId"], part_bytes, {}

    def _parts_there(self, entry: FileEntry, upload_id: str, part_bytes: int) -> dict[int, str] | None:
        parts: dict[int, str] = {}
        try:
            pages = self.client.get_paginator("list_parts").paginate(
                Bucket=self.bucket, Key=self.key(entry.name), UploadId=upload_id
            )
            for part in (part for page in pages for part in page.get("Parts", [])):
                if part["Size"] == _part_size(part["PartNumber"], entry.bytes, part_bytes):
                    parts[part["PartNumber"]] = part["ETag"]
        except ClientError as error:
            if error_code(error) in {"NoSuchUpload", *ABSENT}:
                return None
            raise
        return parts

    def _send_missing(
        self,
        entry: FileEntry,
        path: Path,
        part_bytes: int,
        upload_id: str,
        parts: dict[int, str],
        sent: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> None:
        """Send the parts that are not in `parts`, `threads` at a time, and enter them there."""
        failed = threading.Event()

        def send(number: int) -> None:
            if failed.is_set():
                raise Interrupted("The upload was stopped", where=self.uri, remedy="run the same command to go on")
            if should_stop():
                failed.set()
                raise Interrupted("The upload was stopped", where=self.uri, remedy="run the same command to go on")
            size = _part_size(number, entry.bytes, part_bytes)
            data = self._part(path, (number - 1) * part_bytes, size)
            answer = self.client.upload_part(
                Bucket=self.bucket,
                Key=self.key(entry.name),
                UploadId=upload_id,
                PartNumber=number,
                Body=data,
                **self._integrity(data),
            )
            parts[number] = answer["ETag"]
            sent(size)  # here, so that a stop for what was sent is seen before this thread's next part

        count = -(-entry.bytes // part_bytes)
        futures = [self._pool.submit(send, number) for number in range(1, count + 1) if number not in parts]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            failed.set()
            wait(futures)
            raise

    def _part(self, path: Path, start: int, size: int) -> bytearray:
        """The file's bytes, in this thread's own buffer: a new one a part is a page fault every 4 KiB.

        Not `bytes`, which botocore copies behind the headers.
        """
        buffer = getattr(self._kept, "buffer", None)
        if buffer is None or len(buffer) != size:
            buffer = self._kept.buffer = bytearray(size)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if read_into(descriptor, buffer, start) != size:
                raise TryAgain(f"{path.name} became shorter while it was sent", where=str(path))
        finally:
            os.close(descriptor)
        return buffer

    def _abort_known(self, name: str, state: UploadState) -> None:
        upload_id = state.upload(name).get("upload_id")
        if upload_id:
            self._abort(name, upload_id)

    def _abort(self, name: str, upload_id: str) -> None:
        try:
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=self.key(name), UploadId=upload_id)
        except ClientError as error:
            if http_status(error) >= 500:
                raise

    def clean_up(self, entries: tuple[FileEntry, ...]) -> None:
        """Abort what multipart uploads are left for our keys: parts cost money for ever, and completing one
        would replace a published object. A server that cannot list them is left alone."""
        keys = {self.key(entry.name) for entry in entries}
        with contextlib.suppress(ClientError, BotoCoreError):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self.key("")
            )
            for upload in [upload for page in pages for upload in page.get("Uploads", [])]:
                if upload["Key"] in keys:
                    self.client.abort_multipart_upload(
                        Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )


def _md5(data: bytes | bytearray) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _part_bytes(size: int, part_mib: int, threads: int) -> int:
    """Bytes of a part, whole MiB: as set at most, less where the threads would not all have some, and as many
    more as 10,000 parts need."""
    spread = max(size / (PARTS_A_THREAD * threads), SMALL_PART_MIB * MIB)
    return math.ceil(max(min(part_mib * MIB, spread), size / LARGEST_PART_NUMBER) / MIB) * MIB


def _part_size(number: int, size: int, part_bytes: int) -> int:
    return min(part_bytes, size - (number - 1) * part_bytes)
