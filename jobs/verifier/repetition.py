"""Answers that go round in circles: found by their ids alone, so that it does not matter when somebody looked."""

from collections.abc import Sequence

import numpy as np

# A loop repeats a piece of at most this share of the window: eight times or more.
PIECES = 8


def first_loop(tokens: Sequence[int], window: int) -> int | None:
    """The smallest n for which the last `window` of the first n tokens repeat one piece of at most window / 8; None for no loop.

    A function of the ids only: an answer cut there is the same whenever the loop was noticed, so a run that was
    killed and continued cuts at the same place.
    """
    ids, found = np.asarray(tokens), None
    if len(ids) < window:
        return None
    for period in range(1, window // PIECES + 1):
        equal = np.concatenate([[0], np.cumsum(ids[period:] == ids[:-period])])  # [n - period + 1]
        needed = window - period
        ends = np.flatnonzero(equal[needed:] - equal[:-needed] == needed)
        if len(ends):
            n = int(ends[0]) + needed + period
            found = n if found is None else min(found, n)
    return found


def loops_now(tokens: Sequence[int], window: int) -> bool:
    """Whether the answer so far ends in a loop: the cheap question asked of running answers."""
    if len(tokens) < window:
        return False
    tail = np.asarray(tokens[-window:])
    periods = np.flatnonzero(tail[-2 : -window // PIECES - 2 : -1] == tail[-1]) + 1
    return any(bool((tail[period:] == tail[:-period]).all()) for period in periods if period <= window // PIECES)
