"""What a person can get wrong about a destination: one sentence with place and remedy, the right exit code, at once."""

import datetime
import os
import time

import botocore.auth
import pytest
from publications import make_head

from jobs.errors import MustFix, TryAgain
from jobs.ports import free_port
from jobs.settings import PushSettings
from jobs.storage.bucket import probe, publish, pull


def every_call(uri, settings, tmp_path):
    head = make_head(tmp_path / "head", 1, model_bytes=100)
    return (
        lambda: probe(uri, settings),
        lambda: publish(head, uri, settings, state=None),
        lambda: pull(uri, tmp_path / "back", settings),
    )


def refusals(calls, error, pattern):
    for call in calls:
        with pytest.raises(error, match=pattern) as refusal:
            call()
        assert "\n" not in str(refusal.value) and refusal.value.remedy


def test_a_good_destination_passes_and_keeps_nothing(place, tmp_path):
    uri, settings = place
    probe(uri, settings)
    with pytest.raises(MustFix, match="Nothing is published there"):
        pull(uri, tmp_path / "back", settings)
    if uri.startswith("file:"):
        assert list((tmp_path / "destination" / "head").iterdir()) == []


def test_whether_a_server_keeps_two_writers_apart_is_said_by_the_server(server, bucket, settings):
    """Not by the look that is taken before every conditional put, which finds the object on any server."""
    assert probe(f"s3://{bucket}/head", settings)["conditional_put"] is server.honours_if_none_match
    assert server.keys(bucket) == set()


def test_a_bucket_that_does_not_exist(server, settings, tmp_path):
    calls = every_call("s3://no-such-bucket/head", settings, tmp_path)
    refusals(calls, MustFix, r"The bucket does not exist \(s3://no-such-bucket/head\): create it, or correct the address")


@pytest.mark.parametrize("server", ["rclone", "ceph"], indirect=True)
@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials(server, bucket, settings, monkeypatch, tmp_path, variable):
    """Not on moto, which lets everybody in."""
    monkeypatch.setenv(variable, "wrong")
    calls = every_call(f"s3://{bucket}/head", settings, tmp_path)
    refusals(calls, MustFix, r"The endpoint refuses the credentials: (InvalidAccessKeyId|SignatureDoesNotMatch)")


@pytest.mark.parametrize("server", ["ceph"], indirect=True)
def test_a_full_bucket(server, bucket, settings, tmp_path):
    server.limit(bucket, "1M")
    calls = every_call(f"s3://{bucket}/head", settings, tmp_path)
    refusals(calls[:1], MustFix, r"The bucket is full: QuotaExceeded \(s3://.*\): make room there or raise its quota")


@pytest.mark.parametrize("server", ["ceph"], indirect=True)
def test_a_user_who_was_locked_out(server, bucket, settings, monkeypatch, tmp_path):
    key = server.key_that_may("*")
    server.suspend(key)
    for name, value in key.items():
        monkeypatch.setenv(name, value)
    refusals(every_call(f"s3://{bucket}/head", settings, tmp_path), MustFix, "The endpoint refuses the credentials: UserSuspended")


@pytest.mark.parametrize("server", ["rclone", "ceph"], indirect=True)
def test_a_clock_that_is_hours_off(server, bucket, settings, monkeypatch, tmp_path):
    """The server refuses what was signed two hours ahead of it."""
    clock = botocore.auth.get_current_datetime
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *given: clock(*given) + datetime.timedelta(hours=2))
    refusals(every_call(f"s3://{bucket}/head", settings, tmp_path), MustFix, r"This machine's clock is wrong \(s3://.*\): set the clock")


def test_no_credentials_at_all(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    calls = every_call("s3://bucket/head", PushSettings(endpoint_url="http://127.0.0.1:9"), tmp_path)
    refusals(calls, MustFix, "There are no credentials for the bucket .*set AWS_ACCESS_KEY_ID")


def test_credentials_from_a_mounted_file(rclone, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    environment = rclone.environment
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = {environment['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {environment['AWS_SECRET_ACCESS_KEY']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    rclone.make_bucket("from-a-file")
    probe("s3://from-a-file/head", PushSettings(endpoint_url=rclone.endpoint_url, path_style=True))


def test_an_endpoint_that_does_not_answer(moto, monkeypatch, tmp_path):
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    settings = PushSettings(endpoint_url=f"http://127.0.0.1:{free_port()}", path_style=True)
    started = time.monotonic()
    with pytest.raises(TryAgain, match="The endpoint does not answer") as refusal:
        probe("s3://bucket/head", settings)
    assert time.monotonic() - started < 25 and refusal.value.exit_code == 75


@pytest.mark.parametrize("uri", ["bucket/head", "s3:///head", "http://bucket/head", "file://host/head", "file:///", ""])
def test_what_is_no_address(uri, tmp_path):
    refusals(every_call(uri, PushSettings(), tmp_path), MustFix, "is no address.*use s3://bucket/prefix or file:///folder")


def test_the_place_of_a_wrong_address_is_where_it_was_said(tmp_path):
    """`pull s3x://…` is an argument; only what stands in a setting is looked for there."""
    with pytest.raises(MustFix, match=r"'s3x://bucket/head' is no address \(the address that was given\)"):
        pull("s3x://bucket/head", tmp_path / "back", PushSettings())
    with pytest.raises(MustFix, match=r"is no address \(push.backup_uri\)"):
        probe("s3x://bucket/head", PushSettings(backup_uri="s3x://bucket/head"))


def test_an_address_boto3_refuses(moto, monkeypatch, tmp_path):
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    refusals(every_call("s3://Bad_Bucket!/x", PushSettings(endpoint_url=moto.endpoint_url), tmp_path), MustFix, "boto3")
    refusals(every_call("s3://bucket/x", PushSettings(endpoint_url="no url"), tmp_path), MustFix, "boto3 refuses")


def test_a_folder_behind_a_file(tmp_path):
    (tmp_path / "file").write_text("in the way")
    calls = every_call((tmp_path / "file" / "head").as_uri(), PushSettings(), tmp_path)
    refusals(calls[:2], MustFix, "The folder cannot be used")


def test_a_folder_without_permission(tmp_path):
    """Judged by a process that is not root, because root may write everywhere."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user for this test")
    closed = tmp_path / "closed"
    closed.mkdir()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            probe((closed / "head").as_uri(), PushSettings())
        except MustFix as refusal:
            os._exit(78 if "The folder cannot be used: Permission denied" in str(refusal) else 3)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 78


def test_a_folder_without_a_manifest(place, tmp_path):
    uri, settings = place
    (tmp_path / "empty").mkdir()
    with pytest.raises(MustFix, match="The folder has no manifest.json"):
        publish(tmp_path / "empty", uri, settings, state=None)
    (tmp_path / "empty" / "manifest.json").write_text('{"files": [1, 2]}')
    with pytest.raises(MustFix, match="The manifest is malformed"):
        publish(tmp_path / "empty", uri, settings, state=None)
