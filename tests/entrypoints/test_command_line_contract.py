"""The command line: exit codes, one sentence an error, one JSON line on standard output, always."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

JOB = [sys.executable, "-m", "entrypoints.cli"]


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([*JOB, *arguments], capture_output=True, text=True, timeout=300, **options)


def answer(done: subprocess.CompletedProcess) -> dict:
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


@pytest.mark.parametrize("job", ["hero", "local-test", "smoke"])
def test_dry_run_says_what_would_run_on_any_machine(job, tmp_path):
    done = run(job, "--dry-run", "--json", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    result = answer(done)
    assert result["status"] == "planned" and result["exit_code"] == 0 and result["error"] is None
    assert list(result["stages"]) == [
        "preflight", "fetch", "prompts", "generate.eval", "baseline", "generate.train", "vocab", "train", "evaluate", "package", "push",
    ]  # fmt: skip
    assert result["on_request"] == (["live"] if job == "hero" else [])
    assert {"run_dir", "verifier_loads", "acceptance", "published", "cost", "plans"} <= result.keys()
    assert not (tmp_path / "run").exists(), "a dry run leaves nothing behind"


def test_dry_run_is_readable_without_json(tmp_path):
    done = run("hero", "--dry-run", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0
    assert "generate.train" in done.stdout and "8 x B300" in done.stdout


def test_an_unknown_key_is_78_with_the_nearest_one():
    done = run("smoke", "--set", "train.learning_rat=1", "--json")
    assert done.returncode == 78
    result = answer(done)
    assert result["status"] == "failed" and result["exit_code"] == 78
    assert "did you mean train.learning_rate" in result["error"]["message"]
    assert set(result["error"]) == {"message", "where", "remedy"}
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_a_wrong_command_line_is_2_and_still_one_json_line():
    done = run("smoke", "--no-such-option", "--json")
    assert done.returncode == 2
    assert answer(done)["exit_code"] == 2


def test_debug_shows_the_traceback():
    assert "Traceback" in run("smoke", "--set", "train.epochs=x", "--debug").stderr


def test_two_runs_in_one_folder_are_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import time; from pathlib import Path; from jobs.run import RunDirectory; run = RunDirectory(Path({str(folder)!r})); print('held', flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        done = run("smoke", "--run-dir", str(folder), "--json")
        assert done.returncode == 78 and "Another process" in answer(done)["error"]["message"]
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()


def test_an_unwritable_run_directory_is_78(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    done = run("smoke", "--run-dir", str(blocked / "run"), "--json")
    assert done.returncode == 78
    assert "cannot be written" in answer(done)["error"]["message"]


def test_a_run_of_another_job_is_not_continued(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "job": "hero", "settings": {}}))
    done = run("smoke", "--run-dir", str(tmp_path), "--json")
    assert done.returncode == 78 and "holds a run of the job 'hero'" in answer(done)["error"]["message"]


def test_preflight_names_every_problem_at_once(tmp_path):
    settings = ["prompts.source=/nowhere/prompts.jsonl", "vocab.size=99999999", "push.uri=file:///proc/none/head"]
    done = run("preflight", "smoke", "--json", *(part for s in settings for part in ("--set", s)))
    assert done.returncode == 78, done.stderr
    message = answer(done)["error"]["message"]
    assert "3 problem(s)" in message
    for expected in ("/nowhere/prompts.jsonl", "vocab.size = 99999999", "/proc/none"):
        assert expected in message


def test_status_and_report_of_a_folder_without_a_run(tmp_path):
    for command in ("status", "report"):
        done = run(command, str(tmp_path), "--json")
        assert done.returncode == 78, (command, done.stderr)
        assert "no run here" in answer(done)["error"]["message"]


def test_sigterm_before_any_work_is_75(tmp_path):
    process = subprocess.Popen([*JOB, "smoke", "--run-dir", str(tmp_path / "run"), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    events = Path(tmp_path / "run" / "events.jsonl")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (events.exists() and "run started" in events.read_text()):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert json.loads(output)["status"] == "interrupted"
