"""Three S3 servers, once a session; every test gets a bucket of its own."""

import itertools

import pytest
from ceph_server import ceph_server
from s3_servers import S3Server, moto_server, rclone_server

from jobs.settings import PushSettings

_numbers = itertools.count()


@pytest.fixture(scope="session")
def moto():
    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory):
    with rclone_server(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session")
def ceph(tmp_path_factory):
    with ceph_server(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture(params=["moto", "rclone", "ceph"])
def server(request, monkeypatch) -> S3Server:
    """A real S3 server, its credentials in the environment."""
    running = request.getfixturevalue(request.param)
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    return running


@pytest.fixture
def bucket(server) -> str:
    name = f"heads-{next(_numbers)}"
    server.make_bucket(name)
    return name


@pytest.fixture
def settings(server) -> PushSettings:
    """The smallest parts S3 knows, two at a time."""
    return PushSettings(endpoint_url=server.endpoint_url, path_style=True, part_mib=5, threads=2)


@pytest.fixture(params=["moto", "rclone", "ceph", "file"])
def place(request, tmp_path) -> tuple[str, PushSettings]:
    """(uri, settings) of an empty destination: what must hold, must hold for buckets and folders."""
    if request.param == "file":
        return (tmp_path / "destination" / "head").as_uri(), PushSettings(part_mib=5, threads=2)
    server = request.getfixturevalue(request.param)
    monkeypatch = request.getfixturevalue("monkeypatch")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    name = f"heads-{next(_numbers)}"
    server.make_bucket(name)
    settings = PushSettings(endpoint_url=server.endpoint_url, path_style=True, part_mib=5, threads=2)
    return f"s3://{name}/kimi/head", settings
