"""`push.path_style`: where the bucket's name stands in a request; some providers take it in the host name only, some in the path only."""

import socket

import pytest
from publications import contents, make_head

from jobs.settings import PushSettings
from jobs.storage.bucket import publish, pull

DOMAIN = "s3.test"


@pytest.fixture
def asked(monkeypatch) -> set[str]:
    """Every name below DOMAIN that was looked up; all of them are this machine, as a provider's wildcard record has it."""
    names, resolve = set(), socket.getaddrinfo

    def resolved(host, *rest, **more):
        if isinstance(host, str) and host.endswith(DOMAIN):
            names.add(host)
            host = "127.0.0.1"
        return resolve(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return names


@pytest.mark.parametrize(
    ("server", "path_style", "named"),
    [("moto", False, "in-the-host.s3.test"), ("rclone", True, DOMAIN), ("rclone", None, DOMAIN), ("ceph", None, DOMAIN)],
    indirect=["server"],
)
def test_a_head_arrives_either_way(server, asked, monkeypatch, tmp_path, path_style, named):
    """moto reads the host name, the others the path."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, f"127.0.0.1,.{DOMAIN},{DOMAIN}")
    if "in-the-host" not in {bucket["Name"] for bucket in server.client().list_buckets()["Buckets"]}:
        server.make_bucket("in-the-host")
    settings = PushSettings(endpoint_url=server.endpoint_url.replace("127.0.0.1", DOMAIN), path_style=path_style, part_mib=5)
    uri, head = f"s3://in-the-host/{path_style}", make_head(tmp_path / "head", 1)
    publish(head, uri, settings, state=None)
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head) and asked == {named}
