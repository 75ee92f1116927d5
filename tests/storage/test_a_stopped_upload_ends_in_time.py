"""SIGTERM while parts are on their way over a link on which each takes minutes: the process ends all the same, and nothing is lost."""

import json
import os
import signal
import time

import pytest
from faulty_network import faulty_network
from publications import MIB, contents, make_head, sent_bodies_counted

from jobs.errors import Interrupted
from jobs.run import StopSignal
from jobs.settings import PushSettings
from jobs.storage import multipart
from jobs.storage.bucket import publish, pull
from jobs.storage.restored_run import restore
from jobs.storage.saved_run import RunSaver

SLOW = 256 << 10  # bytes a second and connection: half a minute a part, whatever the kernel takes in advance


def a_run(folder):
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run_id": "one", "job": "hero", "status": "running", "stages": {n: {} for n in ("generate.eval", "generate.train", "train")}}))
    (folder / "weights").write_bytes(os.urandom(24 * MIB))
    return folder


def stopped_in_mid_upload(work, begun) -> float:
    """Run work(should_stop) in a process, SIGTERM once two bodies are on their way; seconds until it ended with 75."""
    child = os.fork()
    if child == 0:
        try:
            should_stop = StopSignal()
            should_stop.install()
            work(should_stop)
        except Interrupted as stopped:
            os._exit(stopped.exit_code)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while len(begun.read_text().splitlines() if begun.exists() else []) < 2:
        assert time.monotonic() < deadline, "nothing is sent"
        time.sleep(0.1)
    asked = time.monotonic()
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    return time.monotonic() - asked


@pytest.mark.parametrize("what", ["head", "run"])
def test_sigterm_breaks_slow_parts_off(moto, monkeypatch, tmp_path, what):
    monkeypatch.setattr(multipart, "STOP_SECONDS", 1.0)
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    bucket, begun, state = f"slow-{what}", tmp_path / "begun", tmp_path / "push.json"
    moto.make_bucket(bucket)
    folder = make_head(tmp_path / "head", 1, 24 * MIB) if what == "head" else a_run(tmp_path / "run")
    direct = PushSettings(endpoint_url=moto.endpoint_url, path_style=True, part_mib=12, threads=2)

    def send(settings, should_stop):
        if what == "head":
            return publish(folder, f"s3://{bucket}/x", settings, state=state, should_stop=should_stop)
        return RunSaver(folder, f"s3://{bucket}/x", settings, run_id="one").save(should_stop)

    with faulty_network(moto.endpoint_url, requests_per_second=SLOW) as network, sent_bodies_counted(begun, least=MIB):
        slow = direct.model_copy(update={"endpoint_url": network.endpoint_url})
        assert stopped_in_mid_upload(lambda should_stop: send(slow, should_stop), begun) < 20
    assert send(direct, lambda: False).bytes_sent >= 24 * MIB
    if what == "head":
        pull(f"s3://{bucket}/x", tmp_path / "back", direct)
        assert contents(tmp_path / "back") == contents(folder)
    else:
        restore(f"s3://{bucket}/x", tmp_path / "back", direct)
        assert (tmp_path / "back" / "weights").read_bytes() == (folder / "weights").read_bytes()
