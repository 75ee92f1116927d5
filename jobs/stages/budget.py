"""A token budget that takes a prefix of the conversations, whatever the order in which they are answered."""

from collections.abc import Callable

from jobs.stages.conversations import Conversation


class Budget:
    """Which conversations lie in the prefix whose tokens reach `limit`; None is all of them.

    A conversation belongs if those before it have fewer than `limit` tokens together. That is
    certain, either way, from bounds on the tokens of those that are still being answered.
    """

    def __init__(self, conversations: list[Conversation], limit: int | None, longest: int):
        self.conversations, self.limit, self.longest = conversations, limit, longest
        self._settled = [0]  # [k]: tokens of the first k conversations, as far as all of them are finished

    def may_belong(self, conversation: Conversation) -> bool:
        return self.limit is None or self._before(conversation, lambda c: c.tokens + c.running_tokens) < self.limit

    def surely_belongs(self, conversation: Conversation) -> bool:
        return self.limit is None or self._before(conversation, self._at_most) < self.limit

    def _at_most(self, conversation: Conversation) -> int:
        return conversation.tokens + (0 if conversation.finished else self.longest * (len(conversation.turns) - len(conversation.answers)))

    def _before(self, conversation: Conversation, bound: Callable[[Conversation], int]) -> int:
        """Tokens of all conversations before this one, `bound` standing for those not finished."""
        settled = self._settled
        while len(settled) <= len(self.conversations) and (c := self.conversations[len(settled) - 1]).finished:
            settled.append(settled[-1] + c.tokens)
        if conversation.order < len(settled):
            return settled[conversation.order]
        return settled[-1] + sum(bound(c) for c in self.conversations[len(settled) - 1 : conversation.order])
