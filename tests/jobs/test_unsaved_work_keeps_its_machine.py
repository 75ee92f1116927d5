"""What the last save could not save is on this machine alone: it is tried again in time, told truly, and on_finish waits.

Real servers, a closed port and a silent one; the run is what entrypoints.launch puts around the pipeline.
"""

import contextlib
import datetime
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from s3_servers import ACCESS_KEY, SECRET_KEY, moto_server
from webhook_server import webhook

from entrypoints import launch
from jobs.backup import SECONDS_AFTER_A_SIGNAL, Backup, time_to_save
from jobs.context import Context
from jobs.errors import Interrupted, JobError
from jobs.job_file import load
from jobs.ports import free_port
from jobs.rental import ended
from jobs.reporting.display import Display
from jobs.run import RunDirectory
from jobs.storage.saved_run import NotOurs, record_of
from jobs.storage.senders import STOP_SECONDS

KEYS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1"}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


def context(tmp_path, endpoint, *overrides):
    settings = load(
        "smoke", overrides=["push.uri=s3://heads/kimi", f"push.endpoint_url={endpoint}", "push.path_style=true", *overrides], environment={}
    )
    run = RunDirectory(tmp_path / "run")
    run.begin(settings)
    made = Context(settings, run, Display.open("plain"))
    made.should_stop.install()
    return made


def in_seconds(seconds):
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat()


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the moment did not come"
        time.sleep(0.05)


def test_a_dead_endpoint_at_the_deadline_is_told_and_the_machine_is_kept(tmp_path, monkeypatch):
    finished = tmp_path / "finished"
    with webhook() as hook, contextlib.ExitStack() as endpoint:
        monkeypatch.setenv("EAGLE3_WEBHOOK", hook.url)
        server = endpoint.enter_context(moto_server())
        server.make_bucket("heads")
        rental = (
            f"rental.deadline={in_seconds(18)}",
            "rental.reserve_minutes=0.1",
            f"rental.on_finish=echo $EAGLE3_STATUS > {finished}",
            "rental.hold_minutes=0.04",
        )
        made = context(tmp_path, server.endpoint_url, *rental)
        with pytest.raises(Interrupted) as caught, launch._guarded(made):
            made.backup.nudge()
            wait_for(lambda: "uri" in record_of(made.path))
            saved = record_of(made.path)["saved"]
            endpoint.close()
            wait_for(made.should_stop)
            stopped = time.monotonic()
            raise made.should_stop.reason
        assert 5 < time.monotonic() - stopped < SECONDS_AFTER_A_SIGNAL + STOP_SECONDS + 5, "tried again, and not for ever"
        error = caught.value
        launch._complete(error, made)
        assert error.exit_code == 75 and "everything is saved" not in error.message
        assert f"nothing was saved to s3://heads/kimi.run since {saved}: The endpoint does not answer" in error.message
        assert "with this run directory" in error.remedy
        assert made.run.ledger["error"]["message"] == error.message
        made.run.close()
        began = time.monotonic()
        ended(
            made.settings,
            made.path,
            {"status": "interrupted", "exit_code": 75, "error": error.as_dict(), "unsaved": launch._unsaved(made)},
            error,
        )
        assert finished.read_text() == "interrupted\n" and time.monotonic() - began > 2.4, "after the hold"
        assert hook.events() == ["interrupted"]
        assert hook.messages[0]["unsaved"] in hook.messages[0]["text"] and hook.messages[0]["text"].count("nothing was saved") == 1


def test_a_saved_deadline_says_where(tmp_path):
    with moto_server() as server:
        server.make_bucket("heads")
        made = context(tmp_path, server.endpoint_url, f"rental.deadline={in_seconds(10)}", "rental.reserve_minutes=0.1")
        with pytest.raises(Interrupted) as caught, launch._guarded(made):
            made.backup.nudge()
            wait_for(made.should_stop)
            raise made.should_stop.reason
        launch._complete(caught.value, made)
    assert launch._unsaved(made) is None
    assert caught.value.message.endswith("; everything is saved to s3://heads/kimi.run") and "--resume-from" in caught.value.remedy
    made.run.close()


def test_without_a_backup_the_run_directory_has_it(tmp_path):
    made = context(tmp_path, "http://127.0.0.1:9", "push.backup=off")
    error = Interrupted("The deadline is near", where="rental.deadline", remedy="run it elsewhere")
    error.ends_rental = True
    launch._complete(error, made)
    assert error.message == "The deadline is near; everything is saved in the run directory" and "this run directory" in error.remedy
    made.run.close()


def test_an_endpoint_that_comes_back_in_time_gets_the_run(tmp_path):
    """rclone, whose bucket is a folder that is there before the server is."""
    rclone, port = shutil.which("rclone", path=str(Path(sys.executable).parent)) or shutil.which("rclone"), free_port()
    (tmp_path / "buckets" / "heads").mkdir(parents=True)
    command = [
        rclone,
        "serve",
        "s3",
        "--config",
        "",
        "--auth-key",
        f"{ACCESS_KEY},{SECRET_KEY}",
        "--addr",
        f"127.0.0.1:{port}",
        str(tmp_path / "buckets"),
    ]
    made, started = context(tmp_path, f"http://127.0.0.1:{port}"), []
    backup = Backup(made, "s3://heads/kimi.run")
    backup.nudge()
    timer = threading.Timer(12, lambda: started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)))
    timer.start()
    try:
        backup.finish(120, 120)
        assert started, "not before the server came"
        assert backup.unsaved is None and (tmp_path / "buckets/heads/kimi.run/state.json").exists()
    finally:
        timer.cancel()
        for process in started:
            process.terminate()
            process.wait()
        made.run.close()


def test_a_silent_endpoint_does_not_hold_the_end_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = context(tmp_path, f"http://127.0.0.1:{listener.getsockname()[1]}")
        backup = Backup(made, "s3://heads/kimi.run")
        backup.nudge()
        began = time.monotonic()
        with contextlib.suppress(JobError):
            backup.finish(2, 2)
        assert time.monotonic() - began < 2 + STOP_SECONDS + 3
        assert backup.unsaved == "nothing was saved to s3://heads/kimi.run yet: The save did not end in time"
        made.run.close()


def test_a_signal_ends_the_tries(tmp_path):
    made = context(tmp_path, f"http://127.0.0.1:{free_port()}")
    backup = Backup(made, "s3://heads/kimi.run")
    backup.nudge()
    threading.Timer(1, lambda: signal.raise_signal(signal.SIGTERM)).start()
    began = time.monotonic()
    backup.finish(300, 300)
    assert time.monotonic() - began < 30
    assert "The endpoint does not answer" in backup.unsaved or "stopped" in backup.unsaved
    made.run.close()


def test_nothing_is_sent_where_another_machine_saves(tmp_path):
    made = context(tmp_path, f"http://127.0.0.1:{free_port()}")
    backup = Backup(made, "s3://heads/kimi.run")
    backup.nudge()
    made.should_stop.reason = NotOurs("Another machine has taken this run over")
    began = time.monotonic()
    backup.finish(300, 300)
    assert time.monotonic() - began < 1 and backup.unsaved is None
    made.run.close()


@pytest.mark.parametrize("published,kept", [("s3://heads/kimi", False), (None, True)])
def test_a_run_that_is_done_is_kept_only_where_its_head_is_nowhere_else(tmp_path, monkeypatch, published, kept):
    settings = load(
        "smoke",
        overrides=["push.uri=s3://heads/kimi", f"rental.on_finish=touch {tmp_path}/finished", "rental.hold_minutes=0.01"],
        environment={},
    )
    with webhook() as hook:
        monkeypatch.setenv("EAGLE3_WEBHOOK", hook.url)
        began = time.monotonic()
        ended(
            settings,
            tmp_path,
            {
                "status": "done",
                "exit_code": 0,
                "error": None,
                "published": published,
                "unsaved": "nothing was saved to s3://heads/kimi.run yet: why",
            },
            None,
        )
        assert (time.monotonic() - began > 0.5) == kept and (tmp_path / "finished").exists()
        assert hook.messages[0]["text"].endswith("; nothing was saved to s3://heads/kimi.run yet: why")


def test_what_is_left_of_the_rental_is_for_saving(tmp_path):
    made = context(tmp_path, "http://127.0.0.1:9", "rental.reserve_minutes=10", "rental.on_finish=shutdown")
    assert time_to_save(made, float("inf")) == (3600, 600)
    assert time_to_save(made, 500) == (500, 500)
    assert time_to_save(made, -20) == (SECONDS_AFTER_A_SIGNAL, SECONDS_AFTER_A_SIGNAL), "a stage took longer than the reserve"
    made.should_stop.reason = Interrupted("The deadline is near")
    made.should_stop.reason.ends_rental = True
    assert time_to_save(made, 700) == (700, 700)
    made.should_stop.reason = None
    signal.raise_signal(signal.SIGTERM)
    assert time_to_save(made, 700) == (SECONDS_AFTER_A_SIGNAL, 0)
    made.run.close()
