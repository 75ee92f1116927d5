"""Responses that exist already, of this verifier or refused; those to train on without what overlaps with a standard prompt."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jobs.context import Context
from jobs.draft.statistics import prompt_of
from jobs.errors import MustFix
from jobs.stages import standard
from jobs.stages.conversations import seeded
from jobs.stages.own_prompts import refuse_other_prompts
from jobs.storage.responses import RESPONSES, Response, scan_responses
from jobs.storage.shards import STORE
from jobs.storage.states import StateLayout
from jobs.verifier.chat import Chat
from jobs.verifier.facts import VerifierFacts

PROBES = "first question", "its answer", "second question"


def existing_responses(
    context: Context, split: str, facts: VerifierFacts, chat: Chat, layout: StateLayout
) -> tuple[list[Response], dict[str, int]]:
    """The responses under `generate.responses`, in seeded order and within the token budget, and what was left out: reason -> conversations.

    Raises MustFix for a missing file, one of another verifier or tokenizer, or ids out of the vocabulary.
    """
    assert context.settings.generate.responses is not None
    folder = Path(context.settings.generate.responses) / split
    if not (folder / RESPONSES).is_file():
        raise MustFix(
            "There are no responses",
            where=str(folder / RESPONSES),
            remedy="name a folder with eval/responses.jsonl and train/responses.jsonl in generate.responses",
        )
    known = refuse_other_verifier(folder, layout)
    found = [response for _, _, response in scan_responses(folder / RESPONSES)]
    for response in found:
        largest = max([*response.prompt_token_ids, *response.response_token_ids], default=0)
        if largest >= facts.vocab_size:
            raise MustFix(
                f"The response {response.id} holds token {largest}, the verifier has {facts.vocab_size}: it is another verifier's",
                where=str(folder / RESPONSES), remedy="give responses of this verifier",
            )  # fmt: skip
    if not known and (remark := refuse_other_prompts(found, folder / RESPONSES, chat)):
        context.note(remark)
    left_out: dict[str, int] = {}
    if split == "train":
        said = UserTurns(chat)
        if forbidden := _standard_turns(context, folder.parent, said):
            kept = without_overlap(found, standard.Overlap(forbidden), said)
            left_out = {"in_standard_too": len(_conversations(found) - _conversations(kept))}
            found = kept
    seed, budget = context.settings.job.seed, context.settings.generate.train_token_budget
    found.sort(key=lambda response: seeded(seed, response.id))
    if split == "train" and budget is not None:
        total, kept = 0, []
        for response in found:
            if total >= budget:
                break
            kept.append(response)
            total += response.tokens
        found = kept
    return found, left_out


def without_overlap(responses: Sequence[Response], forbidden: standard.Overlap, said: "UserTurns") -> list[Response]:
    """The responses of conversations in which no user's turn overlaps: an earlier turn goes with the later one, as in `prompts`."""
    overlapping = _conversations(r for r in responses if any(turn in forbidden for turn in said.of(r.prompt_token_ids)))
    return [response for response in responses if prompt_of(response.id) not in overlapping]


def _standard_turns(context: Context, folder: Path, said: "UserTurns") -> list[list[str]]:
    """The user's turns of every standard prompt: those that `prompts` took, and those that were answered beside these responses."""
    prompts, answered = context.path / "prompts.jsonl", folder / "eval" / RESPONSES
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()] if prompts.exists() else []
    found = [[m["content"] for m in row["messages"] if m["role"] == "user"] for row in rows if standard.set_of(row["id"]) is not None]
    given = (response for _, _, response in scan_responses(answered)) if answered.is_file() else ()
    return found + [said.of(response.prompt_token_ids) for response in given if standard.set_of(response.id) is not None]


class UserTurns:
    """Finds in a rendered prompt what the user said: existing responses come without their messages.

    What the chat template puts before and after a user's turn is learnt from a conversation of known turns.
    """

    def __init__(self, chat: Chat):
        self._tokenizer = chat.tokenizer
        openings, closings = [], []
        for thinking in (True, False):
            ids = chat.render(
                [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), PROBES, strict=True)], thinking
            )
            text, parts = self._tokenizer.decode(ids), []
            for probe in PROBES:
                before, _, text = text.partition(probe)
                parts.append(before)
            openings += [parts[0], parts[2]]
            closings += [parts[1], text]
        opening, closing = os.path.commonprefix([part[::-1] for part in openings])[::-1], os.path.commonprefix(closings)
        self._turn = re.compile(f"{re.escape(opening)}(.*?){re.escape(closing)}", re.DOTALL) if opening and closing else None

    def of(self, prompt_token_ids: Sequence[int]) -> list[str]:
        """The user's turns; all of the prompt where the template marks none."""
        text = self._tokenizer.decode(list(prompt_token_ids))
        return (self._turn.findall(text) if self._turn else []) or [text]


def _conversations(responses: Iterable[Response]) -> set[str]:
    return {prompt_of(response.id) for response in responses}


def refuse_other_verifier(folder: Path, layout: StateLayout) -> bool:
    """Responses beside a `store.json` say whose they are; whether these do. Raises MustFix where they are another's."""
    if not (folder / STORE).exists():
        return False
    theirs = StateLayout.load(folder)
    for what in ("verifier_revision", "tokenizer_sha256"):
        if getattr(theirs, what) != getattr(layout, what):
            raise MustFix(
                f"The responses are of another {'verifier' if what == 'verifier_revision' else 'tokenizer'}: "
                f"{theirs.verifier} at {getattr(theirs, what)[:12]}, this one is {getattr(layout, what)[:12]}",
                where=str(folder / STORE), remedy="use that verifier, or generate the responses again",
            )  # fmt: skip
    return True
