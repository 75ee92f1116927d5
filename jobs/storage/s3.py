"""An `s3://` destination, through boto3's client alone.

Decision: no boto3 transfer manager. `upload_file` cannot go on after a kill, and the CRT transfer
client passes no endpoint_url on (uploads meant for another provider go to AWS), so multipart is
spoken by ourselves (multipart.py).

- Bytes travel with Content-MD5: the one integrity header every S3 server knows. The newer CRC headers break R2,
  Ceph and OVH and are off (`when_required`) unless the settings ask for them; then a CRC32, a fifth of the work,
  takes MD5's place.
- An ETag is never taken for a content hash (it is not one for multipart objects, nor under KMS): the
  sha256 travels as metadata where the server keeps metadata, and stands in the manifest always. The other way round
  it may prove something: an ETag that is the MD5 of what we sent, beside its size, says of an object that it is that.
- One LIST before spares a HEAD for each small file that is not there, one afterwards for each that it proves in this way.
  What a list does not prove (it is old, or cut short, or refused) is asked for by its name, or sent again.
- `If-None-Match: *` is sent with the manifest; servers that ignore it (rclone) are covered by a GET
  before and after.
- Credentials come from boto3's chain only: environment, mounted file, instance role.
"""

import base64
import contextlib
import hashlib
from collections.abc import Callable, Iterator

from botocore.exceptions import BotoCoreError, ClientError

from jobs.errors import Interrupted, MustFix
from jobs.settings import PushSettings
from jobs.storage.local_files import LocalFiles
from jobs.storage.manifest import FileEntry, UploadState
from jobs.storage.multipart import MultipartUploads, integrity
from jobs.storage.s3_client import ABSENT, NO_ANSWER, Body, BrokenOff, clients_for, error_code, explained

_STANDS_THERE, _KNOWS_NO_CONDITION = {"PreconditionFailed", "412"}, {"NotImplemented", "501"}  # answers to `If-None-Match: *`
_BLOCK = 1 << 18  # bytes: read, written and hashed while they are in a core's cache


class S3Destination:
    """Objects below a prefix of a bucket; see bucket.Destination for what the methods promise."""

    exclusive = False

    def __init__(self, uri: str, bucket: str, prefix: str, settings: PushSettings):
        self.uri, self.bucket, self.settings = uri, bucket, settings
        self.prefix = prefix.strip("/")
        self.client, self._sending = clients_for(settings, uri)
        self._multipart = MultipartUploads(self.client, self._sending, bucket, settings, uri)
        self._listed: dict[str, tuple[int, str]] | None = None  # where all that stands here was seen
        self._sent: dict[str, str] = {}  # name -> MD5 of an object that went in one request

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            raise explained(error, self.uri) from None

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """A bucket has no lock; the claim in it (see bucket.publish) does what can be done.

        Whether the bucket is there and lets us in, the first GET or PUT says in its body; a HEAD has none.
        """
        return contextlib.nullcontext()

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

    def look(self, entries: tuple[FileEntry, ...]) -> None:
        listed, complete = self._list(entries)
        self._listed = listed if complete else None

    def proven(self, entries: tuple[FileEntry, ...]) -> set[str]:
        if not self._sent:
            return set()
        listed, _ = self._list(entries)
        return {entry.name for entry in entries if listed.get(entry.name) == (entry.bytes, self._sent.get(entry.name))}

    def _list(self, entries: tuple[FileEntry, ...]) -> tuple[dict[str, tuple[int, str]], bool]:
        """(name -> (bytes, ETag) of what stands there, whether that is all of it).

        Beside many foreign objects it is not worth its pages; where it is refused, what comes next says why.
        """
        listed: dict[str, tuple[int, str]] = {}
        limit = {"MaxItems": len(entries) + 1000}
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.key(""), PaginationConfig=limit)
        try:
            for item in (item for page in pages for item in page.get("Contents", [])):
                listed[item["Key"][len(self.key("")) :]] = item["Size"], item.get("ETag", "").strip('"').lower()
        except (ClientError, BotoCoreError):
            return {}, False
        return listed, pages.resume_token is None

    def holds(self, entry: FileEntry, believed: bool) -> bool:
        """Equal size alone proves nothing (every head of one shape has it): the metadata must agree, or a record."""
        if self._listed is not None and self._in_one_request(entry) and self._listed.get(entry.name, (None,))[0] != entry.bytes:
            return False  # were the list old, it would be sent again; a large file is worth a question of its own
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

    def write_small(self, name: str, data: bytes, *, only_if_absent: bool = False, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Put an object in one request; False where `only_if_absent` and something stands there already.

        `should_stop` breaks the request off (Interrupted).
        """
        extra = {"IfNoneMatch": "*"} if only_if_absent else {}
        if only_if_absent and self.found(name) is not None:
            return False
        try:
            self._put(name, data, hashlib.sha256(data).hexdigest(), should_stop, **extra)
        except BrokenOff:
            raise Interrupted("The upload was stopped", where=self.uri, remedy="run the same command to go on") from None
        except ClientError as error:
            if only_if_absent and error_code(error) in _STANDS_THERE:
                return False
            if only_if_absent and error_code(error) in _KNOWS_NO_CONDITION:
                return self.write_small(name, data)
            raise explained(error, self.uri) from None
        except BotoCoreError as error:
            raise explained(error, self.uri) from None
        return True

    def keeps_writers_apart(self, name: str, data: bytes) -> bool:
        """Asked without the look before that `write_small` takes: the server itself has to refuse."""
        with self._explaining():
            try:
                self._put(name, data, hashlib.sha256(data).hexdigest(), IfNoneMatch="*")
            except ClientError as error:
                if error_code(error) in _STANDS_THERE:
                    return True
                if error_code(error) not in _KNOWS_NO_CONDITION:
                    raise
        return False

    def _put(self, name: str, data: bytes, sha256: str, should_stop: Callable[[], bool] = lambda: False, **extra: str) -> str | None:
        """Returns the MD5 of what went, where one was taken."""
        checked = integrity(data, self.settings)
        self._sending.put_object(
            Bucket=self.bucket, Key=self.key(name), Body=Body(data, should_stop), Metadata={"sha256": sha256}, **checked, **extra
        )
        return base64.b64decode(checked["ContentMD5"]).hex() if "ContentMD5" in checked else None

    def delete(self, name: str) -> None:
        with self._explaining():
            self.client.delete_object(Bucket=self.bucket, Key=self.key(name))

    def upload(
        self,
        entry: FileEntry,
        local: LocalFiles,
        state: UploadState,
        sent: Callable[[int], None],
        should_stop: Callable[[], bool],
        before_it_appears: Callable[[], None],
    ) -> None:
        """Send one file; a multipart upload that an earlier process began is continued at its missing parts.

        Every request's answer is believed here; what then stands there is looked at once, before the manifest.
        """
        key = self.key(entry.name)
        with self._explaining():
            if self._in_one_request(entry):
                before_it_appears()
                known = state.upload(entry.name).get("upload_id")
                if known:
                    self._multipart.abort(key, known)
                md5 = self._put(entry.name, local.content(entry), entry.sha256)
                if md5:
                    self._sent[entry.name] = md5
                sent(entry.bytes)
            else:
                self._multipart.upload(
                    key,
                    entry,
                    local,
                    state,
                    sent,
                    should_stop,
                    before_it_appears,
                    lambda: self.found(entry.name) == (entry.bytes, entry.sha256),
                )
        state.record(entry, done=True)

    def _in_one_request(self, entry: FileEntry) -> bool:
        return entry.bytes <= self._multipart.part_bytes(entry.bytes)

    def clean_up(self, entries: tuple[FileEntry, ...]) -> None:
        """Abort what multipart uploads are left for our keys: parts cost money for ever, and completing one
        would replace a published object. A server that cannot list them is left alone."""
        keys = {self.key(entry.name) for entry in entries}
        with contextlib.suppress(ClientError, BotoCoreError):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=self.key(""))
            for upload in [upload for page in pages for upload in page.get("Uploads", [])]:
                if upload["Key"] in keys:
                    self.client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
