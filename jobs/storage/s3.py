"""An `s3://` destination, through boto3's client alone.

Decision: no boto3 transfer manager. `upload_file` cannot go on after a kill, and the CRT transfer
client passes no endpoint_url on (uploads meant for another provider go to AWS), so multipart is
spoken here: create, list_parts, upload_part, complete, with the upload's id kept in `UploadState`.

- Parts have equal sizes (Cloudflare R2 demands it) and travel with Content-MD5: the one integrity
  header every S3 server knows. boto3's newer CRC headers are off unless the settings ask for them
  (`when_required`): they break R2, Ceph and OVH.
- An ETag is never taken for a content hash (it is not one for multipart objects, nor under KMS): the
  sha256 travels as metadata where the server keeps metadata, and stands in the manifest always.
- `If-None-Match: *` is sent with the manifest; servers that ignore it (rclone) are covered by a GET
  before and after.
- Credentials come from boto3's chain only: environment, mounted file, instance role.
"""

import base64
import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError

from jobs.errors import Interrupted, MustFix, TryAgain
from jobs.settings import PushSettings
from jobs.storage.manifest import FileEntry, UploadState
from jobs.storage.s3_client import ABSENT, NO_ANSWER, NO_PERMISSION, client_for, error_code, explained, http_status

MIB = 1 << 20
LARGEST_PART_NUMBER = 10_000
_BLOCK = 1 << 20


class S3Destination:
    """Objects below a prefix of a bucket; see bucket.Destination for what the methods promise."""

    exclusive = False

    def __init__(self, uri: str, bucket: str, prefix: str, settings: PushSettings):
        self.uri, self.bucket, self.settings = uri, bucket, settings
        self.prefix = prefix.strip("/")
        self.client = client_for(settings, uri)

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
            ContentMD5=_md5(data),
            Metadata={"sha256": sha256},
            **extra,
        )

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
    ) -> None:
        """Send one file; a multipart upload that an earlier process began is continued at its missing parts."""
        part_bytes = _part_bytes(entry.bytes, self.settings.part_mib)
        with self._explaining():
            if entry.bytes <= part_bytes:
                self._abort_known(entry.name, state)
                self._put(entry.name, path.read_bytes(), entry.sha256)
                sent(entry.bytes)
            else:
                self._upload_parts(entry, path, part_bytes, state, sent, should_stop)
        found = self.found(entry.name)
        if found is None or found[0] != entry.bytes:
            state.forget(entry.name)
            size = "nothing" if found is None else f"{found[0]:,} bytes"
            raise TryAgain(f"{entry.name} arrived as {size} instead of {entry.bytes:,} bytes", where=self.uri)
        state.record(entry, done=True)

    def _upload_parts(
        self,
        entry: FileEntry,
        path: Path,
        part_bytes: int,
        state: UploadState,
        sent: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> None:
        for attempt in range(3):  # an upload can vanish: expired, or aborted by a lifecycle rule
            upload_id, parts = self._continue_or_begin(entry, part_bytes, state)
            try:
                self._send_missing(entry, path, part_bytes, upload_id, parts, sent, should_stop)
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
                state.forget(entry.name)

    def _continue_or_begin(self, entry: FileEntry, part_bytes: int, state: UploadState) -> tuple[str, dict[int, str]]:
        """(upload id, part number -> ETag of the parts that are there); parts of another content are given up."""
        known = state.upload(entry.name)
        if known.get("upload_id"):
            if known.get("sha256") == entry.sha256 and known.get("part_bytes") == part_bytes:
                parts = self._parts_there(entry, known["upload_id"], part_bytes)
                if parts is not None:
                    return known["upload_id"], parts
            else:
                self._abort(entry.name, known["upload_id"])
        answer = self.client.create_multipart_upload(
            Bucket=self.bucket, Key=self.key(entry.name), Metadata={"sha256": entry.sha256}
        )
        state.record(entry, part_bytes=part_bytes, upload_id=answer["UploadId"])
        return answer["UploadId"], {}

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

        def send(number: int) -> tuple[int, str, int]:
            if failed.is_set():
                raise Interrupted("The upload was stopped", where=self.uri, remedy="run the same command to go on")
            if should_stop():
                failed.set()
                raise Interrupted("The upload was stopped", where=self.uri, remedy="run the same command to go on")
            with open(path, "rb") as file:
                data = os.pread(file.fileno(), _part_size(number, entry.bytes, part_bytes), (number - 1) * part_bytes)
            answer = self.client.upload_part(
                Bucket=self.bucket,
                Key=self.key(entry.name),
                UploadId=upload_id,
                PartNumber=number,
                Body=data,
                ContentMD5=_md5(data),
            )
            return number, answer["ETag"], len(data)

        count = -(-entry.bytes // part_bytes)
        with ThreadPoolExecutor(self.settings.threads, thread_name_prefix="upload") as pool:
            futures = [pool.submit(send, number) for number in range(1, count + 1) if number not in parts]
            try:
                for future in as_completed(futures):
                    number, etag, size = future.result()
                    parts[number] = etag
                    sent(size)
            except BaseException:
                failed.set()
                raise

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


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _part_bytes(size: int, part_mib: int) -> int:
    """Bytes of a part: as set, or as many whole MiB more as 10,000 parts need."""
    least = -(-size // LARGEST_PART_NUMBER)
    return max(part_mib * MIB, -(-least // MIB) * MIB)


def _part_size(number: int, size: int, part_bytes: int) -> int:
    return min(part_bytes, size - (number - 1) * part_bytes)
