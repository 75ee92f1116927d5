"""This folder is on sys.path, so that tests of any folder can import s3_servers and its like; slow tests come last."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# Before torch is imported: threads of several processes that wait actively for each other make everything slower (NOTES.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items) -> None:
    """Fast tests first: what is wrong in general should show in the first minutes. Of the slow ones the whole smoke run first:
    with two processes, what takes longest must not be what starts last."""
    items.sort(key=lambda item: (item.get_closest_marker("slow") is not None, item.path.name != "test_smoke_keeps_its_promise.py"))
