"""Dockerfile, Compose file and start scripts, as far as they can be judged without an engine.

The rest (building, running, stopping) is `./entrypoints/local test-image`.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from jobs.settings import PushSettings
from jobs.stages.preflight import VLLM
from jobs.storage.saved_run import RunSaver

CLONE = Path(__file__).parents[2]
BIN = Path(sysconfig.get_path("scripts"))


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command], cwd=CLONE, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )


def compose(*profiles: str, **environment: str) -> dict:
    chosen = [part for profile in profiles for part in ("--profile", profile)]
    result = run(BIN / "docker-compose", *chosen, "config", "--format", "json", **environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_hadolint_has_nothing_to_say():
    result = run(BIN / "hadolint", "--failure-threshold", "style", "Dockerfile")
    assert (result.returncode, result.stdout) == (0, "")


def test_docker_20_10_can_parse_the_dockerfile():
    text = (CLONE / "Dockerfile").read_text()
    assert "<<" not in text, "heredocs came with a later frontend"
    assert not re.search(r"^#\s*syntax\s*=", text, flags=re.MULTILINE), "a frontend of its own wants a registry"


def test_the_entrypoint_is_exec_form_under_tini_without_group_kill():
    text = (CLONE / "Dockerfile").read_text()
    entrypoints = re.findall(r"^ENTRYPOINT (.+)$", text, flags=re.MULTILINE)
    assert entrypoints
    for entrypoint in entrypoints:
        assert json.loads(entrypoint)[:2] == ["/usr/bin/tini", "--"]


def test_compose_is_valid_and_starts_nothing_by_itself():
    assert run(BIN / "docker-compose", "config", "-q").returncode == 0
    assert not compose().get("services")


@pytest.mark.parametrize("job", ["hero", "local-test"])
def test_gpu_jobs_reserve_what_they_need(job):
    service = compose(job)["services"][job]
    assert service["command"] == [job]
    device = service["deploy"]["resources"]["reservations"]["devices"][0]
    assert device["driver"] == "nvidia" and device["count"] == -1
    assert int(service["shm_size"]) >= 16 << 30
    assert service["ulimits"]["memlock"] == -1 and service["ulimits"]["stack"] >= 64 << 20
    assert service["build"]["target"] == "gpu"
    assert service["build"]["args"]["BASE_IMAGE"] == "vllm/vllm-openai:v0.16.0-cu130"


def test_every_job_keeps_its_data_on_the_one_volume_and_has_time_to_save():
    services = compose("hero", "local-test", "smoke")["services"]
    assert set(services) == {"hero", "local-test", "smoke"}
    for service in services.values():
        assert [(volume["source"], volume["target"]) for volume in service["volumes"]] == [("data", "/data")]
        assert service["stop_grace_period"] == "5m0s"
        assert service["restart"] == "no"
    folder = compose("smoke", EAGLE3_DATA="/mnt/nvme/eagle3")["services"]["smoke"]["volumes"][0]
    assert (folder["type"], folder["source"]) == ("bind", "/mnt/nvme/eagle3")


@pytest.mark.parametrize("job", ["hero", "local-test", "smoke"])
def test_a_job_gets_the_shells_secrets_and_what_the_file_beside_says(tmp_path, job):
    """The file wins, but only where it says something; what neither says is not there, for an empty key would be taken."""
    (tmp_path / "entrypoints").mkdir()
    for name in ("docker-compose.yml", "entrypoints/compose.env"):
        (tmp_path / name).write_bytes((CLONE / name).read_bytes())
    secrets = {"HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "EAGLE3_WEBHOOK"}
    shell = {"HF_TOKEN": "of the shell", "AWS_ACCESS_KEY_ID": "of the shell"}

    def environment():
        command = [BIN / "docker-compose", "--profile", job, "config", "--format", "json"]
        outside = {name: value for name, value in os.environ.items() if name not in secrets}
        shown = subprocess.run(command, cwd=tmp_path, env=outside | shell, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(shown.stdout)["services"][job].get("environment", {})

    assert environment() == shell
    (tmp_path / "eagle3-job.env").write_text("AWS_ACCESS_KEY_ID=of the file\nEAGLE3_PUSH__URI=s3://heads/one\n")
    assert environment() == shell | {"AWS_ACCESS_KEY_ID": "of the file", "EAGLE3_PUSH__URI": "s3://heads/one"}


def test_home_and_every_cache_lie_on_the_volume():
    """What is compiled or downloaded into a container's own layer is paid for again at its next start."""
    text = (CLONE / "Dockerfile").read_text()
    places = dict(re.findall(r"\b(HOME|\w+_HOME|\w+_CACHE_ROOT|\w+_CACHE_DIR)=(\S+)", text))
    assert places.keys() >= {"HOME", "XDG_CACHE_HOME", "HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
    assert {place.split("/")[1] for place in places.values()} == {"data"}
    assert set(re.findall(r"^VOLUME (.+)$", text, flags=re.MULTILINE)) == {"/data"}


def test_the_base_is_asked_for_the_vllm_that_preflight_asks_for():
    assert re.findall(r"lacking\.py --vllm (\S+)", (CLONE / "Dockerfile").read_text()) == [VLLM]


def test_the_build_context_holds_the_project_and_nothing_else():
    allowed = [line[1:] for line in (CLONE / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(allowed) == ["LICENSE", "README.md", "compat/**", "entrypoints/**", "jobs/**", "pyproject.toml"]


@pytest.mark.parametrize(
    "script",
    [
        "entrypoints/local",
        "entrypoints/container",
        "entrypoints/healthy",
        ".ci/run",
        "compat/pins/compile.sh",
        "tests/image/run_image_tests.sh",
    ],
)
def test_start_scripts_parse_and_may_be_executed(script):
    path = CLONE / script
    assert os.access(path, os.X_OK)
    shell = path.read_text().splitlines()[0].split("/")[-1].split()[-1]
    result = run(shell, "-n", path)
    assert (result.returncode, result.stderr) == (0, "")


def test_ci_calls_the_command_of_the_readme():
    assert "./entrypoints/local test" in (CLONE / ".ci" / "run").read_text()
    assert "./entrypoints/local test" in (CLONE / "README.md").read_text()


@pytest.mark.parametrize(
    ("tests", "image", "expected", "said"),
    [
        (0, 0, 0, None),
        (1, 0, 1, None),
        (0, 1, 1, "the image test failed with exit code 1"),
        (0, 75, 75, "the image test failed with exit code 75"),
        (0, 78, 0, "the image was not tested: this machine cannot run an engine"),
    ],
)
def test_ci_is_green_only_where_tests_and_image_are(tmp_path, tests, image, expected, said):
    """The script as it is, between a set of tests and an image test that end with these codes."""
    for folder in (".ci", "entrypoints"):
        (tmp_path / folder).mkdir()
    (tmp_path / ".ci/run").write_bytes((CLONE / ".ci/run").read_bytes())
    local = f'case "$1" in test) echo 5 passed; exit {tests} ;; test-image) touch built; exit {image} ;; esac'
    (tmp_path / "entrypoints/local").write_text(f"#!/bin/sh\n{local}\n")
    for script in (".ci/run", "entrypoints/local"):
        (tmp_path / script).chmod(0o755)
    done = run(tmp_path / ".ci/run")
    lines = done.stdout.splitlines()
    assert done.returncode == expected and (said in lines if said else len(lines) in (1, 2))
    assert (tmp_path / "built").exists() == (tests == 0)
    if expected == 0:
        assert lines[-1] == "5 passed", "pytest's closing line comes last"


def test_healthy_means_written_lately(tmp_path):
    (tmp_path / "home").mkdir()
    healthy = CLONE / "entrypoints" / "healthy"
    assert run(healthy, HOME=str(tmp_path / "home")).returncode == 1

    events = tmp_path / "runs" / "hero" / "events.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text("{}\n")
    result = run(healthy, HOME=str(tmp_path / "home"))
    assert result.returncode == 0 and str(events) in result.stdout

    os.utime(events, (time.time() - 3600, time.time() - 3600))
    assert run(healthy, HOME=str(tmp_path / "home")).returncode == 1
    assert run(healthy, HOME=str(tmp_path / "home"), EAGLE3_HEALTHY_MINUTES="90").returncode == 0

    (events.parent / "run.json").write_text(
        '{"run_id": "one", "job": "hero", "status": "running", "stages": {"generate.eval": {}, "generate.train": {}, "train": {}}}'
    )
    assert run(healthy, HOME=str(tmp_path / "home")).returncode == 1, "the ledger is written while the run hangs"
    RunSaver(events.parent, (tmp_path / "saved").as_uri(), PushSettings(), run_id="one").save()
    assert (events.parent / ".saved.json").exists() and len(list((tmp_path / "saved").rglob("*"))) > 4
    assert run(healthy, HOME=str(tmp_path / "home")).returncode == 1, "a backup goes on while the run hangs"
    (events.parent / "push-state.json").write_text("{}")
    assert run(healthy, HOME=str(tmp_path / "home")).returncode == 0


def test_the_container_makes_its_folders_and_passes_the_exit_code_on(tmp_path):
    job = tmp_path / "bin" / "eagle3-job"
    job.parent.mkdir()
    job.symlink_to(BIN / "eagle3-job")
    places = {"HOME": str(tmp_path / "data" / "home"), "XDG_CACHE_HOME": str(tmp_path / "data" / "cache")}
    result = run(CLONE / "entrypoints" / "container", "no-such-job", PATH=f"{job.parent}:{os.environ['PATH']}", **places)
    assert result.returncode == 2
    assert (tmp_path / "data" / "home").is_dir() and (tmp_path / "data" / "cache").is_dir()


def lacking(vllm: str, lock: Path, requirements: Path) -> subprocess.CompletedProcess:
    return run(sys.executable, CLONE / "compat" / "pins" / "lacking.py", "--vllm", vllm, lock, requirements)


def test_the_gpu_image_adds_exactly_what_its_base_lacks(tmp_path):
    digest = "0" * 64
    lock, requirements = tmp_path / "a.lock", tmp_path / "a.in"
    lock.write_text(
        f"numpy==1.0.0 \\\n    --hash=sha256:{digest}\n"
        f"not-a-package-here==3.1 \\\n    --hash=sha256:{digest} \\\n    --hash=sha256:{digest}\n"
        f"only-on-windows==1 ; sys_platform == 'win32' \\\n    --hash=sha256:{digest}\n"
        f"rich==999.0 \\\n    --hash=sha256:{digest}\n"
    )
    requirements.write_text("# comment\nnumpy\nrich>=999 # newer than any base\n")
    result = lacking("0.16.0", lock, requirements)
    assert result.returncode == 0, result.stderr
    assert re.findall(r"^\S+==\S+", result.stdout, flags=re.MULTILINE) == ["not-a-package-here==3.1", "rich==999.0"]
    assert result.stdout.count("--hash") == 3

    refused = lacking("0.17.1", lock, requirements)
    assert refused.returncode == 1
    assert "the base has vllm 0.16.0, this project is made for 0.17.1" in refused.stderr
