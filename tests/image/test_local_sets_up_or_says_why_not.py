"""entrypoints/local where it cannot make an environment: one sentence and 78 or 75, and nothing half-made that counts.

Making a whole one takes gigabytes: CI does it by running these tests through `./entrypoints/local test`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]
LOCAL = CLONE / "entrypoints" / "local"
NEEDED = [
    "bash",
    "sh",
    "env",
    "awk",
    "cat",
    "cut",
    "date",
    "df",
    "dirname",
    "du",
    "flock",
    "grep",
    "head",
    "id",
    "mkdir",
    "readlink",
    "rm",
    "sha256sum",
    "sleep",
    "tail",
    "touch",
    "uname",
    "xargs",
]


@pytest.fixture
def machine(tmp_path):
    """A PATH with the base system's commands alone, as on a bare machine; a test adds what it wants there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in NEEDED:
        (folder / name).symlink_to(shutil.which(name))
    return folder


def local(machine: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([LOCAL, *arguments], env=settings(machine, **environment), capture_output=True, text=True, timeout=60)


def settings(machine: Path, **environment: str) -> dict[str, str]:
    return {"PATH": str(machine), "HOME": str(machine.parent), "EAGLE3_HOME": str(machine.parent / "home")} | environment


def environments(machine: Path) -> list[Path]:
    return list((machine.parent / "home").glob("env-*"))


def one_sentence(result: subprocess.CompletedProcess) -> str:
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_a_machine_without_python_or_compiler_is_told_what_to_install(machine):
    result = local(machine, "smoke")
    assert result.returncode == 78
    sentence = one_sentence(result)
    for package in ("python3", "python3-dev", "python3-venv", "g++"):
        assert package in sentence
    assert "apt-get install" in sentence
    assert not environments(machine)


def test_another_python_than_3_11_or_3_12_is_refused(machine):
    # A real interpreter of another release where this machine has one; else the PATH has no Python at all.
    for release in ("python3.13", "python3.10", "python3.9"):
        asked = subprocess.run(["env", release, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True)
        if asked.returncode == 0:
            (machine / "python3").symlink_to(asked.stdout.strip())
            break
    result = local(machine, "smoke")
    assert result.returncode == 78
    assert "python3" in one_sentence(result)


def test_a_python_named_in_the_environment_that_is_not_there_is_named(machine):
    (machine / "g++").symlink_to(shutil.which("true"))
    result = local(machine, "smoke", EAGLE3_PYTHON="/no/such/python")
    assert result.returncode == 78
    assert "EAGLE3_PYTHON=/no/such/python" in one_sentence(result) or "libnuma1" in one_sentence(result)


def test_an_unknown_kind_is_refused(machine):
    result = local(machine, "smoke", EAGLE3_KIND="tpu")
    assert result.returncode == 78
    assert "EAGLE3_KIND is tpu" in one_sentence(result)


def test_a_folder_that_cannot_be_made_is_named(machine):
    (machine.parent / "file").write_text("")
    result = local(machine, "smoke", EAGLE3_HOME=str(machine.parent / "file" / "home"))
    assert result.returncode == 78
    assert "cannot be written: set EAGLE3_HOME" in one_sentence(result)


def complete(machine: Path) -> Path:
    """What a bare machine lacks, from this one: this Python (its environment's base) and a compiler."""
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    (machine / "python3").symlink_to(base)
    (machine / "g++").symlink_to(shutil.which("g++"))
    for name in ("ldconfig", "ls"):
        path = shutil.which(name, path=os.environ["PATH"] + ":/sbin:/usr/sbin")
        (machine / name).symlink_to(path)
    return base


def test_without_an_index_it_ends_with_75_and_the_size_said_before(machine):
    complete(machine)
    unreachable = "http://127.0.0.1:9/simple"  # nothing listens there
    result = local(machine, "smoke", EAGLE3_KIND="cpu", PIP_INDEX_URL=unreachable, PIP_RETRIES="0", PIP_CONFIG_FILE=os.devnull)
    assert result.returncode == 75, result.stderr
    assert "run the same command again" in one_sentence(result)
    first = result.stderr.splitlines()[0]
    assert "GB to download" in first and "GB on disk in" in first
    assert not [folder for folder in environments(machine) if (folder / ".complete").exists()]


def test_too_small_a_disk_is_refused_before_anything_is_fetched(machine, tmp_path):
    complete(machine)
    (machine / "df").unlink()
    (machine / "df").write_text("#!/bin/sh\necho header; echo 'disk 9999999 1 1024000 99% /'\n")
    (machine / "df").chmod(0o755)
    result = local(machine, "smoke", EAGLE3_KIND="cpu")
    assert result.returncode == 78
    assert "has 1.0 GB free and the environment needs 7." in one_sentence(result)


def test_two_at_once_wait_for_each_other_and_a_signal_ends_the_waiting_one(machine):
    complete(machine)
    home = machine.parent / "home"
    home.mkdir()
    holder = subprocess.Popen([shutil.which("flock"), home / "lock", "sleep", "30"])
    try:
        time.sleep(0.5)
        waiting = subprocess.Popen(
            [LOCAL, "smoke"], env=settings(machine, EAGLE3_KIND="cpu"), stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert "waiting for another set-up" in waiting.stderr.readline()
        os.killpg(waiting.pid, signal.SIGTERM)
        assert waiting.wait(timeout=10) == 75
    finally:
        holder.kill()
        holder.wait()
    assert not environments(machine)
