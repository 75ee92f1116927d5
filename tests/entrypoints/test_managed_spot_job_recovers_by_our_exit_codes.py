"""The SkyPilot task: recovers on 75 alone, and its command is one that this command line takes.

Its script is run as it is; `docker` is a script that runs the command line it is given in this environment, for there is
no GPU and no image here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jobs.errors import EXIT_MUST_FIX, EXIT_TRY_AGAIN
from jobs.job_file import load

TASK = yaml.safe_load((Path(__file__).parents[2] / "entrypoints" / "managed-spot.yaml").read_text())
DOCKER = """#!{python}
import os, sys
image = sys.argv.index("eagle3-job:gpu")
named = [sys.argv[place + 1] for place in range(image) if sys.argv[place] == "--env"]
inside = {{name: value for name, value in os.environ.items() if name in named or not name.startswith(("EAGLE3_", "AWS_", "HF_"))}}
os.execve(sys.executable, [sys.executable, "-m", "entrypoints.cli", *sys.argv[image + 1 :], "--dry-run", "--json"], inside)
"""


def test_only_a_passing_fault_is_paid_for_again():
    recovery = TASK["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [EXIT_TRY_AGAIN] and recovery["max_restarts_on_errors"] == 0
    assert EXIT_MUST_FIX not in recovery["recover_on_exit_codes"] and TASK["resources"]["use_spot"] is True


def test_secrets_have_no_value_and_settings_exist():
    assert set(TASK["secrets"].values()) == {None}
    named = {name: "s3://bucket/x" for name in TASK["envs"] if "__" in name}
    assert load("hero", environment=named).push.uri == "s3://bucket/x"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"PUSH__URI": "s3://bucket/head"}, 0),
        ({"PUSH__URI": "gs://bucket/head"}, 78),
        ({"PUSH__URI": "s3://bucket/head", "PUSH__PART_MIB": "1"}, 78),
        ({"PUSH__URI": "s3://bucket/head", "TRAIN__FP8": "perhaps"}, 78),
        ({"PUSH__URI": "s3://bucket/head", "TRAIN_FP8": "true"}, 78),
    ],
)
def test_the_script_runs_the_job_and_passes_its_exit_code_on(tmp_path, settings, expected):
    """With every setting that is among the variables, for another endpoint is one that nobody has foreseen, and with every slip."""
    docker = tmp_path / "docker"
    docker.write_text(DOCKER.format(python=sys.executable))
    docker.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        **{k: v or "" for k, v in TASK["envs"].items()},
    }
    done = subprocess.run(
        ["bash", "-c", TASK["run"]],
        env=environment | {f"EAGLE3_{name}": value for name, value in settings.items()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == expected, done.stderr
    assert (tmp_path / "eagle3-data").is_dir()
