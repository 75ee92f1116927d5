"""entrypoints/local where it cannot make an environment: one sentence and 78 or 75, and nothing half-made that counts.

Making a whole one takes gigabytes: CI does it by running these tests through `./entrypoints/local test`.
"""

import fcntl
import mmap
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


def pretended(machine: Path) -> None:
    """A Python whose environments are made in a moment, and hold an `eagle3-job` that waits as long as it is told."""
    base = complete(machine)
    (machine / "python3").unlink()
    (machine / "python3").write_text(
        f"""#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
  for folder; do :; done
  mkdir -p "$folder/bin"
  printf '#!/bin/sh\n[ -z "$WAITS" ] || exec sleep "$WAITS"\n' >"$folder/bin/eagle3-job"
  for name in python pip uv; do printf '#!/bin/sh\n' >"$folder/bin/$name"; done
  chmod +x "$folder"/bin/*
elif [ "$2" = "import sys; print(sys.executable)" ]; then
  echo "$0"
else
  exec {base} "$@"
fi
"""
    )
    (machine / "python3").chmod(0o755)
    (machine / "chmod").symlink_to(shutil.which("chmod"))


def left(machine: Path, name: str, days: float | None) -> Path:
    """An environment that was used last so many days ago; None: made before it was noted."""
    folder = machine.parent / "home" / f"env-cpu-{name}"
    folder.mkdir(parents=True)
    (folder / "content").write_bytes(bytes(1 << 20))
    (folder / ".clone").write_text(f"{CLONE}\n")
    (folder / ".complete").touch()
    if days is not None:
        (folder / ".used").touch()
        os.utime(folder / ".used", (time.time() - days * 86400,) * 2)
    return folder


def test_an_environment_nobody_used_for_two_weeks_goes_when_a_new_one_is_made(machine):
    pretended(machine)
    unused, recent, unnoted = left(machine, "unused", 15), left(machine, "recent", 13), left(machine, "unnoted", None)
    held, loaded = left(machine, "held", 15), left(machine, "loaded", 15)
    gone = left(machine, "gone", 0)
    (gone / ".clone").write_text("/no/such/clone\n")
    with open(held / ".used") as lock, open(loaded / "content", "r+b") as file, mmap.mmap(file.fileno(), 0):
        fcntl.flock(lock, fcntl.LOCK_SH)
        made = local(machine, "smoke", EAGLE3_KIND="cpu")
        assert made.returncode == 0, made.stderr
        assert f"removed {unused}, which nobody used for 14 days: 0.0 GB" in made.stderr and made.stderr.count("removed") == 1
        assert not unused.exists() and not gone.exists()
        assert all((folder / ".complete").exists() for folder in (recent, unnoted, held, loaded))
        assert time.time() - (unnoted / ".used").stat().st_mtime < 60, "its days begin now"
        again = local(machine, "smoke", EAGLE3_KIND="cpu")
        assert again.returncode == 0 and again.stderr == "", "nothing is made, so nothing is looked at"


def test_an_environment_is_held_as_long_as_what_it_became(machine):
    pretended(machine)
    running = subprocess.Popen([LOCAL, "smoke"], env=settings(machine, EAGLE3_KIND="cpu", WAITS="60"), stderr=subprocess.PIPE, text=True)
    try:
        while "done in" not in running.stderr.readline():
            assert running.poll() is None
        time.sleep(1)
        (environment,) = environments(machine)
        with open(environment / ".used") as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            running.kill()
            running.wait()
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        running.kill()
        running.wait()


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
