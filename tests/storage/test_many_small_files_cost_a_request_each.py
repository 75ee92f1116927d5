"""Publishing many small files: a PUT each and little else, and each request that went is proven by another one."""

import collections
import hashlib
import json
import threading
import time

import pytest
from faulty_network import faulty_network
from publications import contents, killed_at, make_head
from s3_servers import rclone_server

from jobs.errors import MustFix, TryAgain
from jobs.settings import PushSettings
from jobs.storage.bucket import publish, pull
from jobs.storage.looks import SharedLook
from jobs.storage.s3 import S3Destination

FILES, SIZE = 100, 3000


def many_files(folder, seed=1):
    folder.mkdir()
    entries = {}
    for n in range(FILES):
        content = b"%d of %d " % (n, seed) * (SIZE // 10)
        (folder / f"table-{n:03}").write_bytes(content)
        entries[f"table-{n:03}"] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "manifest.json").write_text(json.dumps({"files": entries, "seed": seed}))
    return folder


def counted(server, settings, work) -> collections.Counter:
    """Requests by method of work(settings), on the wire."""
    with faulty_network(server.endpoint_url) as network:
        work(settings.model_copy(update={"endpoint_url": network.endpoint_url}))
        return network.requests


def test_each_file_is_one_put_and_one_get(bucket, server, settings, tmp_path):
    """415 requests up before: each file asked HEAD, GET of the claim, PUT and HEAD."""
    uri, head = f"s3://{bucket}/head", many_files(tmp_path / "head")
    up = counted(server, settings, lambda through: publish(head, uri, through, state=tmp_path / "push.json"))
    assert up["PUT"] == FILES + 2  # the claim and the manifest
    assert up["HEAD"] <= 3 and up.total() < 2 * FILES, up
    down = counted(server, settings, lambda through: pull(uri, tmp_path / "back", through))
    assert down.total() == down["GET"] == FILES + 1, down
    assert contents(tmp_path / "back") == contents(head)


def test_an_etag_that_is_no_md5_proves_nothing(tmp_path, monkeypatch):
    """As under KMS: then each file is asked for by its name, as those that came in parts are."""
    (tmp_path / "server").mkdir()
    with rclone_server(tmp_path / "server", "--etag-hash", "") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        server.make_bucket("opaque")
        settings, head = PushSettings(endpoint_url=server.endpoint_url, path_style=True), many_files(tmp_path / "head")
        up = counted(server, settings, lambda through: publish(head, "s3://opaque/head", through, state=None))
        assert up["PUT"] == FILES + 2 and up["HEAD"] >= FILES, up


@pytest.mark.parametrize("shown", ["nothing", "refused", "old", "cut short"])
def test_a_list_that_is_wrong_costs_requests_and_nothing_else(bucket, server, settings, tmp_path, monkeypatch, shown):
    """A server that is only eventually consistent, or lists nothing: files are there all the same, or sent again."""
    seen = S3Destination._list
    answers = {
        "nothing": lambda listed: ({}, True),
        "refused": lambda listed: ({}, False),
        "old": lambda listed: ({name: (size - 1, etag) for name, (size, etag) in listed.items()}, True),
        "cut short": lambda listed: (dict(list(listed.items())[: FILES // 2]), False),
    }
    monkeypatch.setattr(S3Destination, "_list", lambda self, entries: answers[shown](seen(self, entries)[0]))
    uri, head = f"s3://{bucket}/head", many_files(tmp_path / "head")
    first = publish(head, uri, settings, state=None)
    again = publish(head, uri, settings, state=None)
    assert first.bytes_sent == first.bytes and again.bytes_sent in (0, first.bytes)
    assert (again.bytes_sent == 0) == (shown in ("refused", "cut short"))
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)


@pytest.mark.parametrize(
    ("content", "sentence"), [(b"short", "config.json arrived as 5 bytes"), (b'{"seed": 2}', "config.json was changed by somebody else")]
)
def test_a_small_file_that_somebody_replaced_is_seen_before_the_manifest(bucket, server, settings, tmp_path, content, sentence):
    uri, head = f"s3://{bucket}/head", make_head(tmp_path / "head", 1)

    def meanwhile(done, total):
        if done == total:
            server.client().put_object(Bucket=bucket, Key="head/config.json", Body=content, Metadata={"sha256": "0" * 64})

    with pytest.raises(TryAgain, match=sentence):
        publish(head, uri, settings, state=tmp_path / "push.json", progress=meanwhile)
    assert "head/manifest.json" not in server.keys(bucket)
    publish(head, uri, settings, state=tmp_path / "push.json")
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)


def test_another_claim_stops_the_files_that_have_not_begun(bucket, server, settings, tmp_path):
    """Looks are shared, but none that began before a file was ready counts for it."""
    uri, head = f"s3://{bucket}/head", many_files(tmp_path / "head")

    def meanwhile(done, total):
        if done > total // 4:
            server.client().put_object(Bucket=bucket, Key="head/publishing.json", Body=b'{"manifest_sha256": "another"}')

    with pytest.raises(MustFix, match="Another head's upload was begun there"):
        publish(head, uri, settings, state=None, progress=meanwhile)
    # A quarter, and one for each of 32 that were at it: their look came before the other claim.
    assert len([key for key in server.keys(bucket) if "table-" in key]) <= FILES // 4 + 1 + 32


def test_small_files_that_arrived_before_a_kill_are_not_sent_again(place, tmp_path):
    """Though the record of them is written once a second only."""
    uri, settings = place
    head, state = many_files(tmp_path / "head"), tmp_path / "push.json"
    done = killed_at(FILES * SIZE // 2, lambda progress: publish(head, uri, settings, state=state, progress=progress))
    second = publish(head, uri, settings, state=state)
    assert 0 < second.bytes_sent <= second.bytes - done
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)


def test_a_shared_look_begins_after_everybody_who_waits_for_it():
    looks, asked_and_seen, lock = [], [], threading.Lock()

    def look():
        began = time.monotonic()
        time.sleep(0.02)
        looks.append(began)

    shared = SharedLook(look)

    def ask():
        asked = time.monotonic()
        shared()
        with lock:
            asked_and_seen.append((asked, time.monotonic()))

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
        time.sleep(0.003)
    for thread in threads:
        thread.join()
    assert len(asked_and_seen) == 40 and len(looks) < 20
    assert all(any(asked <= began and began + 0.02 <= seen for began in looks) for asked, seen in asked_and_seen)


def test_what_a_shared_look_finds_is_raised_in_all_who_wait():
    begun, raised = threading.Event(), []

    def look():
        begun.wait(10)
        raise MustFix("Lost", where="there", remedy="none")

    shared = SharedLook(look)

    def ask():
        try:
            shared()
        except MustFix as error:
            raised.append(error)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    begun.set()
    for thread in threads:
        thread.join()
    with pytest.raises(MustFix):
        shared()
    assert len(raised) == 5
