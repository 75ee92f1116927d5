"""`doctor` says what is installed and, shim by shim, whether it is needed and in place."""

from importlib.metadata import version

import pytest
from probing import run_probe

from compat.registry import shims


@pytest.fixture(scope="module")
def report():
    return run_probe("doctor")


def test_versions_are_the_installed_ones(report):
    assert report["versions"]["vllm"] == "0.16.0"
    for name in ("speculators", "torch", "transformers"):
        assert report["versions"][name] == version(name)


def test_every_shim_has_its_row(report):
    assert [row["name"] for row in report["shims"]] == [shim.name for shim in shims()]
    for row in report["shims"]:
        assert row["why"] and row["upstream"] and row["patches"] and row["note"] is None
        assert row["applied"] == row["needed"]


def test_there_is_a_device(report):
    assert report["devices"]
