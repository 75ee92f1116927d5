"""Fetch from a hub over real HTTP: pinned to a commit, continued after a hang, offline afterwards."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hub_server import COMMIT, hub

from jobs.errors import MustFix
from jobs.stages.hub import require_commit

DOWNLOAD = """
    import io, json, sys
    from pathlib import Path
    from jobs.reporting.display import Display
    from jobs.context import Context
    from jobs.run import RunDirectory
    from jobs.job_file import load
    from jobs.stages import hub
    from jobs.errors import JobError
    settings = load("smoke")
    run = RunDirectory(Path(sys.argv[1])); run.begin(settings)
    context = Context(settings, run, Display.open("plain", stream=sys.stderr))
    try:
        commit = hub.resolve(sys.argv[2], json.loads(sys.argv[3]))
        print(json.dumps({"commit": commit, "path": str(hub.download(context, sys.argv[2], commit, stall_seconds=float(sys.argv[4])))}))
    except JobError as error:
        print(json.dumps({"error": str(error), "code": error.exit_code}))
"""


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 4}')
    (folder / "model.safetensors").write_bytes(os.urandom(1 << 20) * 32)
    (folder / "figures").mkdir()
    (folder / "figures" / "demo.png").write_bytes(b"never needed")
    return folder


def download(tmp_path, endpoint, name="someone/model", revision=None, stall=5.0, offline=False):
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DOWNLOAD), str(tmp_path / "run"), name, json.dumps(revision), str(stall)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_an_open_revision_becomes_a_commit_and_the_second_start_needs_no_network(tmp_path, repository):
    with hub({"someone/model": repository}) as server:
        result, _ = download(tmp_path, server.url)
        assert result["commit"] == COMMIT
        asked = len(server.downloads)
        again, _ = download(tmp_path, server.url, revision=COMMIT, offline=True)
        assert again == result and len(server.downloads) == asked
    assert (Path(result["path"]) / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    assert not (Path(result["path"]) / "figures").exists()


def test_a_download_that_hangs_is_killed_and_continued(tmp_path, repository):
    with hub({"someone/model": repository}) as server:
        server.hang_once.add("model.safetensors")
        result, errors = download(tmp_path, server.url, stall=2.0)
        assert "no byte for 2 s" in errors
        ranges = [wanted for name, wanted in server.downloads if name == "model.safetensors"]
    assert "error" not in result, result
    assert len(ranges) == 2 and ranges[1] and not ranges[1].startswith("bytes=0"), ranges
    assert (Path(result["path"]) / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()


def test_unknown_repository_revision_and_silent_hub(tmp_path, repository):
    with hub({"someone/model": repository}) as server:
        missing, _ = download(tmp_path, server.url, name="no/body")
        assert missing["code"] == 78 and "not on the hub" in missing["error"]
        other, _ = download(tmp_path, server.url, revision="f" * 40)
        assert other["code"] == 78 and "has no revision" in other["error"]
    silent, _ = download(tmp_path, "http://127.0.0.1:9")
    assert silent["code"] == 75 and "does not answer" in silent["error"]


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, 78, r"The hub refuses the token \(HTTP 401, asked for someone/model\) \(HF_TOKEN\): give a valid token"),
        (403, 78, r"This token may not read someone/model \(HTTP 403\) \(HF_TOKEN\): accept the licence on the hub"),
        (404, 78, r"correct the name"),
        (429, 75, r"does not answer"),
        (503, 75, r"does not answer"),
    ],
)
def test_what_the_hub_will_always_refuse_is_no_passing_fault(tmp_path, repository, status, code, said):
    with hub({"someone/model": repository}) as server:
        server.status = status
        result, _ = download(tmp_path, server.url)
    assert result["code"] == code and re.search(said, result["error"]), result


def test_a_token_that_may_not_read_the_files_is_told_before_the_attempts(tmp_path, repository):
    with hub({"someone/model": repository}) as server:
        server.gated.add("someone/model")
        result, errors = download(tmp_path, server.url)
        assert result["code"] == 78 and "accept its licence" in result["error"] and server.downloads == [] and "attempt" not in errors


def test_a_half_filled_folder_is_completed_not_taken_for_the_whole(tmp_path, repository):
    """Preflight leaves such a folder; the hub's client gives it for the whole one when the hub does not answer meanwhile."""
    with hub({"someone/model": repository}) as server:
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        described = [sys.executable, "-c", f"from jobs.stages import hub; print(hub.description('someone/model', {COMMIT!r})[0])"]
        folder = Path(subprocess.run(described, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout.strip())
        assert [path.name for path in folder.iterdir()] == ["config.json"] and (folder / "config.json").is_file()
        server.free, server.busy = 2, 1  # what `download` asks itself: the list of files, and whether the token may read them
        result, errors = download(tmp_path, server.url, revision=COMMIT)
    assert "attempt 1 of 5 ended without the whole repository" in errors
    assert Path(result["path"]) == folder and (folder / "model.safetensors").stat().st_size == 32 << 20


def test_a_branch_is_no_pin():
    with pytest.raises(MustFix, match="is no commit"):
        require_commit("someone/model", "main", "verifier.revision")
    assert require_commit("someone/model", None, "verifier.revision") is None
    assert require_commit("someone/model", "a" * 40, "verifier.revision") == "a" * 40


def test_only_owner_slash_name_is_a_hub_id(tmp_path, monkeypatch):
    from jobs.stages.hub import is_hub_id

    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("moonshotai/Kimi-K2.5")
    assert not is_hub_id("a/b") and not is_hub_id("tiny") and not is_hub_id("/abs/olute") and not is_hub_id("x/y/z")


FETCH = """
    import json, sys
    from pathlib import Path
    from jobs.errors import JobError
    from jobs.reporting.display import Display
    from jobs.context import Context
    from jobs.run import RunDirectory
    from jobs.job_file import load
    from jobs.stages import fetch
    settings = load("smoke", overrides=sys.argv[2:], environment={})
    run = RunDirectory(Path(sys.argv[1])); run.begin(settings)
    try:
        fetch.run(Context(settings, run, Display.open("plain", stream=sys.stderr)))
    except JobError as error:
        print(json.dumps({"error": str(error), "code": error.exit_code}))
"""


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (
            ("prompts.source=DATA", "prompts.messages_field=text", 'prompts.mix=[{source="DATA", samples=2, messages_field="inputs"}]'),
            "`inputs` is missing or empty",
        ),
        (
            ("prompts.source=DATA", "prompts.messages_field=text", 'prompts.standard=[{name="mine", source="OTHER"}]'),
            "no text of a question",
        ),
    ],
)
def test_a_wrong_column_of_a_data_set_is_found_before_the_verifier_is_downloaded(tmp_path, repository, prompts, said):
    for name, column in (("DATA", "text"), ("OTHER", "answer")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps({column: "What is a tap?"}) + "\n")
        prompts = tuple(item.replace(name, str(tmp_path / name)) for item in prompts)
    with hub({"someone/model": repository}) as server:
        environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-c", textwrap.dedent(FETCH), str(tmp_path / "run"), "verifier.model=someone/model", *prompts]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["code"] == 78 and said in result["error"] and "\n" not in result["error"], result
        assert server.downloads == []
