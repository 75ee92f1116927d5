"""The place where a loop is cut: earliest, the same for a slow definition, and never in text that only repeats a little."""

import random

from jobs.verifier.repetition import first_loop, loops_now


def slowly(tokens: list[int], window: int) -> int | None:
    for n in range(window, len(tokens) + 1):
        last = tokens[n - window : n]
        if any(last[p:] == last[:-p] for p in range(1, window // 8 + 1)):
            return n
    return None


def test_equals_the_definition():
    rng, found = random.Random(0), 0
    for _ in range(300):
        window = rng.choice([16, 24, 40])
        piece = [rng.randrange(4) for _ in range(rng.randint(1, window // 6))]
        tokens = (
            [rng.randrange(4) for _ in range(rng.randint(0, 60))]
            + piece * rng.randint(0, 12)
            + [rng.randrange(4) for _ in range(rng.randint(0, 9))]
        )
        want = slowly(tokens, window)
        assert first_loop(tokens, window) == want
        found += want is not None
        assert loops_now(tokens, window) == (slowly(tokens[-window:], window) is not None)
    assert 30 < found < 280


def test_more_of_the_answer_does_not_move_the_cut():
    tokens = list(range(100)) + [7, 8, 9] * 200
    cut = first_loop(tokens, 64)
    assert cut == 100 + 64 and all(first_loop(tokens[:n], 64) == cut for n in (cut, cut + 1, 500))
    assert first_loop(tokens[: cut - 1], 64) is None


def test_numbered_lists_and_tables_are_no_loops():
    rows = [token for i in range(200) for token in (5, 6, i, 7)]  # each row differs
    assert first_loop(rows, 64) is None and not loops_now(rows, 64)
