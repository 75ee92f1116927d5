"""Slices given to speculators' generator: consecutive, complete, never over the limits."""

from hypothesis import given
from hypothesis import strategies as st

from compat.speculators_results import batches


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(1, 32), st.one_of(st.none(), st.integers(50, 200)))
def test_slices(lengths, most, tokens):
    parts = list(batches(lengths, most, tokens))
    assert [n for part in parts for n in lengths[part]] == lengths
    assert all(0 < part.stop - part.start <= most for part in parts)
    assert tokens is None or all(sum(lengths[part]) <= tokens for part in parts)
