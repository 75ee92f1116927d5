"""Bytes that installing a lock downloads: the sum over packages of the wheel that an installer would choose.

Reads a `pylock.toml` (PEP 751), the one lock format that records file sizes; `compile.sh` makes it for this
purpose and throws it away, because it also records where each file was found. Needs the package `packaging`.
"""

import sys
import tomllib
from pathlib import Path

from packaging.markers import Marker, default_environment
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

PYTHON = (3, 11)
# Newest first, as installers rank them: glibc 2.36 (Debian 12) down to manylinux1.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
    "linux_x86_64",
]


def download_bytes(lock: Path) -> int:
    """Bytes of all wheels that x86-64 Linux with Python 3.11 takes from `lock`; a package without one is an error."""
    tags = [*cpython_tags(PYTHON, platforms=PLATFORMS), *compatible_tags(PYTHON, "cp311", PLATFORMS)]
    rank = {tag: place for place, tag in enumerate(tags)}
    environment = default_environment() | {
        "python_version": "3.11",
        "python_full_version": "3.11.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    total = 0
    for package in tomllib.loads(lock.read_text())["packages"]:
        if "marker" in package and not Marker(package["marker"]).evaluate(environment):
            continue
        candidates = []
        for wheel in package.get("wheels", ()):
            name = wheel.get("name") or wheel["url"].rsplit("/", 1)[1].replace("%2B", "+")
            places = [rank[tag] for tag in parse_wheel_filename(name)[3] if tag in rank]
            if places:
                candidates.append((min(places), wheel["size"]))
        if not candidates:
            raise SystemExit(f"{package['name']} {package['version']} has no wheel for this platform")
        total += min(candidates)[1]
    return total


if __name__ == "__main__":
    print(download_bytes(Path(sys.argv[1])))
