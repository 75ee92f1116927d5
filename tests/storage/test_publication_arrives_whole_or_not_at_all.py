"""Publish and pull over three real S3 servers and a folder: whole, verified, resumable, the manifest last."""

import json
import os
import signal
import time

import pytest
from faulty_network import faulty_network
from publications import MIB, MODEL_BYTES, bodies_sent, contents, killed_at, make_head, sent_bodies_counted

from jobs.errors import Interrupted, MustFix, TryAgain
from jobs.settings import PushSettings
from jobs.storage import s3_client
from jobs.storage.bucket import destination, publish, pull
from jobs.storage.local_files import LocalFiles
from jobs.storage.multipart import integrity

PART = 5 * MIB


def open_uploads(client, bucket: str) -> list[dict]:
    """Uploads that are neither completed nor aborted. rclone says NoSuchUpload of a bucket in which none was ever begun."""
    try:
        return client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
    except client.exceptions.NoSuchUpload:
        return []


def test_what_is_published_comes_back(place, tmp_path):
    uri, settings = place
    head, told = make_head(tmp_path / "head", seed=1), []
    published = publish(head, uri, settings, state=tmp_path / "push.json", progress=lambda *p: told.append(p))
    total = published.bytes
    assert (published.files, published.bytes_sent) == (3, total) and total > MODEL_BYTES
    assert told[-1] == (total, total) and [done for done, _ in told] == sorted(done for done, _ in told)
    manifest = pull(uri, tmp_path / "back", settings)
    assert manifest == json.loads((head / "manifest.json").read_text())
    assert contents(tmp_path / "back") == contents(head)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_only_the_named_files_stand_at_the_destination(bucket, server, settings, tmp_path):
    publish(make_head(tmp_path / "head", 1), f"s3://{bucket}/kimi/head", settings, state=None)
    names = ["config.json", "manifest.json", "model.safetensors", "sglang/config.json"]
    assert server.keys(bucket) == {f"kimi/head/{name}" for name in names}
    assert not open_uploads(server.client(), bucket)


def test_a_second_publication_of_the_same_head_sends_nothing(place, tmp_path):
    uri, settings = place
    head = make_head(tmp_path / "head", 1)
    publish(head, uri, settings, state=None)
    assert publish(head, uri, settings, state=None).bytes_sent == 0
    assert publish(head, uri, settings, state=tmp_path / "other-state.json").bytes_sent == 0


def test_a_killed_upload_goes_on_at_the_missing_parts(place, tmp_path):
    """kill -9 in the middle: no manifest, so a reader refuses; at most one part a thread is sent twice."""
    uri, settings = place
    head, state = make_head(tmp_path / "head", 1), tmp_path / "push.json"
    done = killed_at(6 * MIB, lambda progress: publish(head, uri, settings, state=state, progress=progress))
    with pytest.raises(MustFix, match="The publication there is not complete") as refusal:
        pull(uri, tmp_path / "back", settings)
    assert refusal.value.exit_code == 78 and "\n" not in str(refusal.value)
    assert not (tmp_path / "back").exists()
    second = publish(head, uri, settings, state=state)
    assert 0 < second.bytes_sent <= second.bytes - done + settings.threads * PART
    assert second.bytes_sent < MODEL_BYTES
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)


def test_the_parts_that_arrived_are_not_sent_again(bucket, server, settings, tmp_path):
    """The server's own list of parts says what the second call need not send."""
    uri, state = f"s3://{bucket}/head", tmp_path / "push.json"
    head = make_head(tmp_path / "head", 1)
    killed_at(6 * MIB, lambda progress: publish(head, uri, settings, state=state, progress=progress))
    upload_id = json.loads(state.read_text())["files"]["model.safetensors"]["upload_id"]
    parts = server.client().list_parts(Bucket=bucket, Key="head/model.safetensors", UploadId=upload_id)["Parts"]
    arrived = sum(part["Size"] for part in parts)
    assert arrived >= 2 * PART
    second = publish(head, uri, settings, state=state)
    small = len((head / "sglang/config.json").read_bytes())  # sent beside the model, before the kill or after it
    # Not equal: a part that the dead client had handed over may come in after the list.
    assert second.bytes_sent <= MODEL_BYTES - arrived + small


def test_without_its_state_a_killed_upload_begins_anew_and_leaves_no_parts(bucket, server, settings, tmp_path):
    uri, head = f"s3://{bucket}/head", make_head(tmp_path / "head", 1)
    state = tmp_path / "push.json"
    killed_at(6 * MIB, lambda progress: publish(head, uri, settings, state=state, progress=progress))
    assert len(open_uploads(server.client(), bucket)) == 1
    publish(head, uri, settings, state=None)
    assert not open_uploads(server.client(), bucket)
    pull(uri, tmp_path / "back", settings)


def test_an_upload_the_server_forgot_begins_anew(bucket, server, settings, tmp_path):
    uri, head, state = f"s3://{bucket}/head", make_head(tmp_path / "head", 1), tmp_path / "push.json"
    killed_at(6 * MIB, lambda progress: publish(head, uri, settings, state=state, progress=progress))
    upload_id = json.loads(state.read_text())["files"]["model.safetensors"]["upload_id"]
    server.client().abort_multipart_upload(Bucket=bucket, Key="head/model.safetensors", UploadId=upload_id)
    assert publish(head, uri, settings, state=state).bytes_sent >= MODEL_BYTES
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)


def test_a_stopped_upload_says_so_and_goes_on(place, tmp_path):
    uri, settings = place
    head, state, done = make_head(tmp_path / "head", 1), tmp_path / "push.json", [0]
    with pytest.raises(Interrupted, match="upload was stopped") as stopped:
        publish(
            head,
            uri,
            settings,
            state=state,
            progress=lambda now, total: done.append(now),
            should_stop=lambda: done[-1] > 6 * MIB,
        )
    assert stopped.value.exit_code == 75
    assert publish(head, uri, settings, state=state).bytes_sent < MODEL_BYTES
    pull(uri, tmp_path / "back", settings)


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_an_interrupted_download_resumes(place, tmp_path, ending):
    uri, settings = place
    head, told = make_head(tmp_path / "head", 1), []
    publish(head, uri, settings, state=None)
    if ending == "kill":
        killed_at(9 * MIB, lambda progress: pull(uri, tmp_path / "back", settings, progress=progress))
    else:
        done = [0]
        with pytest.raises(Interrupted, match="download was stopped"):
            pull(
                uri,
                tmp_path / "back",
                settings,
                progress=lambda now, total: done.append(now),
                should_stop=lambda: done[-1] > 9 * MIB,
            )
    assert not (tmp_path / "back").exists()
    pull(uri, tmp_path / "back", settings, progress=lambda now, total: told.append(now))
    small = 1000  # more than both small files
    assert min(now for now in told if now > small) > 9 * MIB  # nothing of the first 9 MiB was fetched again
    assert contents(tmp_path / "back") == contents(head)


def test_a_broken_connection_is_picked_up_within_one_call(bucket, server, settings, tmp_path):
    uri, head = f"s3://{bucket}/head", make_head(tmp_path / "head", 1)
    publish(head, uri, settings, state=None)
    with faulty_network(server.endpoint_url, break_after=MIB // 2, breaks_left=3) as network:
        pull(uri, tmp_path / "back", settings.model_copy(update={"endpoint_url": network.endpoint_url}))
        assert network.broken == 3
    assert contents(tmp_path / "back") == contents(head)


def test_a_slow_link_breaks_no_part_off(moto, monkeypatch, tmp_path):
    """A part that takes far longer than connecting may is sent once."""
    monkeypatch.setattr(s3_client, "CONNECT_SECONDS", 0.5)
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    moto.make_bucket("slow")
    head, begun = make_head(tmp_path / "head", 1), tmp_path / "begun"
    with faulty_network(moto.endpoint_url, requests_per_second=MIB) as network, sent_bodies_counted(begun):
        settings = PushSettings(endpoint_url=network.endpoint_url, path_style=True, part_mib=5, threads=4)
        publish(head, "s3://slow/head", settings, state=None)
    assert bodies_sent(begun) == MODEL_BYTES
    pull("s3://slow/head", tmp_path / "back", PushSettings(endpoint_url=moto.endpoint_url, path_style=True))
    assert contents(tmp_path / "back") == contents(head)


def test_a_body_goes_out_in_pieces_each_with_its_own_limit():
    """Python's limit is for the whole of one sendall: a part in one piece would have to fit into it on any link."""
    data = os.urandom(5 * MIB // 2)
    body = s3_client.Body(data)
    for _ in range(2):  # botocore rewinds what it sends again
        pieces = list(iter(lambda: bytes(body.read(16384)), b""))
        assert b"".join(pieces) == data and [len(piece) for piece in pieces] == [MIB, MIB, MIB // 2]
        assert (len(body), body.tell(), body.seek(0)) == (len(data), len(data), 0)


def test_a_damaged_part_of_an_earlier_download_is_fetched_again(place, tmp_path):
    uri, settings = place
    head = make_head(tmp_path / "head", 1)
    publish(head, uri, settings, state=None)
    killed_at(9 * MIB, lambda progress: pull(uri, tmp_path / "back", settings, progress=progress))
    partial = tmp_path / ".back.partial" / "model.safetensors.partial"
    with open(partial, "r+b") as file:
        file.write(b"\0" * 1000)
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)


def test_a_corrupted_object_is_found_and_nothing_appears(place, request, tmp_path):
    uri, settings = place
    publish(make_head(tmp_path / "head", 1), uri, settings, state=None)
    damaged = bytearray((tmp_path / "head" / "model.safetensors").read_bytes())
    damaged[1_000_000] ^= 1
    destination(uri, settings).write_small("model.safetensors", bytes(damaged))
    with pytest.raises(MustFix, match="model.safetensors has another sha256 than its manifest says"):
        pull(uri, tmp_path / "back", settings)
    assert not (tmp_path / "back").exists()


def test_bytes_changed_on_the_way_are_never_published(bucket, server, settings, tmp_path):
    """Content-MD5 where the server checks it (rclone, Ceph), reading back where it does not (moto)."""
    head, uri = make_head(tmp_path / "head", 1), f"s3://{bucket}/head"
    with faulty_network(server.endpoint_url, swap=(b'{"sglang": 1}', b'{"sglang": 7}')) as network:
        careful = settings.model_copy(update={"endpoint_url": network.endpoint_url, "read_back": True})
        with pytest.raises(TryAgain):
            publish(head, uri, careful, state=tmp_path / "push.json")
    assert "head/manifest.json" not in server.keys(bucket)
    publish(head, uri, settings.model_copy(update={"read_back": True}), state=tmp_path / "push.json")
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)


def test_a_file_damaged_before_the_upload_is_not_published(place, tmp_path):
    uri, settings = place
    head = make_head(tmp_path / "head", 1)
    (head / "config.json").write_bytes(b'{"seed": 2}')
    with pytest.raises(MustFix, match="config.json has another sha256 than its manifest says"):
        publish(head, uri, settings, state=None)
    (head / "config.json").unlink()
    with pytest.raises(MustFix, match="config.json is named in its manifest but missing"):
        publish(head, uri, settings, state=None)
    with pytest.raises(MustFix, match="Nothing is published there"):
        pull(uri, tmp_path / "back", settings)


def test_damage_found_while_the_file_is_sent_leaves_nothing_there(place, tmp_path):
    """A large file is hashed beside its upload: it never appears, and neither parts nor a claim stay behind."""
    uri, settings = place
    head, state = make_head(tmp_path / "head", 1), tmp_path / "push.json"
    good = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(MustFix, match="model.safetensors has another sha256 than its manifest says"):
        publish(head, uri, settings, state=state)
    assert destination(uri, settings).found("model.safetensors") is None
    with pytest.raises(MustFix, match="Nothing is published there"):
        pull(uri, tmp_path / "back", settings)
    if uri.startswith("s3:"):
        client, bucket = destination(uri, settings).client, uri.split("/")[2]
        assert not open_uploads(client, bucket)
    (head / "model.safetensors").write_bytes(good)
    publish(head, uri, settings, state=state)
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)


def test_parts_of_a_file_written_since_are_not_used(bucket, server, settings, tmp_path):
    """Killed before the file's sha256 was known, its parts count only while the file is untouched."""
    uri, head, state = f"s3://{bucket}/head", make_head(tmp_path / "head", 1), tmp_path / "push.json"
    good = (head / "model.safetensors").read_bytes()
    (head / "model.safetensors").write_bytes(bytes(len(good)))
    with pytest.MonkeyPatch.context() as patch:  # as if it had been killed before its sha256 was known
        patch.setattr(LocalFiles, "compared", lambda self, entry, sha256: None)
        killed_at(6 * MIB, lambda progress: publish(head, uri, settings, state=state, progress=progress))
    (head / "model.safetensors").write_bytes(good)
    assert publish(head, uri, settings, state=state).bytes_sent >= MODEL_BYTES
    assert not open_uploads(server.client(), bucket)
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)


def test_a_killed_upload_begins_at_most_one_part_a_thread_twice(bucket, server, settings, tmp_path):
    """Counted where the client hands bytes to the network, parts cut off by the kill as if they were whole."""
    uri, head, state = f"s3://{bucket}/head", make_head(tmp_path / "head", 1, 8 * PART), tmp_path / "push.json"
    begun = tmp_path / "begun"
    with sent_bodies_counted(begun):
        killed_at(11 * MIB, lambda progress: publish(head, uri, settings, state=state, progress=progress))
        first = bodies_sent(begun)
        assert first < 8 * PART
        time.sleep(0.5)  # rclone's server may still write down what the dead client sent, and refuses to complete then
        publish(head, uri, settings, state=state)
    twice = bodies_sent(begun) - 8 * PART
    assert first > 0 and 0 <= twice <= settings.threads * PART


def test_checksums_of_boto3_take_the_place_of_md5(bucket, settings, tmp_path):
    """`when_supported` (AWS): a CRC travels with every body and no MD5 is calculated."""
    newer = settings.model_copy(update={"checksums": "when_supported"})
    uri, head = f"s3://{bucket}/head", make_head(tmp_path / "head", 1)
    assert set(integrity(b"x", newer)) == {"ChecksumCRC32"} and set(integrity(b"x", settings)) == {"ContentMD5"}
    publish(head, uri, newer, state=None)
    pull(uri, tmp_path / "back", newer)
    assert contents(tmp_path / "back") == contents(head)


def test_a_folder_with_something_else_is_not_overwritten(place, tmp_path):
    uri, settings = place
    head = make_head(tmp_path / "head", 1, model_bytes=1000)
    publish(head, uri, settings, state=None)
    (tmp_path / "back").mkdir()
    pull(uri, tmp_path / "back", settings)  # an empty folder is nothing
    pull(uri, tmp_path / "back", settings)  # this publication, whole: left alone
    (tmp_path / "back" / "config.json").write_bytes(b"{}")
    with pytest.raises(MustFix, match="holds this publication, damaged"):
        pull(uri, tmp_path / "back", settings)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    with pytest.raises(MustFix, match="The folder holds something else"):
        pull(uri, tmp_path / "other", settings)
    assert (tmp_path / "other" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("name", ["../escaped", "/etc/passwd", "a/../../b", "manifest.json", "a//b"])
def test_a_manifest_cannot_write_outside_its_folder(place, tmp_path, name):
    uri, settings = place
    content = json.dumps({"files": {name: {"sha256": "0" * 64, "bytes": 1}}}).encode()
    with destination(uri, settings).hold():
        destination(uri, settings).write_small("manifest.json", content)
    with pytest.raises(MustFix, match="names an impossible file"):
        pull(uri, tmp_path / "back", settings)


def test_a_reader_at_any_moment_gets_all_or_a_refusal(place, tmp_path):
    """A reader that polls from before a publisher begins sees refusals, then the whole head."""
    uri, settings = place
    head = make_head(tmp_path / "head", 1)
    begin, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(begin, 1)  # the reader was refused once
            publish(head, uri, settings, state=None)
            os._exit(0)
        finally:
            os._exit(1)
    refused, deadline = 0, time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            try:
                pull(uri, tmp_path / "back", settings)
                break
            except MustFix as refusal:
                assert "not complete" in str(refusal) or "Nothing is published" in str(refusal)
                assert not (tmp_path / "back").exists()
                refused += 1
                os.write(told, b".")
        assert contents(tmp_path / "back") == contents(head)
        assert refused > 0
        _, status = os.waitpid(child, 0)
        assert status == 0
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
