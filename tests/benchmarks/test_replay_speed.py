"""Replay: scored positions a second, and the same drafts when it is done again.

Its ratio to a live run on the same prompts is taken where the engine runs anyway:
tests/verifier/test_replay_equals_engine_counters.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from replay_speed import measure  # noqa: E402


def test_positions_a_second_and_twice_the_same():
    figures = measure("tiny", "cpu", rows=200, answers=4, heads=2)
    print(figures)
    assert figures["identical"]
    assert figures["positions_a_second"] > 500  # a loaded core; an idle one does tens of thousands
