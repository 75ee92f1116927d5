"""Whether the prompts of existing answers are this verifier's: ids of another tokenizer are in range as well, and make rubbish of states.

A file of responses says nothing about who wrote it, but every prompt that is answered in a conversation was made by a
chat template: it begins as a conversation does, and ends with the ids that open the assistant's turn. Another
tokenizer has other ids for that, another verifier another way to open the turn (`<think>` or none). Of the beginning
only the first id is compared, since a template may go on with the day's date. A plain completion has none of the
template's marks: it is what this tokenizer makes of its own text, which another one's ids are not beyond a few words.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from jobs.errors import MustFix
from jobs.storage.responses import Response
from jobs.verifier.chat import Chat
from jobs.wording import counted

# Lines that are looked at, and the share of them that may be otherwise: a conversation that another program rendered.
LOOKED_AT, TOLERATED = 1000, 0.01
CONVERSATIONS = (
    [("user", "hi")], [("user", "2 + 2 =")], [("system", "Be brief."), ("user", "And then?\n")], [("user", "hi"), ("assistant", "yes"), ("user", "…")],
    [("user", "hi"), ("assistant", "yes"), ("tool", "a result")],
)  # fmt: skip


class OwnPrompts:
    """Tells prompts that this verifier could have been given, by their ids alone."""

    def __init__(self, chat: Chat):
        self._tokenizer = chat.tokenizer
        rendered = [found for thinking in (True, False) if (found := list(_rendered(chat, thinking)))]
        self._first = {ids[0] for conversations in rendered for ids in conversations}
        # The longest ending that all have in common, for either way to answer.
        self._endings = [os.path.commonprefix([ids[::-1] for ids in conversations])[::-1] for conversations in rendered]
        special = {*chat.tokenizer.all_special_ids, *chat.tokenizer.added_tokens_decoder}
        self._marks = special & {token for ending in self._endings for token in ending}

    def __contains__(self, prompt_token_ids: Sequence[int]) -> bool:
        ids = list(prompt_token_ids)
        if ids and ids[0] in self._first and any(ids[len(ids) - len(ending) :] == ending for ending in self._endings):
            return True
        return not self._marks & set(ids) and self._is_text(ids)

    def _is_text(self, ids: list[int]) -> bool:
        if ids and ids[0] == self._tokenizer.bos_token_id:
            ids = ids[1:]
        return self._tokenizer(self._tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids


def _rendered(chat: Chat, thinking: bool):
    for conversation in CONVERSATIONS:
        messages = [{"role": role, "content": text} | ({"tool_call_id": "t"} if role == "tool" else {}) for role, text in conversation]
        try:
            yield chat.render(messages, thinking)
        except MustFix:  # a template need not know every role
            continue


def refuse_other_prompts(responses: Sequence[Response], path: Path, chat: Chat) -> str | None:
    """Looks at the first lines of a file of responses. Raises MustFix where more than TOLERATED of them are not this verifier's.

    Returns what is to be said of fewer, None where there is nothing.
    """
    own, looked_at = OwnPrompts(chat), responses[:LOOKED_AT]
    other = [line for line, response in enumerate(looked_at, 1) if response.prompt_token_ids not in own]
    if not other:
        return None
    told = f"the prompt of {responses[other[0] - 1].id} (line {other[0]}) is neither one of this verifier's chat template nor text as its tokenizer has it"
    share = f"{len(other)} of the first {counted(len(looked_at), 'prompts')} in all"
    if len(other) > TOLERATED * len(looked_at):
        raise MustFix(
            f"The responses are of another verifier or tokenizer: {told}, {share}",
            where=str(path), remedy="use that verifier, or generate the responses again",
        )  # fmt: skip
    return f"{path}: {told}, {share}"
