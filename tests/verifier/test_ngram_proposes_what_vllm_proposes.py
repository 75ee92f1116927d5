"""Proposals over stored ids are those of vLLM's own proposer, row by row, with vLLM's own defaults."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import MustFix
from jobs.verifier.ngram import default_window, ngram_chains

K = 3


def by_hand(known: list[int], low: int, high: int, k: int) -> list[int]:
    """The longest suffix of low..high tokens that occurred before; its earliest place; what followed there."""
    for n in range(min(high, len(known) - 1), low - 1, -1):
        for start in range(len(known) - n):
            if known[start : start + n] == known[-n:]:
                return known[start + n : start + n + k]
    return []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=24), st.integers(1, 3), st.integers(0, 3), st.data())
def test_it_is_the_earliest_place_of_the_longest_known_suffix(tokens, low, more, data):
    first = data.draw(st.integers(0, len(tokens) - 1))
    chains = ngram_chains(tokens, first, K, lookup_min=low, lookup_max=low + more)
    assert chains.shape == (len(tokens) - 1 - first, K)
    for row, chain in enumerate(chains.tolist(), start=first):
        expected = by_hand(tokens[: row + 2], low, low + more, K)
        assert chain == expected + [-1] * (K - len(expected))


@pytest.mark.parametrize(("window", "limit"), [(None, 200), ((1, 3), 64), ((2, 2), 61)])
def test_it_is_vllms_own_proposer(window, limit):
    """Every prefix of a sequence as one request of a batch, near the engine's longest sequence too."""
    from vllm.config.speculative import SpeculativeConfig
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    bounds = {} if window is None else {"prompt_lookup_min": window[0], "prompt_lookup_max": window[1]}
    config = SimpleNamespace(
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=K, **bounds),
        model_config=SimpleNamespace(max_model_len=limit),
        scheduler_config=SimpleNamespace(max_num_seqs=60),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    rng = np.random.default_rng(0)
    tokens = np.tile(rng.integers(0, 4, 9), 7)[:61]
    tokens[rng.integers(0, 61, 12)] = 5
    batch = np.zeros((60, max(limit, 61)), dtype=np.int32)
    batch[:, :61] = tokens
    lengths = np.arange(2, 62, dtype=np.int32)
    proposed = NgramProposer(config).propose([[1]] * 60, lengths, batch)
    names = {} if window is None else {"lookup_min": window[0], "lookup_max": window[1]}
    chains = ngram_chains(tokens.tolist(), 0, K, max_model_len=limit, **names)
    assert [[t for t in chain if t >= 0] for chain in chains.tolist()] == proposed
    assert any(proposed) and not all(proposed) and (limit > 61 or not proposed[-1])


def test_the_default_window_is_vllms():
    assert default_window() == (5, 5)
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5]
    assert ngram_chains(tokens, 9, K).tolist() == [[9, 1, 2]]
    assert ngram_chains(tokens, 8, K).tolist() == [[-1, -1, -1], [9, 1, 2]]


def test_one_bound_stands_for_both_and_an_empty_window_is_refused():
    tokens = [7, 8, 1, 7, 8]
    assert ngram_chains(tokens, 3, K, lookup_max=2).tolist() == ngram_chains(tokens, 3, K, lookup_min=2).tolist() == [[1, 7, 8]]
    with pytest.raises(MustFix, match="window of 3 to 2 tokens is empty"):
        ngram_chains(tokens, 3, K, lookup_min=3, lookup_max=2)
