"""What fails on the way to a run is told and ends the rental like what fails in it; real processes, a real webhook."""

import datetime
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from webhook_server import webhook

from jobs.job_file import load
from jobs.run import RunDirectory
from jobs.storage.saved_run import RunSaver


def start(tmp_path, hook, *arguments, run_dir="run"):
    settings = (
        f"push.uri=file://{tmp_path}/heads/one",
        f"rental.on_finish=echo $EAGLE3_STATUS $EAGLE3_EXIT_CODE >> {tmp_path}/finished",
        "rental.hold_minutes=0.02",
    )
    command = [
        sys.executable,
        "-m",
        "entrypoints.cli",
        "smoke",
        "--json",
        "--run-dir",
        str(tmp_path / run_dir),
        *(part for item in settings for part in ("--set", item)),
        *arguments,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"EAGLE3_WEBHOOK": hook.url}
    )


def result(process):
    output, errors = process.communicate(timeout=240)
    answer = json.loads(output)
    assert answer["exit_code"] == process.returncode, errors
    return answer


def test_a_resume_from_nothing_is_told_and_ends_the_rental(tmp_path):
    with webhook() as hook:
        failed = result(start(tmp_path, hook, "--resume-from", f"file://{tmp_path}/nothing"))
        assert failed["exit_code"] == 78 and "No run is saved there" in failed["error"]["message"]
        assert hook.events() == ["failed"] and "No run is saved there" in hook.messages[0]["text"]
        assert hook.messages[0]["exit_code"] == 78 and hook.messages[0]["run_dir"] == str(tmp_path / "run")
    assert (tmp_path / "finished").read_text() == "failed 78\n"


@pytest.mark.parametrize("arguments", [(), ("--resume-from", "file://{saved}")], ids=["begun", "resumed"])
def test_a_run_directory_that_cannot_be_written_is_told_and_ends_the_rental(tmp_path, arguments):
    (tmp_path / "file").touch()
    save(tmp_path)
    with webhook() as hook:
        failed = result(start(tmp_path, hook, *(part.format(saved=tmp_path / "heads/one.run") for part in arguments), run_dir="file/run"))
        assert failed["exit_code"] == 78 and "cannot be written" in failed["error"]["message"]
        assert hook.events() == ["failed"] and failed["error"]["message"] in hook.messages[0]["text"]
    assert (tmp_path / "finished").read_text() == "failed 78\n"


def test_a_run_directory_that_is_damaged_is_told_and_ends_the_rental(tmp_path):
    """It is refused when its lock is held already: the hold at the end must not take this process for another one."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_bytes(b"\0\n{}\n")
    with webhook() as hook:
        failed = result(start(tmp_path, hook))
        assert failed["exit_code"] == 78 and "is damaged" in failed["error"]["message"] and hook.events() == ["failed"]
    assert (tmp_path / "finished").read_text() == "failed 78\n"


def test_a_second_start_beside_a_run_that_goes_on_ends_nothing(tmp_path):
    other = RunDirectory(tmp_path / "run")
    with webhook() as hook:
        refused = result(start(tmp_path, hook))
        assert refused["exit_code"] == 78 and "Another process is using" in refused["error"]["message"] and hook.events() == []
    other.close()
    assert not (tmp_path / "finished").exists()


def save(tmp_path, files=0):
    settings = load("smoke", overrides=[f"push.uri=file://{tmp_path}/heads/one"], environment={})
    run = RunDirectory(tmp_path / "lost")
    run.begin(settings)
    for number in range(files):
        (run.path / f"{number}.txt").write_text(str(number))
    RunSaver(run.path, f"file://{tmp_path}/heads/one.run", settings.push, run_id=run.ledger["run_id"]).save()
    run.close()


def slow_blocks(tmp_path, until):
    """Every block as a pipe into which its content comes at `until` (time.time())."""
    for block in list((tmp_path / "heads/one.run/blocks").glob("*/*")):
        content = block.read_bytes()
        block.unlink()
        os.mkfifo(block)

        def write(block=block, content=content):
            time.sleep(max(0.0, until - time.time()))
            block.write_bytes(content)

        threading.Thread(target=write, daemon=True).start()


def test_a_deadline_ends_a_download_too(tmp_path):
    save(tmp_path, files=40)
    deadline = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=20)
    slow_blocks(tmp_path, deadline.timestamp() + 1)
    with webhook() as hook:
        uri = f"file://{tmp_path}/heads/one"
        ended = result(
            start(
                tmp_path,
                hook,
                "--resume-from",
                uri,
                "--set",
                f"rental.deadline={deadline.isoformat()}",
                "--set",
                "rental.reserve_minutes=0",
                "--set",
                "rental.hold_minutes=60",
            )
        )
        assert ended["status"] == "interrupted" and ended["exit_code"] == 75, ended
        assert "The deadline" in ended["error"]["message"] and ended["error"]["message"].endswith(f"everything is saved to {uri}")
        assert hook.events() == ["interrupted"]
    assert (tmp_path / "finished").read_text() == "interrupted 75\n", "at once: nothing of it is on this machine alone"
    assert not (tmp_path / "run" / "run.json").exists()


def test_no_download_begins_after_the_deadline(tmp_path):
    save(tmp_path)
    with webhook() as hook:
        refused = result(
            start(tmp_path, hook, "--resume-from", f"file://{tmp_path}/heads/one", "--set", "rental.deadline=2020-01-01T00:00:00Z")
        )
        assert refused["exit_code"] == 78 and "this start would pass it" in refused["error"]["message"] and hook.events() == ["failed"]
    assert not (tmp_path / "run" / ".restoring").exists()
