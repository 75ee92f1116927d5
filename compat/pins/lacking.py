"""What a base image lacks of a lock: prints those requirements, hashes included, for `uv pip install --no-deps`.

A package the base already has is left alone, whatever its version: the vLLM image is one tested set, built for its own
CUDA release, and replacing a part of it is how such images break. The exception is a package that REQUIREMENTS asks for
with a version the base does not meet; then the lock's version replaces it. A base with another vLLM than the one this
project is made for ends the build. Standard library only, plus `packaging`, which vLLM itself needs.

    lacking.py --vllm VERSION LOCK REQUIREMENTS
"""

import argparse
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def entries(lock: Path) -> dict[str, str]:
    """The lock's requirements as name -> text with its hash lines."""
    found = re.findall(r"^[a-z0-9].*(?:\n\s+--hash=.*)*", lock.read_text(), flags=re.MULTILINE)
    return {canonicalize_name(re.match(r"[\w.-]+", text).group()): text for text in found}


def demanded(requirements: Path) -> dict[str, Requirement]:
    lines = (line.split("#")[0].strip() for line in requirements.read_text().splitlines())
    parsed = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def lacking(lock: Path, requirements: Path) -> list[str]:
    """Texts of `lock` whose package is absent here, or present in a version that `requirements` does not accept."""
    wanted = demanded(requirements)
    texts = []
    for name, text in entries(lock).items():
        marker = Requirement(text.split(" \\")[0]).marker
        if marker is not None and not marker.evaluate():
            continue
        try:
            present = version(name)
        except PackageNotFoundError:
            texts.append(text)
            continue
        if name in wanted and not wanted[name].specifier.contains(present, prereleases=True):
            print(f"{name} {present} of the base is replaced: {wanted[name]} is needed", file=sys.stderr)
            texts.append(text)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="the base must have this version")
    parser.add_argument("lock", type=Path)
    parser.add_argument("requirements", type=Path)
    options = parser.parse_args()
    try:
        found = version("vllm").split("+")[0]  # 0.16.0+cu130 is 0.16.0
    except PackageNotFoundError:
        found = "none"
    if found != options.vllm:
        raise SystemExit(f"the base has vllm {found}, this project is made for {options.vllm}: take another BASE_IMAGE")
    texts = lacking(options.lock, options.requirements)
    print(f"the base lacks {len(texts)} packages", file=sys.stderr)
    print("\n".join(texts))


if __name__ == "__main__":
    main()
