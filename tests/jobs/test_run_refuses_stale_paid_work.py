"""A finished run does nothing again; cheap stages that became stale run by themselves, paid ones refuse with 78."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_smoke import run

from jobs.job_file import load
from jobs.run import RunDirectory
from jobs.verifier.chat import Chat
from jobs.verifier.tiny import CHECKPOINT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stale") / "run"
    result = run(folder)
    assert result["status"] == "done", result["error"]
    assert result["verifier_loads"] == 1, "eval answers, train answers and their states on one engine start"
    return folder


def seconds(result: dict) -> dict:
    return {name: stage["seconds"] for name, stage in result["stages"].items() if name not in ("preflight", "fetch")}


def test_the_same_command_again_does_nothing(finished):
    before = seconds(json.loads((finished / "run.json").read_text()))
    result = run(finished)
    assert result["status"] == "done" and result["verifier_loads"] == 0
    assert seconds(result) == before


def test_a_cheap_stage_runs_again_by_itself_and_what_follows_it(finished):
    before = seconds(json.loads((finished / "run.json").read_text()))
    result = run(finished, "evaluate.bootstrap=200")
    assert result["status"] == "done"
    changed = {name for name, value in seconds(result).items() if value != before[name]}
    assert "evaluate" in changed and not changed & {"generate.eval", "generate.train", "train"}
    asked_too_much = run(finished, "evaluate.min_gain_over_best=9")
    assert asked_too_much["exit_code"] == 78 and asked_too_much["error"]["where"] == "evaluate.min_gain_over_best"
    assert (finished / "trained" / "model.safetensors").exists(), "nothing is lost by it"
    assert run(finished, "evaluate.min_gain_over_best=-9")["status"] == "done"


@pytest.mark.parametrize(
    ("override", "stage", "named"),
    [
        ("train.learning_rate=0.001", "train", "train.learning_rate was 0.004, is 0.001"),
        ("generate.max_new_tokens=25", "generate.eval", "generate.max_new_tokens was 24, is 25"),
        ("generate.train_token_budget=500", "generate.train", "generate.train_token_budget was None, is 500"),
    ],
)
def test_paid_work_refuses_and_says_what_changed(finished, override, stage, named):
    result = run(finished, override)
    assert result["exit_code"] == 78 and result["status"] == "failed"
    assert named in result["error"]["message"] and stage in result["error"]["message"]
    assert f"--redo {stage}" in result["error"]["remedy"]


def test_what_does_not_decide_the_result_throws_nothing_away(finished):
    before = seconds(json.loads((finished / "run.json").read_text()))
    result = run(
        finished, "train.checkpoint_every=7", "train.evaluate_every=9", "train.log_every=3", "train.processes=1", "train.bad_step_limit=5"
    )
    assert result["status"] == "done", result["error"]
    assert seconds(result)["train"] == before["train"]


def test_redo_pays_again_and_keeps_what_was_there(finished):
    assert run(finished)["status"] == "done", "nothing was lost by asking, and the refused settings did not stick"
    result = run(finished, "train.learning_rate=0.001", arguments=("--redo", "train"))
    assert result["status"] == "done", result["error"]
    kept = list((finished / "superseded").glob("train-*/trained/model.safetensors"))
    assert len(kept) == 1
    assert kept[0].read_bytes() != (finished / "trained" / "model.safetensors").read_bytes()


def without(head: Path, folder: Path) -> tuple[Path, int]:
    """The head as a published one may be: it lacks a special id, and its draft ids are in no order. (its folder, that id)"""
    shutil.copytree(head, folder)
    tensors = load_file(folder / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    lacks = next(i for i in Chat.load(CHECKPOINT).special_token_ids if i in ids)
    ids[ids == lacks] = int((~tensors["t2d"]).nonzero()[0])
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    tensors["lm_head.weight"], ids = tensors["lm_head.weight"][order].contiguous(), ids[order]
    tensors["d2t"], tensors["t2d"] = ids - torch.arange(len(ids)), torch.zeros_like(tensors["t2d"]).index_fill(0, ids, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, lacks


def test_a_no_go_of_the_gate_ends_well_and_a_forced_run_starts_from_the_existing_head(finished, tmp_path):
    folder = tmp_path / "run"
    head, lacks = without(finished / "head", tmp_path / "published")
    existing = (
        f'heads.candidates=[{{name="existing", model="{head}"}}]',
        "heads.warm_start=best",
        "train.processes=2",
        "train.accumulate=2",
    )
    result = run(folder, "gate.train_if_best_below=1.001", *existing)
    assert result["status"] == "no_go" and result["exit_code"] == 0 and result["published"] is None, result["error"]
    assert result["stages"]["generate.train"]["state"] == "skipped"
    ledger = json.loads((folder / "run.json").read_text())
    assert ledger["gate"]["verdict"] == "no_go" and "train_if_best_below" in ledger["gate"]["why"] and "are saved" in ledger["gate"]["why"]
    assert not (folder / "published" / "manifest.json").exists() and (folder / "report.html").exists()
    judged = json.loads((folder / "baseline.json").read_text())["heads"]
    assert set(judged) == {"untrained", "ngram", "existing"} and set(judged["existing"]["readings"]) == {"2-5-7", "3-6-8"}
    forced = run(folder, arguments=("--force",))
    assert forced["status"] == "done" and forced["published"], forced["error"]
    assert json.loads((folder / "run.json").read_text())["gate"]["forced"] is True
    pushed = subprocess.run([sys.executable, "-m", "entrypoints.cli", "push", str(folder), "--json"], capture_output=True, text=True)
    again = json.loads(pushed.stdout)
    assert again["status"] == "done" and again["stages"]["push"]["state"] == "done", "one stage goes by what was decided for the run"
    told = [json.loads(line).get("text", "") for line in (folder / "events.jsonl").read_text().splitlines()]
    warmed = next(text for text in told if "warm start from existing, taps read as" in text)
    assert f"special ids it could not draft: [{lacks}]" in warmed
    assert load_file(folder / "head" / "model.safetensors")["t2d"][lacks], "the trained head can"
    assert "over_existing" in json.loads((folder / "evaluation.json").read_text())["gains"]
    assert "warm start: existing" in (folder / "head" / "README.md").read_text()


def test_a_trial_decides_on_a_slice_that_is_reused(tmp_path):
    folder = tmp_path / "run"
    result = run(folder, "gate.min_gain=3.5", "gate.trial_fraction=0.25")
    assert result["status"] == "no_go", result["error"]
    gate = json.loads((folder / "run.json").read_text())["gate"]
    assert "a trial on 25% of the train split" in gate["why"] and gate["trial"]["mean"] < 3.5
    slice_ids = [json.loads(line)["id"] for line in (folder / "states/train/responses.jsonl").read_text().splitlines()]
    assert len({identity.rpartition("#")[0] for identity in slice_ids}) == 6, "a quarter of 24 prompts"
    forced = run(folder, arguments=("--force",))
    assert forced["status"] == "done", forced["error"]
    ids = [json.loads(line)["id"] for line in (folder / "states/train/responses.jsonl").read_text().splitlines()]
    assert ids[: len(slice_ids)] == slice_ids and len(ids) > len(slice_ids) and len(ids) == len(set(ids))


def test_an_edited_job_file_is_not_silently_overlooked(tmp_path):
    """A continued run keeps its settings; what the file says otherwise by now is told, with the way to have it."""
    job = tmp_path / "mine.toml"

    def begun(text: str, *overrides: str) -> list[str]:
        job.write_text(f'[job]\nname = "mine"\n{text}\n')
        path = tmp_path / "run"
        base = RunDirectory(path, read_only=True).ledger["settings"] if (path / "run.json").exists() else None
        run = RunDirectory(path)
        try:
            return run.begin(load(job, overrides=overrides, environment={}, base=base), load(job, environment={}))
        finally:
            run.close()

    first = "[train]\nepochs = 2.0\n[generate]\nthinking = { temperature = 1.0 }"
    second = "[train]\nepochs = 4.0\n[generate]\nthinking = { temperature = 0.5 }"
    assert begun(first) == begun(first) == []
    edited = [
        "the job file says generate.thinking.temperature = 0.5 now, this run was begun with 1.0 and goes on so: --set generate.thinking.temperature=0.5 changes it",
        "the job file says train.epochs = 4.0 now, this run was begun with 2.0 and goes on so: --set train.epochs=4.0 changes it",
    ]
    assert begun(second) == begun(second) == edited
    assert begun(second, "train.epochs=4.0") == begun(second) == edited[:1]
