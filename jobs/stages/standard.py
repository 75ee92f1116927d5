"""Standard prompts: the sets that public heads are compared on, answered and judged, never trained on.

They are answered with the eval split, under ids `std.<set>.<id>`, and judged apart from it: the figure
of the head stays that of the traffic it is for, the standard sets stand beside the public cards. Their
repositories, splits and columns are those that public benchmarks of draft heads load; a local file with
any of the columns below does as well.

**Never in training, by content.** A training conversation overlaps with a standard prompt if a user's turn
is the same text, or if both share 13 words in a row (the decontamination of GPT-3, arXiv 2005.14165,
appendix C), so that a question inside another template is found too. A prompt shorter than 13 words
overlaps where all of it stands in the turn, one of fewer than 4 words only where it is the turn. Short
follow-ups ("Rewrite it.") belong to no set and do not count. All that is trained on is looked at: every
source of a mix (`jobs.stages.prompts`) and answers that exist already (`jobs.stages.existing`).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jobs.settings import PromptSource, StandardPrompts

PREFIX = "std."
WORDS, FEWEST = 13, 4
# Columns that hold the question, the first that is there counts; a list holds the turns of one conversation.
FIELDS = ("messages", "turns", "prompt", "question", "problem", "text")
IDS = ("id", "question_id", "prompt_id", "task_id", "unique_id")
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class KnownSet:
    """Where a standard set lies on the hub, and what is said around its text."""

    repository: str
    split: str
    subset: str | None = None
    template: str = "{}"


KNOWN = {
    "mt-bench": KnownSet("HuggingFaceH4/mt_bench_prompts", "train"),
    "humaneval": KnownSet("openai/openai_humaneval", "test", template="Complete this Python function.\n\n```python\n{}```"),
    "gsm8k": KnownSet("openai/gsm8k", "test", "main"),
    "math500": KnownSet("HuggingFaceH4/MATH-500", "test"),
}


def source_of(wanted: StandardPrompts) -> PromptSource | None:
    """What `prompts.read` opens; None for an unknown name without a source."""
    known = KNOWN.get(wanted.name)
    if wanted.source is None and known is None:
        return None
    on_hub = known if wanted.source is None else None
    return PromptSource(
        source=wanted.source or known.repository, samples=wanted.samples or 1, revision=wanted.revision,
        subset=on_hub.subset if on_hub else None, dataset_split=on_hub.split if on_hub else "train",
    )  # fmt: skip


def row_of(wanted: StandardPrompts, number: int, raw: dict[str, Any]) -> dict[str, Any] | None:
    """A row of the set as a row of the prompts, or None where no known column holds text."""
    said = next((raw[field] for field in FIELDS if raw.get(field)), None)
    template = KNOWN[wanted.name].template if wanted.name in KNOWN else "{}"
    if isinstance(said, str):
        said = [said]
    if not isinstance(said, list) or not all(isinstance(turn, str | dict) for turn in said):
        return None
    messages = [{"role": "user", "content": template.format(turn)} if isinstance(turn, str) else turn for turn in said]
    identity = next((str(raw[field]) for field in IDS if raw.get(field) is not None), str(number))
    return {
        "id": f"{PREFIX}{wanted.name}.{re.sub(r'[^a-zA-Z0-9_.-]', '-', identity)}",
        "messages": messages,
        "source": wanted.name,
        "split": "eval",
    }


def set_of(sample_id: str) -> str | None:
    """The standard set of a prompt or sample id, None for the run's own prompts."""
    return sample_id.removeprefix(PREFIX).partition(".")[0] if sample_id.startswith(PREFIX) else None


class Overlap:
    """Finds the user's turns that overlap with one of these conversations (the user's turns of each)."""

    def __init__(self, conversations: Iterable[list[str]]):
        self._runs: set[tuple[str, ...]] = set()
        self._whole: set[tuple[str, ...]] = set()
        for turns in conversations:
            opening, *following = (tuple(_words(turn)) for turn in turns)
            for words in (opening, *(words for words in following if len(words) >= WORDS)):
                if len(words) >= FEWEST:
                    self._runs.update(_cut(words, min(WORDS, len(words))))
                elif words:
                    self._whole.add(words)
        self._lengths = sorted({len(run) for run in self._runs})

    def __contains__(self, text: str) -> bool:
        words = tuple(_words(text)) if self._runs or self._whole else ()
        return words in self._whole or any(run in self._runs for length in self._lengths for run in _cut(words, length))


def _words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def _cut(words: tuple[str, ...], length: int) -> Iterator[tuple[str, ...]]:
    return (words[i : i + length] for i in range(len(words) - length + 1))
