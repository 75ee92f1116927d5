"""Held-out conversations as ids, the way the verifier would have read and written them."""

import json
from functools import lru_cache

from jobs.verifier.chat import Chat
from jobs.verifier.tiny import CHECKPOINT, HELD_OUT


@lru_cache(maxsize=1)
def sequences() -> list[tuple[list[int], int]]:
    """(prompt and answer ids, length of the prompt) of the last turn of every shipped held-out conversation."""
    chat, found = Chat.load(CHECKPOINT), []
    for line in HELD_OUT.read_text().splitlines():
        *history, last = json.loads(line)["messages"]
        prompt = chat.render(history, "reasoning_content" in last)
        answer = last["content"] + "<|im_end|>"
        if "reasoning_content" in last:
            answer = last["reasoning_content"] + "</think>" + answer
        found.append((prompt + chat.tokenizer.encode(answer, add_special_tokens=False), len(prompt)))
    return found
