"""moto behind what AWS insists on and moto does not: checksums of bodies, declared and named again (see the messages below).

The rules and their wording are those that AWS answers with, as users report them (botocore issue 3216, opendal pulls 4533
and 4580, aioboto3 pull 363).
"""

import base64
import contextlib
import hashlib
import http.client
import http.server
import re
import threading
import zlib
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}


class StrictS3(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: str):
        super().__init__(("127.0.0.1", 0), _Request)
        self.upstream, self.endpoint_url = urlsplit(upstream).netloc, f"http://127.0.0.1:{self.server_address[1]}"
        self.declared: dict[str, str | None] = {}  # upload id -> checksum algorithm
        self.checksums: dict[tuple[str, int], str] = {}  # of parts


class _Request(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StrictS3

    def log_message(self, *_):
        pass

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query, keep_blank_values=True).items()}
        refusal = self.refusal(body, query)
        if refusal:
            return self.reply(
                400,
                {"Content-Type": "application/xml"},
                b"<Error><Code>%s</Code><Message>%s</Message></Error>" % tuple(part.encode() for part in refusal),
            )
        connection = http.client.HTTPConnection(self.server.upstream)
        connection.request(self.command, self.path, body, dict(self.headers))
        given = connection.getresponse()
        content, headers = given.read(), {name: value for name, value in given.getheaders() if name.lower() not in HOP_BY_HOP}
        connection.close()
        if "uploads" in query and self.command == "POST":
            upload = re.search(rb"<UploadId>(.*?)</UploadId>", content)[1].decode()
            self.server.declared[upload] = self.headers.get("x-amz-checksum-algorithm")
        upload = query.get("uploadId", "")
        if "partNumber" in query and self.headers.get("x-amz-checksum-crc32"):
            headers["x-amz-checksum-crc32"] = self.headers["x-amz-checksum-crc32"]
            self.server.checksums[upload, int(query["partNumber"])] = self.headers["x-amz-checksum-crc32"]
        if self.command == "GET" and upload:

            def with_checksum(found):
                known = self.server.checksums.get((upload, int(found[1])))
                return found[0] + (b"<ChecksumCRC32>%s</ChecksumCRC32>" % known.encode() if known else b"")

            content = re.sub(rb"<PartNumber>(\d+)</PartNumber>", with_checksum, content)
        self.reply(given.status, headers, content, length=given.getheader("Content-Length") if self.command == "HEAD" else None)

    def refusal(self, body: bytes, query: dict[str, str]) -> tuple[str, str] | None:
        crc, md5, upload = self.headers.get("x-amz-checksum-crc32"), self.headers.get("Content-MD5"), query.get("uploadId", "")
        if crc and base64.b64decode(crc) != zlib.crc32(body).to_bytes(4, "big"):
            return "BadDigest", "The CRC32 you specified did not match the calculated checksum."
        if md5 and base64.b64decode(md5) != hashlib.md5(body).digest():
            return "BadDigest", "The Content-MD5 you specified did not match what we received."
        declared = self.server.declared.get(upload)
        if "partNumber" in query and (crc is not None) != (declared == "CRC32"):
            return (
                "InvalidRequest",
                f"Checksum Type mismatch occurred, expected checksum Type: {declared}, actual checksum Type: {'crc32' if crc else None}",
            )
        if self.command == "POST" and declared:
            for part in re.findall(rb"<Part>.*?</Part>", body, re.DOTALL):
                number = int(re.search(rb"<PartNumber>(\d+)", part)[1])
                said = re.search(rb"<ChecksumCRC32>(.*?)</ChecksumCRC32>", part)
                if not said or said[1].decode() != self.server.checksums[upload, number]:
                    return (
                        "InvalidRequest",
                        f"The upload was created using a crc32 checksum. It was missing for part {number} in the request.",
                    )
        return None

    def reply(self, status: int, headers: dict[str, str], content: bytes, length: str | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer


@contextlib.contextmanager
def strict_s3(upstream: str) -> Iterator[StrictS3]:
    with StrictS3(upstream) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
