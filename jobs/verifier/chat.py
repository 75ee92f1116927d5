"""The verifier's tokenizer and chat template: prompts as ids, answers as messages.

Everything is in token ids. Kimi's tokenizer is Python code over tiktoken without an offset mapping,
so nothing here ever looks for a position in text; and an answer is never re-tokenized, since
encoding decoded text need not give the same ids.

The generation prompt itself ends in `<think>` (thinking) or `<think></think>` (instant), so an
answer does not begin with it: the thinking part is found from prompt and response ids together. The
template drops the thinking of earlier turns by itself, which is why a conversation is answered turn
by turn and each turn is a sequence of its own.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jobs.errors import MustFix

THINK, END_OF_THINKING = "<think>", "</think>"
# What the tokenizer and its template are made of; their hash ties responses to them.
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tiktoken.model", "chat_template.jinja", "special_tokens_map.json")


@dataclass(frozen=True)
class Chat:
    """Tokenizer and chat template of a checkpoint folder.

    stop_token_ids: ids that end an answer, from generation_config.json (the stop id is kept in the answer).
    special_token_ids: named special tokens and the ids every rendered prompt contains; a draft
        vocabulary must hold them. tokenizer_sha256: of the tokenizer's own files.
    """

    tokenizer: Any
    stop_token_ids: tuple[int, ...]
    special_token_ids: tuple[int, ...]
    tokenizer_sha256: str
    think_id: int | None
    end_of_thinking_id: int | None

    @classmethod
    def load(cls, model: Path) -> "Chat":
        """Raises MustFix for a folder whose tokenizer cannot be loaded or has no chat template."""
        return _load(Path(model).absolute())

    def render(self, messages: Sequence[dict[str, Any]], thinking: bool) -> list[int]:
        """Ids of the conversation and the generation prompt. MustFix if the template refuses the messages."""
        import jinja2

        try:
            ids = self.tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=True, thinking=thinking)
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            roles = [message.get("role") for message in messages]
            raise MustFix(
                f"The chat template refuses the messages ({error})", where=f"roles {roles}", remedy="correct or drop that conversation"
            ) from error
        return [int(i) for i in ids]

    def assistant_message(self, response_token_ids: Sequence[int], thinking: bool) -> dict[str, str]:
        """The verifier's own answer as a message of the next turn's prompt.

        The part up to `</think>` goes into `reasoning_content`, where the template wants it (and
        drops it once the turn is history); special tokens such as the stop id are left out.
        """
        ids = list(response_token_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()  # by id: a slow tokenizer does not call every special token special when it skips them
        reasoning: list[int] = []
        if thinking and self.end_of_thinking_id is not None:
            cut = ids.index(self.end_of_thinking_id) if self.end_of_thinking_id in ids else len(ids)
            reasoning, ids = ids[:cut], ids[cut + 1 :]
        message = {"role": "assistant", "content": self.tokenizer.decode(ids, skip_special_tokens=True)}
        if reasoning:
            message["reasoning_content"] = self.tokenizer.decode(reasoning, skip_special_tokens=True)
        return message

    def thinking_span(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> range | None:
        """Positions of prompt + response inside the answer's `<think>` … `</think>`, both ends excluded.

        An answer that was cut off while thinking thinks to its end. None without a thinking part.
        """
        if self.think_id is None:
            return None
        ids = [*prompt_ids, *response_ids]
        try:
            begin = len(ids) - 1 - ids[::-1].index(self.think_id)
        except ValueError:
            return None
        end = ids.index(self.end_of_thinking_id, begin) if self.end_of_thinking_id in ids[begin:] else len(ids)
        return range(begin + 1, end) if end > begin + 1 and end > len(prompt_ids) else None


@lru_cache(maxsize=4)
def _load(model: Path) -> Chat:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=True)
    except Exception as error:  # noqa: BLE001  remote code, and transformers' guesses in its absence, raise anything
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise MustFix(
            f"The tokenizer cannot be loaded: {reason}", where=str(model), remedy="name a checkpoint folder with its tokenizer"
        ) from error
    if not tokenizer.chat_template:
        raise MustFix("The tokenizer has no chat template", where=str(model), remedy="add chat_template.jinja from the model's repository")
    think, end = (tokenizer.convert_tokens_to_ids(token) for token in (THINK, END_OF_THINKING))
    known = tokenizer.get_vocab()
    chat = Chat(
        tokenizer=tokenizer, stop_token_ids=_stop_ids(model, tokenizer), special_token_ids=(), tokenizer_sha256=_sha256(model),
        think_id=think if THINK in known else None, end_of_thinking_id=end if END_OF_THINKING in known else None,
    )  # fmt: skip
    return Chat(**(chat.__dict__ | {"special_token_ids": _special_ids(chat)}))


def _special_ids(chat: Chat) -> tuple[int, ...]:
    named = {index for index, token in chat.tokenizer.added_tokens_decoder.items() if "reserved" not in str(token)}
    named |= {index for index in (chat.think_id, chat.end_of_thinking_id) if index is not None} | set(chat.stop_token_ids)
    conversation = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}, {"role": "user", "content": ""}]
    for thinking in (True, False):
        named |= set(chat.render(conversation, thinking))
    return tuple(sorted(named))


def _stop_ids(model: Path, tokenizer: Any) -> tuple[int, ...]:
    path = model / "generation_config.json"
    try:
        ends = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
    except ValueError as error:
        raise MustFix(f"generation_config.json is no JSON ({error})", where=str(path), remedy="fetch the verifier again") from error
    ends = tokenizer.eos_token_id if ends is None else ends
    if ends is None:
        raise MustFix("Nothing says which token ends an answer", where=str(path), remedy="give eos_token_id in generation_config.json")
    return tuple(int(i) for i in (ends if isinstance(ends, list) else [ends]))


def _sha256(model: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted({model / name for name in TOKENIZER_FILES} | set(model.glob("tokenization_*.py"))):
        if path.exists():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
