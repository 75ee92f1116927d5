"""The command line: exit codes, one sentence an error, one JSON line on standard output, always."""

import contextlib
import errno
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


def test_a_dry_run_of_a_run_that_goes_on_says_what_is_done(tmp_path):
    from jobs.job_file import load
    from jobs.run import RunDirectory

    run_directory = RunDirectory(tmp_path / "run")
    run_directory.begin(load("smoke", environment={}))
    run_directory.stage("prompts").update(state="done", seconds=2.0, counts={"train": 24})
    run_directory.save()
    run_directory.close()
    result = answer(run("smoke", "--dry-run", "--json", "--run-dir", str(tmp_path / "run")))
    assert result["stages"]["prompts"] == {"state": "done", "seconds": 2.0, "counts": {"train": 24}}
    assert result["stages"]["train"]["state"] == "pending"
    shown = {tuple(line.split()) for line in result["text"].splitlines()}
    assert "would go on" in result["text"] and {("prompts", "done"), ("train", "pending")} <= shown


@pytest.mark.parametrize("arguments", [("smoke", "--redo", "live"), ("smoke", "--redo", "live", "--dry-run"), ("stage", "live")])
def test_a_stage_that_the_run_does_not_have_is_78_and_not_passed_over(arguments, tmp_path):
    from jobs.job_file import load
    from jobs.run import RunDirectory

    run_directory = RunDirectory(tmp_path / "run")
    run_directory.begin(load("smoke", environment={}))
    run_directory.close()
    done = run(*arguments, "--run-dir", str(tmp_path / "run"), "--json")
    assert done.returncode == 78, done.stderr
    assert answer(done)["error"] == {
        "message": "This run has no stage 'live'", "where": "command line", "remedy": "ask for it by setting evaluate.live.concurrencies",
    }  # fmt: skip


def test_a_job_of_ones_own_is_a_file_and_its_run_is_named_after_it(tmp_path):
    (tmp_path / "mine.toml").write_text('[job]\nname = "mine"\n[train]\nepochs = 2\n')
    result = answer(run("run", str(tmp_path / "mine.toml"), "--dry-run", "--json"))
    assert result["run_dir"].endswith("/runs/mine") and result["settings"]["train"]["epochs"] == 2
    unknown = answer(run("run", str(tmp_path / "mine.toml"), "--dry-run", "--json", "--set", "verifier.model=somebody/model"))
    assert unknown["plans"] == [] and "No plan: The shape of verifier" in unknown["text"]
    assert answer(run("smoke", "--set", "job.name=other", "--dry-run", "--json"))["run_dir"].endswith("/runs/other")


def test_every_setting_is_listed_as_json_too():
    listed = answer(run("settings", "--json"))["settings"]
    assert "train.epochs" in listed and all(listed.values())


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
        [
            sys.executable,
            "-c",
            f"import time; from pathlib import Path; from jobs.run import RunDirectory; run = RunDirectory(Path({str(folder)!r})); print('held', flush=True); time.sleep(60)",
        ],
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


@contextlib.contextmanager
def read_only(folder: Path):
    """A folder that for root too cannot be written."""
    (folder / "volume").mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "--bind", folder / "volume", folder / "volume"], capture_output=True).returncode:
        pytest.skip("only root with the right to mount can make a read-only volume")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder / "volume"], check=True)
        yield folder / "volume"
    finally:
        subprocess.run(["umount", folder / "volume"], check=True)


@pytest.mark.parametrize("command", [("smoke",), ("preflight", "smoke")])
def test_a_run_directory_on_a_read_only_volume_is_78_with_the_remedy_for_that(tmp_path, command):
    with read_only(tmp_path) as volume:
        done = run(*command, "--run-dir", str(volume / "run"))
    assert done.returncode == 78
    said = f"The run directory cannot be written: Read-only file system ({volume}/run): mount it writable or take another --run-dir."
    assert done.stderr == f"eagle3-job: {said}\n"


def test_a_disk_with_no_byte_left_is_78_with_the_remedy_for_that(tmp_path):
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("only root with the right to mount can make a small disk")
    try:
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "ballast").write_bytes(bytes(1 << 17))
        for command in (("smoke",), ("preflight", "smoke")):
            done = run(*command, "--run-dir", str(tmp_path / "run"))
            assert done.returncode == 78
            said = "The run directory cannot be written: No space left on device"
            assert done.stderr == f"eagle3-job: {said} ({tmp_path}/run): free space there or take another --run-dir.\n"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is told that he lacks permission")
def test_a_run_directory_where_no_file_can_be_is_not_a_question_of_permission():
    for command in (("smoke",), ("preflight", "smoke")):
        done = run(*command, "--run-dir", "/proc/x")
        assert done.returncode == 78
        assert "cannot be written" in done.stderr and "(/proc/x): take another --run-dir" in done.stderr and "permission" not in done.stderr


def test_a_folder_that_a_command_cannot_write_is_78_and_no_bug(monkeypatch, capfd):
    """Whoever runs this, root included: the kernel's refusal itself is what counts."""
    from entrypoints import cli, launch

    def refuses(number: int):
        def refused(*_) -> None:
            raise OSError(number, os.strerror(number), "/data/run/.report.html.tmp")

        return refused

    for number, expected in (
        (errno.EROFS, "/data/run/.report.html.tmp cannot be written: Read-only file system: mount it writable."),
        (errno.EACCES, "/data/run/.report.html.tmp cannot be written: Permission denied: give this user permission there."),
        (
            errno.ENOSPC,
            "The disk is full (/data/run/.report.html.tmp): free space there and run the same command again, nothing finished is lost.",
        ),
    ):
        monkeypatch.setattr(launch, "pull", refuses(number))
        code, result = cli._run(["pull", "file:///published", "here"])
        assert code == 78 == result["exit_code"]
        assert capfd.readouterr().err == f"eagle3-job: {expected}\n"


def test_a_run_of_another_job_is_not_continued(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"version": 1, "job": "hero", "settings": {}}))
    done = run("smoke", "--run-dir", str(tmp_path), "--json")
    assert done.returncode == 78 and "holds a run of the job 'hero'" in answer(done)["error"]["message"]


def test_preflight_names_every_problem_at_once_and_begins_no_run(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "Why?"}]}\n{"messages": \n')
    settings = [f"prompts.source={prompts}", "vocab.size=99999999", "push.uri=file:///proc/none/head"]
    done = run("preflight", "smoke", "--json", "--run-dir", str(tmp_path / "run"), *(part for s in settings for part in ("--set", s)))
    assert done.returncode == 78, done.stderr
    message = answer(done)["error"]["message"]
    assert "3 problems" in message
    for expected in (f"{prompts}, line 2", "vocab.size = 99999999", "/proc/none"):
        assert expected in message and sum(expected in line for line in done.stderr.splitlines() if line.startswith("  - ")) == 1
    assert answer(done)["run_dir"] == str(tmp_path / "run") and list(tmp_path.iterdir()) == [prompts], (
        "measured on the run's disk, and nothing is left there"
    )


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (
            {"status": "failed", "exit_code": 78, "error": {"message": "The disk is full", "where": "/data", "remedy": "free space"}},
            "Failed with exit code 78: The disk is full (/data): free space.",
        ),
        ({"status": "done", "exit_code": 0, "published": "s3://bucket/head"}, "Done, published at s3://bucket/head."),
        ({"status": "no_go", "exit_code": 0, "gate": {"verdict": "no_go", "why": "eagle is good enough"}}, "No go: eagle is good enough."),
        ({"status": "running"}, "Under way, last written "),
    ],
)
def test_status_says_in_a_sentence_how_the_run_ended_or_that_nobody_is_at_it(ended, told, tmp_path):
    from jobs.job_file import load
    from jobs.run import RunDirectory

    run_directory = RunDirectory(tmp_path)
    run_directory.begin(load("smoke", environment={}))
    run_directory.ledger |= ended
    run_directory.save()
    run_directory.close()
    assert run("status", str(tmp_path)).stdout.splitlines()[-1].startswith(told)
    if ended["status"] == "running":
        os.utime(tmp_path / "run.json", (time.time() - 600,) * 2)
        last = run("status", str(tmp_path)).stdout.splitlines()[-1]
        assert last == "Nothing was written for 10.0 min, so no process seems to be at it: the same command again continues it."


def test_status_and_report_of_a_folder_without_a_run(tmp_path):
    for command in ("status", "report"):
        done = run(command, str(tmp_path), "--json")
        assert done.returncode == 78, (command, done.stderr)
        assert "no run here" in answer(done)["error"]["message"]


def test_sigterm_before_any_work_is_75(tmp_path):
    process = subprocess.Popen(
        [*JOB, "smoke", "--run-dir", str(tmp_path / "run"), "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    events = Path(tmp_path / "run" / "events.jsonl")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (events.exists() and "run started" in events.read_text()):
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGHUP)  # a lost connection ends nothing
    time.sleep(0.5)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert json.loads(output)["status"] == "interrupted"


@pytest.mark.parametrize("module", ["click", "entrypoints.launch", "jobs.pipeline"])
def test_sigterm_while_everything_is_still_imported_is_75(tmp_path, module):
    """From the first line of ours on, which a machine that is taken at once gets to; the modules are the first and the last imported."""
    code = f"""
import os, signal, sys
from entrypoints.cli import main
class Signalled:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, Signalled())
main(["smoke", "--run-dir", {str(tmp_path / "run")!r}, "--json"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 75, done.stderr
    assert answer(done)["status"] == "interrupted" and "preflight: started" not in done.stderr


PAST = ("--set", "rental.deadline=2020-01-01T00:00:00Z")


@pytest.fixture
def saved(tmp_path):
    """A run that was begun and saved, as a machine that is lost leaves it; its deadline is past."""
    from jobs.job_file import load
    from jobs.run import RunDirectory
    from jobs.storage.saved_run import RunSaver

    settings = load("smoke", overrides=[f"push.uri=file://{tmp_path}/heads/one", PAST[1]], environment={})
    run = RunDirectory(tmp_path / "lost")
    run.begin(settings)
    (run.path / "prompts.jsonl").write_text("{}\n")
    RunSaver(run.path, f"file://{tmp_path}/heads/one.run", settings.push, run_id=run.ledger["run_id"]).save()
    run.close()
    return f"file://{tmp_path}/heads/one"


def test_a_saved_run_is_pulled_and_its_head_is_not_there_yet(saved, tmp_path):
    done = run("pull", saved, str(tmp_path / "back"), "--json")
    assert done.returncode == 0, done.stderr
    assert set(answer(done)["files"]) >= {"run.json", "prompts.jsonl"} and (tmp_path / "back" / "prompts.jsonl").read_text() == "{}\n"
    whole = answer(run("push", str(tmp_path / "back"), "--whole", f"file://{tmp_path}/elsewhere", "--json"))
    assert whole["exit_code"] == 0 and whole["files"] >= 2 and (tmp_path / "elsewhere" / "state.json").exists()
    told = answer(run("status", str(tmp_path / "back"), "--json"))
    assert told["status"] == "running" and told["forecast"]["seconds_left"]["high"] > 0


def test_resuming_from_nothing_is_78_unless_the_run_is_to_be_saved_there(tmp_path):
    nothing = f"file://{tmp_path}/nothing"
    done = run("smoke", "--run-dir", str(tmp_path / "run"), "--resume-from", nothing, "--json")
    assert done.returncode == 78 and "No run is saved there" in answer(done)["error"]["message"]
    assert not (tmp_path / "run" / "run.json").exists()
    # One command for the first machine and the later ones: the run begins, and ends at once for its deadline.
    begun = run("smoke", "--run-dir", str(tmp_path / "run"), "--resume-from", nothing, "--json", "--set", f"push.uri={nothing}", *PAST)
    assert begun.returncode == 78 and "deadline" in answer(begun)["error"]["message"] and "this one begins" in begun.stderr


def test_a_resumed_run_is_the_same_run(saved, tmp_path):
    done = run("smoke", "--run-dir", str(tmp_path / "new"), "--resume-from", saved, "--json")
    assert done.returncode == 78 and "deadline" in answer(done)["error"]["message"], done.stderr
    ledgers = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("lost", "new")]
    assert ledgers[0]["run_id"] == ledgers[1]["run_id"] and ledgers[1]["settings"]["push"]["uri"] == saved
    assert ledgers[1]["status"] == "failed" and ledgers[1]["exit_code"] == 78, "a deadline that is past ends it before anything runs"
