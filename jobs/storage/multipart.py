"""Large objects in parts: one read of each byte, parts begun in their order, continued where an earlier process stopped.

Decision: the file's own thread reads part after part into a few buffers, hashing what it reads; `threads` others
send them. Parts begin in order, because servers that put an object together while it comes in (rclone) hold back
what is ahead; the buffers bound memory, and the bytes that a killed upload sends again, to one part a thread.

- Parts have equal sizes (Cloudflare R2 demands it); small ones, so that all threads are busy to the end.
- A part travels with what the server compares it with: Content-MD5, or a CRC32 that is declared when the upload is
  created and named again when it is completed, as AWS demands.
- The upload's id is kept in `UploadState`; which parts are there, the server says.
"""

import base64
import hashlib
import math
import queue
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from botocore.exceptions import ClientError

from jobs.errors import Interrupted
from jobs.settings import PushSettings
from jobs.storage.local_files import LocalFiles, Reading
from jobs.storage.manifest import FileEntry, UploadState
from jobs.storage.s3_client import ABSENT, Body, BrokenOff, error_code, http_status
from jobs.storage.senders import LOOK_SECONDS, Grace, Senders, settled

MIB = 1 << 20
LARGEST_PART_NUMBER = 10_000
PARTS_A_THREAD, SMALL_PART_MIB = 4, 8  # so many at least, unless the parts became smaller than that
READ_AHEAD = 4  # buffers beside one a thread: as many as large files are read at once

Sent = Callable[[int], None]  # (bytes more)
Parts = dict[int, dict[str, Any]]  # number -> what the completion says of it: ETag, and the checksum the server knows


class MultipartUploads:
    """The multipart uploads of one destination; its threads and buffers serve all files together."""

    def __init__(self, client: Any, sending: Any, bucket: str, settings: PushSettings, uri: str):
        self.client, self.sending, self.bucket, self.settings, self.uri = client, sending, bucket, settings, uri
        self._senders = Senders(settings.threads, "upload")
        # The one used last comes first: it is still in the cache, and most are never needed on a slow link.
        self._buffers: queue.LifoQueue[bytearray] = queue.LifoQueue()
        for _ in range(settings.threads + READ_AHEAD):
            self._buffers.put(bytearray())

    def part_bytes(self, size: int) -> int:
        """Bytes of a part, whole MiB: as set at most, less where the threads would not all have some, and as many
        more as 10,000 parts need."""
        spread = max(size / (PARTS_A_THREAD * self.settings.threads), SMALL_PART_MIB * MIB)
        return math.ceil(max(min(self.settings.part_mib * MIB, spread), size / LARGEST_PART_NUMBER) / MIB) * MIB

    def upload(
        self,
        key: str,
        entry: FileEntry,
        local: LocalFiles,
        state: UploadState,
        sent: Sent,
        should_stop: Callable[[], bool],
        before_it_appears: Callable[[], None],
        stands_there: Callable[[], bool],
    ) -> None:
        for attempt in range(3):  # an upload can vanish: expired, or aborted by a lifecycle rule
            upload_id, part_bytes, parts = self._continue_or_begin(key, entry, local, state)
            try:
                self._send_missing(key, entry, local, part_bytes, upload_id, parts, sent, should_stop)
                before_it_appears()
                self.client.complete_multipart_upload(
                    Bucket=self.bucket,
                    Key=key,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": [{"PartNumber": n, **parts[n]} for n in sorted(parts)]},
                )
                return
            except ClientError as error:
                if error_code(error) not in {"NoSuchUpload", "InvalidPart", "ConditionalRequestConflict"} or attempt == 2:
                    raise
                # A complete whose answer was lost is repeated by botocore and finds its upload gone: it is done.
                if error_code(error) == "NoSuchUpload" and stands_there():
                    return
                # InvalidPart: a killed process's part came in late, under another ETag; look at the parts once more.
                # rclone's server says it while it works for a dead client, and drops the upload.
                if error_code(error) != "InvalidPart" or attempt == 1:
                    state.forget(entry.name)

    def _continue_or_begin(self, key: str, entry: FileEntry, local: LocalFiles, state: UploadState) -> tuple[str, int, Parts]:
        """(upload id, its bytes a part, the parts that are there).

        Parts of another content are given up, those of a file written since (they may have been sent before it was
        hashed), and those of an upload that was declared under another `push.checksums`.
        """
        known, written, checksums = state.upload(entry.name), local.written_ns(entry), self.settings.checksums
        if known.get("upload_id"):
            if (known.get("sha256"), known.get("mtime_ns"), known.get("checksums")) == (entry.sha256, written, checksums):
                parts = self._parts_there(key, entry, known["upload_id"], known["part_bytes"])
                if parts is not None:
                    return known["upload_id"], known["part_bytes"], parts
            else:
                self.abort(key, known["upload_id"])
        part_bytes = self.part_bytes(entry.bytes)
        declared = {} if checksums == "when_required" else {"ChecksumAlgorithm": "CRC32"}
        answer = self.client.create_multipart_upload(Bucket=self.bucket, Key=key, Metadata={"sha256": entry.sha256}, **declared)
        state.record(entry, part_bytes=part_bytes, upload_id=answer["UploadId"], mtime_ns=written, checksums=checksums)
        return answer["UploadId"], part_bytes, {}

    def _parts_there(self, key: str, entry: FileEntry, upload_id: str, part_bytes: int) -> Parts | None:
        parts: Parts = {}
        try:
            pages = self.client.get_paginator("list_parts").paginate(Bucket=self.bucket, Key=key, UploadId=upload_id)
            for part in (part for page in pages for part in page.get("Parts", [])):
                if part["Size"] == _part_size(part["PartNumber"], entry.bytes, part_bytes):
                    parts[part["PartNumber"]] = _said(part)
        except ClientError as error:
            if error_code(error) in {"NoSuchUpload", *ABSENT}:
                return None
            raise
        return parts

    def _send_missing(
        self,
        key: str,
        entry: FileEntry,
        local: LocalFiles,
        part_bytes: int,
        upload_id: str,
        parts: Parts,
        sent: Sent,
        should_stop: Callable[[], bool],
    ) -> None:
        """Read all of the file, send the parts that are not in `parts`, `threads` at a time, and enter them there."""
        failed, broken_off = threading.Event(), Grace(should_stop)

        def send(number: int, data: bytearray) -> None:
            try:
                if failed.is_set() or should_stop():
                    raise BrokenOff
                answer = self.sending.upload_part(
                    Bucket=self.bucket,
                    Key=key,
                    UploadId=upload_id,
                    PartNumber=number,
                    Body=Body(data, broken_off),
                    **integrity(data, self.settings),
                )
                parts[number] = _said(answer)
                sent(len(data))  # here, so that a stop for what was sent is seen before this thread's next part
            except BrokenOff:
                failed.set()
                raise Interrupted("The upload was stopped", where=self.uri, remedy="run the same command to go on") from None
            except BaseException:
                failed.set()
                raise
            finally:
                self._buffers.put(data)

        futures: list[Future[None]] = []
        there = set(parts)
        try:
            with local.reading(entry) as reading:
                for number in range(1, -(-entry.bytes // part_bytes) + 1):
                    size = _part_size(number, entry.bytes, part_bytes)
                    if failed.is_set():
                        break
                    if number in there:
                        reading.skip(size)
                        continue
                    data = self._filled(reading, size, lambda: failed.is_set() or broken_off())
                    if data is None:
                        break
                    futures.append(self._senders.submit(send, number, data))
                else:
                    reading.compare()
        except BaseException:
            failed.set()
            raise
        finally:
            all_ended = settled(futures, broken_off)
        if not all_ended:
            raise Interrupted("The upload was stopped", where=self.uri, remedy="run the same command to go on")
        errors = [error for future in futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, Interrupted)):  # the cause before its consequences
            raise error

    def _filled(self, reading: Reading, size: int, give_up: Callable[[], bool]) -> bytearray | None:
        """The next bytes, in a buffer that `send` gives back; None where none became free before `give_up`."""
        while True:
            try:
                buffer = self._buffers.get(timeout=LOOK_SECONDS)
                break
            except queue.Empty:
                if give_up():
                    return None
        try:
            if len(buffer) != size:
                buffer = bytearray(size)
            reading.into(buffer)
        except BaseException:
            self._buffers.put(buffer)
            raise
        return buffer

    def abort(self, key: str, upload_id: str) -> None:
        try:
            self.client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload_id)
        except ClientError as error:
            if http_status(error) >= 500:
                raise


def integrity(data: bytes | bytearray, settings: PushSettings) -> dict[str, str]:
    """What the server compares the bytes with.

    Calculated here, not by botocore, which sends a CRC behind a body over TLS, cut into chunks of 1 MiB.
    """
    if settings.checksums == "when_required":
        return {"ContentMD5": base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()}
    return {"ChecksumCRC32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}


def _said(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in ("ETag", "ChecksumCRC32") if name in answer}


def _part_size(number: int, size: int, part_bytes: int) -> int:
    return min(part_bytes, size - (number - 1) * part_bytes)
