"""`push.checksums` against a server that checks them as AWS does: declared, sent with every body, named again at the end."""

import pytest
from faulty_network import faulty_network
from publications import MIB, contents, killed_at, make_head
from strict_s3 import strict_s3

from jobs.errors import TryAgain
from jobs.settings import PushSettings
from jobs.storage.bucket import probe, publish, pull


@pytest.fixture
def aws(moto, monkeypatch):
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    with strict_s3(moto.endpoint_url) as server:
        yield server


def settings_for(endpoint_url: str, checksums: str) -> PushSettings:
    return PushSettings(endpoint_url=endpoint_url, path_style=True, part_mib=5, threads=2, checksums=checksums)


@pytest.mark.parametrize("checksums", ["when_required", "when_supported"])
def test_a_killed_upload_is_continued_and_completed(aws, moto, tmp_path, checksums):
    settings, uri, state = (
        settings_for(aws.endpoint_url, checksums),
        f"s3://strict-{checksums.replace('_', '-')}/head",
        tmp_path / "push.json",
    )
    moto.make_bucket(uri.split("/")[2])
    head = make_head(tmp_path / "head", 1)
    probe(uri, settings)
    killed_at(6 * MIB, lambda progress: publish(head, uri, settings, state=state, progress=progress))
    second = publish(head, uri, settings, state=state)
    assert 0 < second.bytes_sent < second.bytes
    assert set(aws.declared.values()) == ({None} if checksums == "when_required" else {"CRC32"})
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)


def test_an_upload_begun_under_another_setting_begins_anew(aws, moto, tmp_path):
    before, after = (settings_for(aws.endpoint_url, checksums) for checksums in ("when_required", "when_supported"))
    moto.make_bucket("changed-setting")
    head, state = make_head(tmp_path / "head", 1), tmp_path / "push.json"
    killed_at(6 * MIB, lambda progress: publish(head, "s3://changed-setting/head", before, state=state, progress=progress))
    publish(head, "s3://changed-setting/head", after, state=state)
    pull("s3://changed-setting/head", tmp_path / "back", after)
    assert contents(tmp_path / "back") == contents(head)


@pytest.mark.parametrize("checksums", ["when_required", "when_supported"])
def test_bytes_changed_on_the_way_are_refused_by_the_server(aws, moto, tmp_path, checksums):
    uri = f"s3://changed-{checksums.replace('_', '-')}/head"
    moto.make_bucket(uri.split("/")[2])
    head = make_head(tmp_path / "head", 1, model_bytes=1000)
    with faulty_network(aws.endpoint_url, swap=(b'{"sglang": 1}', b'{"sglang": 7}')) as network, pytest.raises(TryAgain, match="BadDigest"):
        publish(head, uri, settings_for(network.endpoint_url, checksums), state=None)
    assert "head/manifest.json" not in moto.keys(uri.split("/")[2])
