"""Conversations of `prompts.jsonl` and how far the verifier has answered them."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.errors import MustFix
from jobs.storage.responses import Response
from jobs.verifier.chat import Chat


@dataclass
class Conversation:
    """`turns[k]` are the messages said before answer k; `answers[k]` is that answer as a message."""

    id: str
    turns: list[list[dict[str, Any]]]
    thinking: bool
    source: str
    order: int = 0  # place in the seeded order
    answers: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0  # of the answered turns, prompt and response
    running_tokens: int = 0  # prompt of the turn that is being answered
    finished: bool = False  # no turn will be added

    def prompt(self) -> list[dict[str, Any]]:
        """Messages up to the next open turn, with the verifier's own answers between them."""
        messages: list[dict[str, Any]] = []
        for turn, said in enumerate(self.turns[: len(self.answers) + 1]):
            messages += said
            if turn < len(self.answers):
                messages.append(self.answers[turn])
        return messages

    def answered(self, response: Response, chat: Chat) -> None:
        self.answers.append(chat.assistant_message(response.response_token_ids, self.thinking))
        self.tokens += response.tokens
        self.finished = len(self.answers) == len(self.turns)


def read_conversations(path: Path, split: str, seed: int) -> list[Conversation]:
    """The conversations of a split in seeded order. Raises MustFix naming the line that is wrong."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise MustFix(f"The prompts cannot be read: {error.strerror}", where=str(path), remedy="run the stage `prompts` again") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if row["split"] != split:
                continue
            conversation = Conversation(row["id"], turns_of(row["messages"]), bool(row["thinking"]), row["source"])
        except (ValueError, KeyError, TypeError) as error:
            raise MustFix(
                f"The line is no prompt: {type(error).__name__} {error}",
                where=f"{path}, line {number}",
                remedy="run the stage `prompts` again",
            ) from error
        if conversation.turns:
            found.append(conversation)
    found.sort(key=lambda c: seeded(seed, c.id))
    for order, conversation in enumerate(found):
        conversation.order = order
    return found


def turns_of(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Messages grouped by the answer they ask for.

    Every user message is answered; tool results that follow each other belong to one answer; a
    system message belongs to what follows it, and at the end to nothing.
    """
    turns: list[list[dict[str, Any]]] = []
    said: list[dict[str, Any]] = []
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        said.append(message)
        more_results = message["role"] == "tool" and following is not None and following["role"] == "tool"
        if message["role"] != "system" and not more_results:
            turns.append(said)
            said = []
    return turns


def seeded(seed: int, identity: str) -> bytes:
    """32 bytes that order, draw or seed by identity alone, so that nothing depends on the order of arrival."""
    return hashlib.sha256(f"{seed}:{identity}".encode()).digest()
