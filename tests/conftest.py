"""This folder is on sys.path, so that tests of any folder can import s3_servers and its like; slow tests come last."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def pytest_collection_modifyitems(items) -> None:
    """Fast tests first: what is wrong in general should show in the first minutes."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
