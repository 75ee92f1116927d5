"""n-gram speculation over stored answers: what vLLM's own proposer would have drafted at every row.

Prompt lookup is free: no head, no memory, no training. On loopy text it accepts a lot, so a head
that does not clearly beat it is not worth its money (on the run to beat it was 9 to 26 % SLOWER than
none, because rejected tokens still wake experts: acceptance alone does not make it fast).

The drafts come from vLLM 0.16.0's own search (`vllm/v1/spec_decode/ngram_proposer.py`), called on the
stored ids; the default window is `SpeculativeConfig`'s own (5 to 5), read from it, not copied.

This module proposes only. Walking, counting and intervals are the same as for a head and live in
`jobs.draft.replay`; since verifier and draft never import each other, a stage joins the two:
`judge_chains("ngram", ((response, ngram_chains(...)) for response in responses), K)`.

A row where nothing matches is -1 throughout. Such a step drafts nothing and emits one token; it
COUNTS as a step in the mean acceptance length (tokens a forward pass of the verifier, the figure a
head is compared by), while vLLM's counters leave it out of `num_drafts`: `Counts.drafts` is theirs.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from jobs.errors import MustFix


@lru_cache(maxsize=1)
def default_window() -> tuple[int, int]:
    """(prompt_lookup_min, prompt_lookup_max) that vLLM takes when the user names none."""
    from vllm.config.speculative import SpeculativeConfig

    config = SpeculativeConfig(method="ngram", num_speculative_tokens=1)
    return config.prompt_lookup_min, config.prompt_lookup_max


def ngram_chains(
    token_ids: Sequence[int],
    first_row: int,
    draft_tokens: int,
    *,
    lookup_min: int | None = None,
    lookup_max: int | None = None,
    max_model_len: int | None = None,
) -> np.ndarray:
    """Proposals of every row from `first_row` on.

    Row r knows tokens 0..r+1, as a head's row does: after prefill the first token is sampled without
    drafts, then the proposer sees prompt and that token, which is row `len(prompt) - 1`.

    Args:
        token_ids: prompt and response, n ids.
        first_row: `len(prompt) - 1` for the live process.
        draft_tokens: K, drafts a step at most.
        lookup_min, lookup_max: shortest and longest suffix searched; vLLM's default where not given.
        max_model_len: the engine's; near it fewer tokens are proposed. None is no limit.

    Returns:
        int64 [n - 1 - first_row, K], target ids; -1 where fewer than K (or none) are proposed.

    Raises:
        MustFix: a window whose shortest suffix is longer than its longest.
    """
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens as find

    tokens = np.asarray(token_ids, dtype=np.int32)  # [n], the type of vLLM's input batch
    low, high = _window(lookup_min, lookup_max)
    limit = tokens.size + draft_tokens if max_model_len is None else max_model_len
    rows = max(tokens.size - 1 - first_row, 0)
    chains = np.full((rows, draft_tokens), -1, dtype=np.int64)  # [rows, K]
    for row in range(rows):
        known = tokens[: first_row + row + 2]  # [r + 2]
        if known.size >= limit:
            continue  # NgramProposer.propose skips a request at the limit
        proposed = find(origin_tokens=known, min_ngram=low, max_ngram=high, max_model_len=limit, k=draft_tokens)
        chains[row, : proposed.size] = proposed
    return chains


def _window(lookup_min: int | None, lookup_max: int | None) -> tuple[int, int]:
    """The window as SpeculativeConfig completes it: one bound alone stands for both."""
    if lookup_min is None and lookup_max is None:
        return default_window()
    low = lookup_max if lookup_min is None else lookup_min
    high = lookup_min if lookup_max is None else lookup_max
    if not 1 <= low <= high:
        raise MustFix(
            f"An n-gram window of {low} to {high} tokens is empty", where="heads.ngram_window", remedy="take 1 <= lookup_min <= lookup_max"
        )
    return low, high
