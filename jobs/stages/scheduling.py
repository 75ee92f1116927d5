"""In which order conversations are begun: longest expected first, so that the batch stays full to the end.

Begun in any order, the last answers to end are the longest of those begun last, and eight GPUs decode one straggler.
How long an answer will be is not known, but the eval split is answered first, and its mean lengths by source and mode
(thinking or instant) are. A conversation's turns follow each other, so they count together.

Under a token budget the prefix in seeded order decides what is answered at all; there the order changes within
blocks of a few batches only. What is answered, and how, does not depend on any of this.
"""

from collections.abc import Iterable, Iterator
from statistics import fmean

from jobs.stages.conversations import Conversation
from jobs.storage.responses import Response

# Share of generate.max_new_tokens an answer is expected to take where nothing was answered yet.
GUESS = {True: 1.0, False: 0.25}
# Under a budget: batches of concurrent requests that are ordered together.
BATCHES = 4


class Expectation:
    """Expected tokens of open turns, from the lengths of earlier `responses` of the same verifier."""

    def __init__(self, responses: Iterable[Response], max_new_tokens: int):
        self._most = max_new_tokens
        lengths: dict[tuple[str | None, bool], list[tuple[int, int]]] = {}
        for response in responses:
            for key in ((response.source, response.thinking), (None, response.thinking)):
                lengths.setdefault(key, []).append((len(response.response_token_ids), response.tokens))
        self._means = {key: tuple(map(fmean, zip(*values, strict=True))) for key, values in lengths.items()}  # (answer, with its prompt)

    def tokens(self, conversation: Conversation) -> float:
        """Of the answers to all turns of a conversation that are still open."""
        answer, _ = self._mean(conversation) or (GUESS[conversation.thinking] * self._most, 0.0)
        return answer * (len(conversation.turns) - len(conversation.answers))

    def tokens_with_prompts(self, conversation: Conversation) -> float:
        """Of all its open turns, prompts and answers; 0 where nothing was answered yet, for a guess is no measure of a budget."""
        _, turn = self._mean(conversation) or (0.0, 0.0)
        return turn * (len(conversation.turns) - len(conversation.answers))

    def _mean(self, conversation: Conversation) -> tuple[float, float] | None:
        return self._means.get((conversation.source, conversation.thinking), self._means.get((None, conversation.thinking)))


def longest_first(conversations: list[Conversation], expectation: Expectation, block: int | None) -> Iterator[Conversation]:
    """All of them, the longest expected first within blocks of `block` (None: one block), else in their order."""
    size = block or max(len(conversations), 1)
    for first in range(0, len(conversations), size):
        yield from sorted(conversations[first : first + size], key=lambda c: (-expectation.tokens(c), c.order))
