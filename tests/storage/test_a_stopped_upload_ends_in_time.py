"""SIGTERM while parts are on their way that take minutes, or that the server does not take at all: the process ends, nothing is lost."""

import json
import os
import signal
import threading
import time

import pytest
from faulty_network import faulty_network
from publications import MIB, contents, make_head, sent_bodies_counted

from jobs.context import StopSignal
from jobs.errors import Interrupted
from jobs.settings import PushSettings
from jobs.storage import senders
from jobs.storage.bucket import publish, pull
from jobs.storage.restored_run import restore
from jobs.storage.saved_run import RunSaver

SLOW = 256 << 10  # bytes a second and connection: half a minute a part, whatever the kernel takes in advance


def a_run(folder):
    folder.mkdir()
    (folder / "run.json").write_text(
        json.dumps(
            {"run_id": "one", "job": "hero", "status": "running", "stages": {n: {} for n in ("generate.eval", "generate.train", "train")}}
        )
    )
    (folder / "weights").write_bytes(os.urandom(24 * MIB))
    return folder


def stopped_in_mid_upload(work, begun, then=lambda: None) -> float:
    """Run work(should_stop) in a process, SIGTERM once two bodies are on their way; seconds until it ended with 75.

    The process ends as one of ours does: the interpreter joins what it joins.
    """
    child = os.fork()
    if child == 0:
        try:
            should_stop = StopSignal()
            should_stop.install()
            work(should_stop)
        except Interrupted as stopped:
            threading._shutdown()  # joins as sys.exit does, without pytest's own end
            os._exit(stopped.exit_code)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 60
    while len(begun.read_text().splitlines() if begun.exists() else []) < 2:
        assert time.monotonic() < deadline, "nothing is sent"
        time.sleep(0.1)
    then()
    asked = time.monotonic()
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    return time.monotonic() - asked


@pytest.mark.parametrize(("what", "held"), [("head", False), ("head", True), ("run", False), ("run", True)])
def test_sigterm_breaks_parts_off(moto, monkeypatch, tmp_path, what, held):
    monkeypatch.setattr(senders, "STOP_SECONDS", 1.0)
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    bucket, begun, state = f"slow-{what}-{held}".lower(), tmp_path / "begun", tmp_path / "push.json"
    moto.make_bucket(bucket)
    folder = make_head(tmp_path / "head", 1, 24 * MIB) if what == "head" else a_run(tmp_path / "run")
    direct = PushSettings(endpoint_url=moto.endpoint_url, path_style=True, part_mib=12, threads=2)

    def send(settings, should_stop):
        if what == "head":
            return publish(folder, f"s3://{bucket}/x", settings, state=state, should_stop=should_stop)
        return RunSaver(folder, f"s3://{bucket}/x", settings, run_id="one").save(should_stop)

    with faulty_network(moto.endpoint_url, requests_per_second=SLOW) as network, sent_bodies_counted(begun, least=MIB):
        slow = direct.model_copy(update={"endpoint_url": network.endpoint_url})

        def hold():
            network.requests_per_second = 1 if held else SLOW  # rclone's server takes nothing of a part that is far ahead

        assert stopped_in_mid_upload(lambda should_stop: send(slow, should_stop), begun, hold) < 20
    assert send(direct, lambda: False).bytes_sent >= 24 * MIB
    if what == "head":
        pull(f"s3://{bucket}/x", tmp_path / "back", direct)
        assert contents(tmp_path / "back") == contents(folder)
    else:
        restore(f"s3://{bucket}/x", tmp_path / "back", direct)
        assert (tmp_path / "back" / "weights").read_bytes() == (folder / "weights").read_bytes()
