"""What the verifier's engine is asked, and what it answers."""

import random
from dataclasses import dataclass
from typing import Any

from jobs.verifier.repetition import first_loop


@dataclass(frozen=True)
class Request:
    """One sequence: a prompt to answer, or with `response_token_ids` an existing answer to prefill."""

    id: str
    prompt_token_ids: list[int]
    max_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    response_token_ids: list[int] | None = None
    loop_window: int = 0  # the answer ends where its last so many tokens repeat a short piece; 0 lets it loop
    note: Any = None  # carried through to Finished untouched


@dataclass(frozen=True)
class Finished:
    """An answer with its states durable (`dropped` is None), or the reason why it is dropped."""

    request: Request
    response_token_ids: list[int]  # the engine's own ids, the stop id kept
    finish_reason: str  # "stop" | "length" | "repetition"
    dropped: str | None = None

    @classmethod
    def of(cls, request: Request, tokens: list[int], reason: str) -> "Finished":
        """An answer as it counts: cut where a loop is complete, however far it was decoded before that was noticed."""
        end = first_loop(tokens, request.loop_window) if request.loop_window else None
        return cls(request, tokens, reason) if end is None else cls(request, tokens[:end], "repetition")

    @property
    def tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.response_token_ids)

    def checks(self, one_in: int) -> list[tuple[int, int]]:
        """(position, next token) of about one response row in `one_in`, drawn by the sample's id; none for 0."""
        if not one_in:
            return []
        rng, first = random.Random(self.request.id), len(self.request.prompt_token_ids) - 1
        rows = len(self.response_token_ids)
        wanted = int(rows / one_in + rng.random())
        return [(first + place, self.response_token_ids[place]) for place in sorted(rng.sample(range(rows), min(wanted, rows)))]
