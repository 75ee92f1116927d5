"""A run that is killed at any stage continues with the same command: nothing lost, nothing repeated, nothing half."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file
from small_smoke import finish, kill, lines, run, start, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory):
    """One run, stopped four times: SIGKILL while generating, SIGTERM while generating, SIGKILL and SIGTERM while training."""
    folder = tmp_path_factory.mktemp("killed") / "run"
    train = folder / "states" / "train" / "responses.jsonl"
    story = {}

    process = start(folder)
    wait_for(lambda: lines(train) >= 3, process)
    kill(process)
    process.wait()
    story["after_kill"] = [json.loads(line)["id"] for line in train.read_text().splitlines(keepends=True) if line.endswith("\n")]

    process = start(folder)
    wait_for(lambda: lines(train) >= len(story["after_kill"]) + 3, process)
    kill(process, signal.SIGTERM)
    story["terminated"] = finish(process)

    process = start(folder)
    wait_for(lambda: any((folder / "checkpoints").glob("step-*")), process)
    kill(process)
    process.wait()

    starts = (folder / "events.jsonl").read_text().count("run started")
    process = start(folder)
    wait_for(
        lambda: (
            '"stage":"train"' in (folder / "events.jsonl").read_text().split("run started", starts + 1)[-1]
            and (folder / "events.jsonl").read_text().count("run started") > starts
        ),
        process,
    )
    kill(process, signal.SIGTERM)
    story["terminated_in_training"] = finish(process)
    story["final"] = run(folder)
    return folder, story


def test_it_ends_done(killed_run):
    folder, story = killed_run
    final = story["final"]
    assert final["status"] == "done" and final["exit_code"] == 0
    assert {stage["state"] for stage in final["stages"].values()} == {"done"}
    assert json.loads((folder / "run.json").read_text())["status"] == "done"


def test_sigterm_is_75_and_says_so(killed_run):
    _, story = killed_run
    assert story["terminated"]["status"] == "interrupted" and story["terminated"]["exit_code"] == 75
    assert story["terminated"]["stages"]["generate.train"]["state"] == "pending"
    assert story["terminated_in_training"]["exit_code"] in (0, 75)


def test_no_answer_is_lost_or_repeated(killed_run):
    folder, story = killed_run
    ids = [json.loads(line)["id"] for line in (folder / "states" / "train" / "responses.jsonl").read_text().splitlines()]
    assert len(ids) == len(set(ids)), "an answer stands twice"
    assert ids[: len(story["after_kill"])] == story["after_kill"], "finished answers are kept as they were"
    wanted = {row["id"] for row in map(json.loads, (folder / "prompts.jsonl").read_text().splitlines()) if row["split"] == "train"}
    assert {identity.rpartition("#")[0] for identity in ids} == wanted


def test_the_result_equals_that_of_an_unbroken_run(killed_run, tmp_path):
    """The answers are the same ids. The states carry the rounding of the batch they were computed in, which a kill changes."""
    folder, _ = killed_run
    unbroken = tmp_path / "unbroken"
    assert run(unbroken)["status"] == "done"

    def answers(path):
        lines = (path / "states/train/responses.jsonl").read_text().splitlines()
        return {r["id"]: r["response_token_ids"] for r in map(json.loads, lines)}

    assert answers(folder) == answers(unbroken)
    ours, theirs = (load_file(path / "head" / "model.safetensors") for path in (folder, unbroken))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    assert (folder / "head" / "config.json").read_bytes() == (unbroken / "head" / "config.json").read_bytes()


def test_the_ledger_counts_every_load_of_the_verifier(killed_run):
    folder, story = killed_run
    # Two starts generated after the first was killed; the training ones needed no verifier.
    assert json.loads((folder / "run.json").read_text())["verifier_loads"] == 3
    assert story["final"]["verifier_loads"] == 0
