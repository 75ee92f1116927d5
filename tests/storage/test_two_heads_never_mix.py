"""Different heads at one address: one wins whole, the other is told so; on every server and in a folder."""

import os

import pytest
from publications import MIB, contents, killed_at, make_head

from jobs.errors import JobError, MustFix, TryAgain
from jobs.storage.bucket import publish, pull


def test_a_second_head_is_refused_and_changes_nothing(place, tmp_path):
    uri, settings = place
    first, second = make_head(tmp_path / "first", 1), make_head(tmp_path / "second", 2)
    publish(first, uri, settings, state=None)
    with pytest.raises(MustFix, match="Another head is published there") as refusal:
        publish(second, uri, settings, state=None)
    assert refusal.value.exit_code == 78
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(first)


def test_a_head_may_replace_another_when_told_to(place, tmp_path):
    uri, settings = place
    publish(make_head(tmp_path / "first", 1), uri, settings, state=tmp_path / "push.json")
    second = make_head(tmp_path / "second", 2)
    publish(second, uri, settings, state=tmp_path / "push.json", replace=True)
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(second)


def test_a_begun_upload_of_another_head_is_not_continued_with_ours(bucket, settings, tmp_path):
    uri = f"s3://{bucket}/head"
    first, second = make_head(tmp_path / "first", 1), make_head(tmp_path / "second", 2)
    state = tmp_path / "first.json"
    killed_at(6 * MIB, lambda progress: publish(first, uri, settings, state=state, progress=progress))
    with pytest.raises(MustFix, match=r"Another head's upload was begun there at 20\d\d-.*delete the object publishing"):
        publish(second, uri, settings, state=tmp_path / "second.json")
    publish(first, uri, settings, state=state)
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(first)


def test_the_same_run_may_publish_a_new_head_over_its_own_killed_upload(place, tmp_path):
    """Trained again after the push was killed: the claim is this run's, nothing of the old head is used."""
    uri, settings = place
    first, second, state = make_head(tmp_path / "first", 1), make_head(tmp_path / "second", 2), tmp_path / "push.json"
    killed_at(6 * MIB, lambda progress: publish(first, uri, settings, state=state, progress=progress))
    published = publish(second, uri, settings, state=state)
    assert published.bytes_sent == published.bytes
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(second)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"short", "model.safetensors arrived as 5 bytes instead of"), (None, "model.safetensors was changed by somebody else")],
)
def test_what_stands_there_is_looked_at_before_the_manifest(bucket, server, settings, tmp_path, content, sentence):
    """Somebody puts another object under the name while the head is being published: no manifest speaks of it, and the next call mends it."""
    uri, head, state = f"s3://{bucket}/head", make_head(tmp_path / "head", 1), tmp_path / "push.json"
    other = content or (make_head(tmp_path / "other", 2) / "model.safetensors").read_bytes()

    def meanwhile(done, total):
        if done == total:
            server.client().put_object(Bucket=bucket, Key="head/model.safetensors", Body=other, Metadata={"sha256": "0" * 64})

    with pytest.raises(TryAgain, match=sentence):
        publish(head, uri, settings, state=state, progress=meanwhile)
    assert "head/manifest.json" not in server.keys(bucket)
    publish(head, uri, settings, state=state)
    pull(uri, tmp_path / "back", settings)
    assert contents(tmp_path / "back") == contents(head)


def test_two_publishers_at_the_same_time(place, tmp_path):
    """Both begin at once; at most one succeeds, and what can be pulled is exactly that one."""
    uri, settings = place
    heads = [make_head(tmp_path / name, seed) for seed, name in enumerate(("first", "second"))]
    children = []
    for head in heads:
        child = os.fork()
        if child == 0:
            try:
                publish(head, uri, settings, state=None)
                os._exit(0)
            except JobError as error:
                os._exit(error.exit_code)
            finally:
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes.count(0) <= 1 and set(codes) <= {0, 75, 78}, codes
    if 0 in codes:
        pull(uri, tmp_path / "back", settings)
        assert contents(tmp_path / "back") == contents(heads[codes.index(0)])
    else:  # both saw the other's claim: nothing is there, and saying whose it is lets one go on
        with pytest.raises(MustFix, match="not complete"):
            pull(uri, tmp_path / "back", settings)
