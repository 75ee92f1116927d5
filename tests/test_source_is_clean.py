"""The source is laid out by `ruff format` and finds nothing in `ruff check`; both are set up in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[1]
SOURCE = ("jobs", "entrypoints", "compat", "tests")


@pytest.mark.parametrize("command", [("format", "--diff"), ("check",)], ids=lambda command: command[0])
def test_ruff_finds_nothing(command):
    done = subprocess.run([sys.executable, "-m", "ruff", *command, "--no-cache", *SOURCE], cwd=CLONE, capture_output=True, text=True)
    assert done.returncode == 0, (
        f"run `python -m ruff format` and `python -m ruff check --fix`:\n{done.stdout[-4000:]}{done.stderr[-1000:]}"
    )
