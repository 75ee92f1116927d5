"""The boto3 clients, and their errors in one sentence each.

Decision: what a server says decides between "you must fix this" (78: no such bucket, wrong credentials,
no permission, wrong region, a malformed address) and "try again" (75: no answer, a server error,
throttling, bytes damaged on the way); botocore has by then tried ATTEMPTS times itself.

Two clients, because the limit for connecting is also the limit for sending: Python counts the whole of one
`sendall`, so a part of 64 MiB was broken off after 5 seconds on a new connection and sent again, four times, on any
link that shares 1 Gbps among 16 threads. `sending` therefore waits longer, and a `Body` goes out in pieces, each of
which may take so long.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import boto3
import botocore.session
from botocore.client import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSLError,
)
from botocore.exceptions import ConnectionError as NoConnectionError
from botocore.loaders import Loader, create_loader
from urllib3.exceptions import HTTPError

from jobs.errors import JobError, MustFix, TryAgain
from jobs.settings import PushSettings

CONNECT_SECONDS, READ_SECONDS, ATTEMPTS = 5, 60, 4  # a dead endpoint is known after a few seconds
SMALL_FILES_AT_ONCE = 32  # a small file is a round trip and little else
SEND_SECONDS, PIECE = 60, 1 << 20  # for so many bytes of a body; a server may hold a part back for a while (rclone does)

# Besides ClientError, an answer that says no: what boto3 and the connection below it raise.
NO_ANSWER = (BotoCoreError, HTTPError, OSError)
_BROKEN_OFF = (IncompleteReadError, HTTPError, OSError)

_WRONG_CREDENTIALS = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "ExpiredToken",
    "401",
    "InvalidSecurity",
    "UserSuspended",  # Ceph
}
NO_PERMISSION = {"AccessDenied", "403", "AllAccessDisabled", "AccountProblem", "Forbidden"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}  # Ceph, MinIO
ABSENT = {"NoSuchKey", "404", "NotFound"}
_WRONG_REGION = {
    "PermanentRedirect",
    "301",
    "307",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
_PASSING = {"SlowDown", "RequestTimeout", "OperationAborted", "ConditionalRequestConflict"}
_DAMAGED_ON_THE_WAY = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"}
_NAME_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or mount a credentials file"


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def http_status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def explained(error: Exception, uri: str) -> JobError:
    """One sentence for what boto3 raised: 78 where a person must act, 75 where a new try may succeed."""
    if isinstance(error, (NoCredentialsError, PartialCredentialsError, ProfileNotFound)):
        return MustFix("There are no credentials for the bucket", where=uri, remedy=_NAME_CREDENTIALS)
    said = " ".join(str(error).split())
    if isinstance(error, SSLError) and "CERTIFICATE_VERIFY_FAILED" in said:
        remedy = "set AWS_CA_BUNDLE to a file with its authority's certificate, or correct push.endpoint_url"
        return MustFix(f"The endpoint's certificate is not trusted here: {said}", where=uri, remedy=remedy)
    if isinstance(error, SSLError) and "WRONG_VERSION_NUMBER" in said:
        return MustFix(
            "The endpoint speaks no TLS", where=uri, remedy="correct push.endpoint_url: its port, or http:// instead of https://"
        )
    if isinstance(error, (HTTPClientError, NoConnectionError, CredentialRetrievalError)):
        return TryAgain(
            f"The endpoint does not answer: {said}",
            where=uri,
            remedy="check push.endpoint_url and the network, then run the same command again",
        )
    if isinstance(error, _BROKEN_OFF):
        return TryAgain(f"The connection broke off: {said}", where=uri, remedy="run the same command again")
    if not isinstance(error, ClientError):
        return MustFix(f"boto3 refuses the destination: {said}", where=uri, remedy="check the address and push.endpoint_url")
    code, status = error_code(error), http_status(error)
    if code == "NoSuchBucket":
        return MustFix("The bucket does not exist", where=uri, remedy="create it, or correct the address")
    if code in _WRONG_CREDENTIALS:
        return MustFix(f"The endpoint refuses the credentials: {code}", where=uri, remedy=_NAME_CREDENTIALS)
    if code in NO_PERMISSION:
        remedy = "the key needs s3:ListBucket, GetObject, PutObject, DeleteObject and AbortMultipartUpload there"
        return MustFix(f"The credentials have no permission: {code}", where=uri, remedy=remedy)
    if code in _FULL:
        return MustFix(
            f"The bucket is full: {code}", where=uri, remedy="make room there or raise its quota, then run the same command again"
        )
    if code in _WRONG_REGION:
        return MustFix(f"The bucket is in another region: {code}", where=uri, remedy="set push.region")
    if code == "RequestTimeTooSkewed":
        return MustFix("This machine's clock is wrong", where=uri, remedy="set the clock")
    text = f"{error.operation_name} failed with {code or status}: {said}"
    if status >= 500 or status == 429 or code in _PASSING | _DAMAGED_ON_THE_WAY:
        return TryAgain(text, where=uri, remedy="run the same command again")
    return MustFix(text, where=uri, remedy="check the address and the endpoint's log")


class BrokenOff(BaseException):
    """Raised out of a request whose body is not to be sent to its end. No Exception: botocore would send it again."""


class Body:
    """The bytes of a request, handed to the socket in pieces of at most PIECE without being copied.

    A file to botocore, which may rewind it to send it again. BrokenOff between two pieces once `should_stop`.
    """

    def __init__(self, data: bytes | bytearray, should_stop: Callable[[], bool] = lambda: False):
        self._view, self._position, self._should_stop = memoryview(data), 0, should_stop

    def __len__(self) -> int:
        return len(self._view)

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: len(self)}[whence]
        return self._position

    def read(self, size: int | None = None) -> memoryview:
        """The next piece, whatever `size` (http.client asks for 16 KiB): one of 1 MiB costs a sixtieth of the calls."""
        if self._should_stop():
            raise BrokenOff
        piece = self._view[self._position : self._position + PIECE]
        self._position += len(piece)
        return piece


@functools.cache
def _models() -> Loader:
    """What botocore knows of S3, read once a process: 60 to 200 ms, which each new session would spend again."""
    return create_loader()


def clients_for(settings: PushSettings, uri: str) -> tuple[Any, Any]:
    """(for questions, for sending bodies): the first gives up on a dead endpoint after a few seconds."""
    region = settings.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and settings.endpoint_url:
        region = "us-east-1"  # what servers without regions sign with
    try:
        core = botocore.session.get_session()
        core.register_component("data_loader", _models())
        session = boto3.session.Session(botocore_session=core)
        if session.get_credentials() is None:
            raise NoCredentialsError()
        asking, sending = (
            session.client("s3", endpoint_url=settings.endpoint_url, region_name=region, config=_config(settings, seconds))
            for seconds in (CONNECT_SECONDS, SEND_SECONDS)
        )
    except (BotoCoreError, ValueError) as error:
        raise explained(error, uri) from None
    # Every file as body is announced with `Expect: 100-continue`: a round trip a part, a second where a server is silent.
    sending.meta.events.register_last("before-call.s3", lambda params, **_: params["headers"].pop("Expect", None) and None)
    return asking, sending


def _config(settings: PushSettings, connect_seconds: float) -> Config:
    return Config(
        connect_timeout=connect_seconds,
        read_timeout=READ_SECONDS,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        max_pool_connections=max(settings.threads, SMALL_FILES_AT_ONCE) + 4,
        request_checksum_calculation="when_required",  # what is asked for beyond is calculated in multipart.integrity
        response_checksum_validation="when_required",  # what comes is compared with its sha256
        signature_version="s3v4",
        s3={
            "addressing_style": {True: "path", False: "virtual", None: "auto"}[settings.path_style],
            "payload_signing_enabled": False,  # over plain http a second hash: Content-MD5 or a CRC is signed already
        },
    )
