"""A deadline, then a machine lost in the middle of training: an empty disk and the bucket continue the run, the rental ends;
and its training once more, over two machines at once.

One real run against a real S3 server, with a real webhook and a real command at its end.
"""

import datetime
import json
import shutil
import subprocess
import sys

import pytest
import torch
from s3_servers import moto_server
from safetensors.torch import load_file
from small_smoke import finish, kill, start, wait_for
from webhook_server import webhook

from jobs.ports import free_port

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost")
    with moto_server() as server, webhook() as hook:
        server.make_bucket("heads")
        environment = server.environment | {"EAGLE3_WEBHOOK": hook.url}
        uri = "s3://heads/kimi"
        settings = (
            f"push.uri={uri}", f"push.endpoint_url={server.endpoint_url}", "push.path_style=true", "push.part_mib=5", "push.backup_minutes=0.01",
            f"rental.on_finish=echo $EAGLE3_STATUS $EAGLE3_EXIT_CODE $EAGLE3_PUBLISHED >> {folder}/ended", "rental.hold_minutes=0.1", "train.epochs=6", "train.accumulate=2",
        )  # fmt: skip
        client = server.client()

        def saved() -> dict:
            if "kimi.run/state.json" not in server.keys("heads"):
                return {"files": {}}
            return json.loads(client.get_object(Bucket="heads", Key="kimi.run/state.json")["Body"].read())

        near = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=20)).isoformat()
        ended = finish(
            start(
                folder / "first",
                *settings,
                f"rental.deadline={near}",
                "rental.reserve_minutes=0.05",
                environment=environment,
                arguments=("--resume-from", uri),
            )
        )
        process = start(
            folder / "first", *settings, "rental.deadline=2099-01-01T00:00:00Z", environment=environment, arguments=("--resume-from", uri)
        )
        wait_for(lambda: any(name.startswith("checkpoints/step-") for name in saved()["files"]), process)
        kill(process)
        process.wait()
        answers = (folder / "first/states/train/responses.jsonl").read_bytes()
        checkpoint = next(name.split("/")[1] for name in saved()["files"] if name.startswith("checkpoints/step-"))
        shutil.rmtree(folder / "first")
        assert hook.events() == ["interrupted"], "a killed process tells nobody"
        result = finish(start(folder / "second", *settings, environment=environment, arguments=("--resume-from", uri)))
        yield folder, result, hook.messages, answers, checkpoint, saved(), ended


def test_it_ends_done_without_the_verifier(story):
    _, result, *_ = story
    assert result["status"] == "done", result["error"]
    assert result["verifier_loads"] == 0, "what the first machine generated is not generated again"
    assert result["published"] == "s3://heads/kimi"


def test_training_goes_on_from_the_saved_checkpoint(story):
    folder, result, _, answers, checkpoint, _, _ = story
    assert (folder / "second/states/train/responses.jsonl").read_bytes() == answers
    assert result["stages"]["train"]["counts"]["resumed_from"] == int(checkpoint.partition("-")[2]) > 0


def test_the_saved_run_is_marked_as_done(story):
    *_, saved, _ = story
    assert saved["status"] == "done"
    assert not any(name.startswith(("published/", ".")) for name in saved["files"])


def test_the_deadline_before_that_ended_the_first_start_in_time(story):
    *_, ended = story
    assert ended["status"] == "interrupted" and ended["exit_code"] == 75 and "deadline" in ended["error"]["message"]


def test_the_webhook_and_the_command_know_how_it_ended(story):
    folder, _, messages, *_ = story
    assert [message["event"] for message in messages] == ["interrupted", "done"]
    assert messages[1]["published"] == "s3://heads/kimi" and "published to s3://heads/kimi" in messages[1]["text"]
    assert (folder / "ended").read_text() == "interrupted 75\ndone 0 s3://heads/kimi\n"


def test_two_machines_train_together_what_one_trained(story, tmp_path):
    """The first has lost its newest checkpoint and the head, the second has the states and never saw a checkpoint."""
    folder, result, *_ = story
    newest = sorted((folder / "second/checkpoints").glob("step-*"))[-1].name
    for name in ("first", "second"):
        shutil.copytree(
            folder / "second",
            tmp_path / name,
            ignore=shutil.ignore_patterns("trained", newest, *([] if name == "first" else ["checkpoints"])),
        )
        ledger = json.loads((tmp_path / name / "run.json").read_text())
        ledger["stages"]["train"]["state"] = "pending"
        (tmp_path / name / "run.json").write_text(json.dumps(ledger))
    untouched = (tmp_path / "second/run.json").read_bytes()
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    machines = [
        subprocess.Popen(
            [
                *torchrun,
                "--node-rank",
                str(rank),
                "-m",
                "entrypoints.cli",
                "stage",
                "train",
                "--run-dir",
                str(tmp_path / name),
                "--set",
                "push.backup=off",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(("first", "second"))
    ]
    errors = [machine.communicate(timeout=300)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], errors
    counts = json.loads((tmp_path / "first/run.json").read_text())["stages"]["train"]["counts"]
    assert counts["processes"] == 2 and counts["steps"] == result["stages"]["train"]["counts"]["steps"]
    assert 0 < counts["resumed_from"] < counts["steps"], "from the checkpoint that only the first machine has"
    one, two = (load_file(str(place / "trained/model.safetensors")) for place in (folder / "second", tmp_path / "first"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=2e-4, msg=name)
    assert (tmp_path / "second/run.json").read_bytes() == untouched and not (tmp_path / "second/checkpoints").exists()
