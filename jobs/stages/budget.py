"""A token budget that takes a prefix of the conversations, whatever the order in which they are answered.

Decision: the sum of tokens along the seeded order only rises, so what is known of the prefix at any moment is a few
places in that order, and a conversation belongs by where it stands. What changes in one conversation moves the places
from where they were; summing anew for every answer that waits would take the driver hours at the end of a large budget.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from operator import itemgetter

from jobs.stages.conversations import Conversation
from jobs.storage.responses import Response


class Reach:
    """`place`: how many of `values`, from the front, have a sum of `limit` or more; all of them if they never have.

    values: tokens, not negative, and changed by `put` alone. limit: tokens, at least 1.
    """

    def __init__(self, values: list[int], limit: float):
        self._values, self._limit = values, limit
        self.place, self._sum = 0, 0
        self._move()

    def put(self, index: int, value: int) -> None:
        """`value` is what stands at `index` from now on."""
        if index < self.place:
            self._sum += value - self._values[index]
        self._values[index] = value
        self._move()

    def _move(self) -> None:
        while self.place < len(self._values) and self._sum < self._limit:
            self._sum += self._values[self.place]
            self.place += 1
        while self.place and self._sum - self._values[self.place - 1] >= self._limit:
            self.place -= 1
            self._sum -= self._values[self.place]


class Budget:
    """Which conversations lie in the prefix whose tokens reach `limit`; None is all of them.

    A conversation belongs if those before it have fewer than `limit` tokens together. The first `certain` of them do
    belong and those from `possible` on do not, whatever is still to be answered; `likely` is where the prefix ends if
    open turns turn out as expected. certain <= likely <= possible, and all three are the same once nothing is open.

    conversations: in seeded order. longest: tokens of a turn at most, prompt and answer. longest_answer: tokens of an
    answer at most. expected: tokens of a conversation's open turns, prompts included, 0 where nothing is known.
    """

    def __init__(
        self, conversations: list[Conversation], limit: int | None, longest: int, longest_answer: int,
        expected: Callable[[Conversation], float] = lambda _: 0,
    ):  # fmt: skip
        self.limit, self._longest, self._longest_answer, self._expected = limit, longest, longest_answer, expected
        bounds = [self._bounds(conversation) for conversation in conversations]
        self._reaches = [Reach([bound[column] for bound in bounds], math.inf if limit is None else limit) for column in range(3)]

    @property
    def certain(self) -> int:
        return self._reaches[2].place

    @property
    def likely(self) -> int:
        return self._reaches[1].place

    @property
    def possible(self) -> int:
        return self._reaches[0].place

    def changed(self, conversation: Conversation) -> None:
        """To be told of every answer, of every turn that is begun, and of a conversation's end."""
        for reach, bound in zip(self._reaches, self._bounds(conversation), strict=True):
            reach.put(conversation.order, bound)

    def _bounds(self, conversation: Conversation) -> tuple[int, int, int]:
        """Tokens it has at least, is expected to have, and has at most, in the end."""
        # The prompt of a running turn is no lower bound: with its states lost it is not counted, and what was found
        # to lie outside would belong after all, when its rows are gone.
        least, running = conversation.tokens, conversation.running_tokens
        if conversation.finished:
            return least, least, least
        most = least + self._longest * (len(conversation.turns) - len(conversation.answers))
        if running:
            most -= max(0, self._longest - running - self._longest_answer)
        return least, min(least + max(running, round(self._expected(conversation))), most), most


class Undecided:
    """Conversations that are being answered and answers that are finished, until it is certain whether they belong."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self._running: dict[int, Conversation] = {}  # by its place in the seeded order
        self._held: list[tuple[int, Response]] = []  # (place, answer), by place

    def begin(self, conversation: Conversation) -> None:
        self._running[conversation.order] = conversation

    def end(self, conversation: Conversation) -> None:
        self._running.pop(conversation.order, None)

    def hold(self, conversation: Conversation, response: Response) -> None:
        insort(self._held, (conversation.order, response), key=itemgetter(0))

    def decide(self) -> tuple[list[Response], list[str]]:
        """(answers that belong, ids of samples that do not, finished or not), each of them once."""
        first = bisect_left(self._held, self._budget.certain, key=itemgetter(0))
        last = bisect_left(self._held, self._budget.possible, lo=first, key=itemgetter(0))
        belong, outside = [held for _, held in self._held[:first]], [held.id for _, held in self._held[last:]]
        self._held = self._held[first:last]
        # What is outside stays outside, and so does what comes after it: only the last ones have to be looked at.
        while self._running and (last := max(self._running)) >= self._budget.possible:
            conversation = self._running.pop(last)
            outside.append(f"{conversation.id}#{len(conversation.answers)}")
        return belong, outside
