"""speculators 0.3.0 beside the environment, for the tests of the shims it needs."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

LOCK = Path(__file__).parents[2] / "compat" / "pins" / "speculators-0.3.0.lock"


@pytest.fixture(scope="session")
def old_speculators() -> Path:
    """A folder with speculators 0.3.0, fetched once a machine; its hash is in compat/pins."""
    wanted = LOCK.read_text().split("sha256:")[1][:16]
    folder = Path(tempfile.gettempdir()) / f"eagle3-job-tests-{os.getuid()}" / f"speculators-0.3.0-{wanted}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=folder.parent))
    # The environment has no pip of its own: the base interpreter's venv brings one.
    subprocess.run([sys.executable, "-m", "venv", str(making / "pip")], check=True)
    install = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--target",
        str(making / "site"),
        "-r",
        str(LOCK),
    ]
    subprocess.run([str(making / "pip" / "bin" / "python"), *install], check=True)
    try:
        (making / "site").rename(folder)
    except OSError:  # another test process was faster
        assert folder.exists()
    shutil.rmtree(making, ignore_errors=True)
    return folder
