"""A split's requests in their order, and what becomes of each answer: committed, held until the budget is certain, or dropped.

`Answering` asks the verifier turn by turn, `Existing` feeds it answers that are there already; `Work` is what both do.

What a run leaves depends on the seed and the prompt ids alone. Each sample is drawn with its own
seed. A token budget takes a prefix of the conversations in seeded order: a finished answer is
committed as soon as it is certain to belong to it, so only answers near the end of the budget wait.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from jobs.context import Context
from jobs.errors import JobError, MustFix
from jobs.stages import speculation
from jobs.stages.budget import Budget, Undecided
from jobs.stages.conversations import Conversation, read_conversations, seeded
from jobs.stages.existing import existing_responses, refuse_other_verifier
from jobs.stages.lost import Lost, by_reason, refuse_too_many
from jobs.stages.scheduling import BATCHES, Expectation, longest_first
from jobs.storage.responses import RESPONSES, Response, ResponseLog, scan_responses
from jobs.storage.states import StateLayout
from jobs.verifier.chat import Chat
from jobs.verifier.engine import Finished, Request
from jobs.verifier.facts import VerifierFacts

# Seconds between two looks of the display.
SHOW_EVERY = 0.5
CAPTURE_WAIT = 0.05  # share of the time from which it is said


@dataclass
class Work:
    """What answering and prefilling have in common: the loop, the commit, the counts."""

    context: Context
    split: str
    facts: VerifierFacts
    chat: Chat
    layout: StateLayout
    log: ResponseLog
    share: float = 1.0  # of the split, from the front of its order
    lost: list[Lost] = field(default_factory=list)
    expected: int = 0  # samples if none is dropped
    committed_tokens: int = 0  # of this call, for the rate
    waits: tuple[float, float] = (0.0, 0.0)  # seconds of it, see `VerifierEngine.waits`

    def run(self) -> dict[str, Any]:
        refuse_other_verifier(self.context.states(self.split), self.layout)
        requests = self.requests()
        first = next(requests, None)
        begun = time.monotonic()
        if first is not None:
            engine = self.engine = self.context.engine()
            begun = time.monotonic()
            engine.open_store(self.context.states(self.split), self.layout, self.context.settings.states)
            self.earlier = len(self.log)
            self.counted = speculation.Counted.begin(self.context, self.split, engine, self.earlier)
            try:
                engine.run(_chain(first, requests), self.on_finished, self._watched_stop())
            finally:
                if self.counted is not None:
                    self.counted.keep(len(self.log) - self.earlier)
                engine.close_store()
            self.waits = engine.waits
        return self.counts(time.monotonic() - begun)

    def requests(self) -> Iterator[Request]:
        raise NotImplementedError

    def on_finished(self, finished: Finished) -> Iterable[Request]:
        raise NotImplementedError

    def drop(self, lost: Lost) -> None:
        """Note samples that will not be there; more than the settings allow end the run."""
        self.lost.append(lost)
        self.context.run.event("sample dropped", split=self.split, reason=lost.reason, samples=lost.samples, detail=lost.detail)
        self.refuse_too_many(*self.used())

    def used(self) -> tuple[int, list[Lost]]:
        """(samples asked for, those lost) of what the run will use, as far as that is known."""
        return self.expected, self.lost

    def refuse_too_many(self, used: int, lost: list[Lost]) -> None:
        refuse_too_many(lost, used, self.context.settings.generate.max_dropped_share, self.split)

    def counts(self, seconds: float) -> dict[str, Any]:
        """For the ledger. Every turn asked for is a response or was dropped for a reason, or this is a bug."""
        responses = tokens = answered = 0
        ended = Counter[str]()
        for response in self.log:
            responses += 1
            tokens += response.tokens
            answered += len(response.response_token_ids)
            ended[response.finish_reason] += 1
        if responses == 0:
            raise MustFix(
                f"The {self.split} split has no response", where=str(self.log.path),
                remedy="give more prompts, or a larger verifier.max_model_len",
            )  # fmt: skip
        dropped = by_reason(self.lost)
        if self.share == 1.0 and self.expected != responses + dropped.total():
            raise JobError(
                f"{self.expected} turns of the {self.split} split were asked for, but {responses} are answered and {dropped.total()} dropped",
                where=str(self.log.path),
            )  # fmt: skip
        waited, disk = (wait / max(seconds, 1e-9) for wait in self.waits)
        if waited > CAPTURE_WAIT:
            why = (
                "the disk was behind: use a faster one, or states.dtype = fp8 for the train split"
                if disk > waited / 2
                else "the processor was: see what else runs on it"
            )
            self.context.note(
                f"generate.{self.split}: the verifier waited {waited:.0%} of the time for its states to be taken in, because {why}"
            )
        return {
            "asked": self.expected, "ended": dict(ended),
            "turns": responses, "tokens": tokens, "response_tokens": answered, "rows": tokens - responses,
            "dropped": dict(dropped), "tokens_per_second": round(self.committed_tokens / max(seconds, 1e-9), 1),
            "capture_wait": round(waited, 4), "disk_wait": round(disk, 4),
            **({"speculation": live} if (live := speculation.live(self.context, self.split)) else {}),
        }  # fmt: skip

    def _watched_stop(self) -> Callable[[], bool]:
        """`should_stop`, which the engine asks at every step, with the display kept up to date."""
        shown, start = 0.0, self.engine.tokens

        def should_stop() -> bool:
            nonlocal shown
            if time.monotonic() - shown > SHOW_EVERY:
                shown = time.monotonic()
                if self.counted is not None:
                    self.counted.keep(len(self.log) - self.earlier, now_and_then=True)
                self.context.progress(len(self.log), self.used()[0], "answers", tokens=self.engine.tokens - start)
            return self.context.should_stop()

        return should_stop


@dataclass
class Answering(Work):
    """Conversations of `prompts.jsonl`, in seeded order, answered turn by turn."""

    def __post_init__(self) -> None:
        settings = self.context.settings
        conversations = read_conversations(self.context.path / "prompts.jsonl", self.split, settings.job.seed)
        self.conversations = conversations[: math.ceil(self.share * len(conversations))]
        earlier: dict[str, list[Response]] = {}
        for response in self.log:
            earlier.setdefault(response.id.rpartition("#")[0], []).append(response)
        for conversation in self.conversations:
            for response in sorted(earlier.get(conversation.id, []), key=lambda r: int(r.id.rpartition("#")[2])):
                conversation.answered(response, self.chat)
        self.turns_before = list(accumulate((len(c.turns) for c in self.conversations), initial=0))  # [k]: of the first k
        self.expected = self.turns_before[-1]
        self.expectation = self._expectation()
        limit, longest = settings.generate.train_token_budget if self.split == "train" else None, settings.verifier.max_model_len
        self.budget = Budget(self.conversations, limit, longest, settings.generate.max_new_tokens, self.expectation.tokens_with_prompts)
        self.undecided = Undecided(self.budget)

    def requests(self) -> Iterator[Request]:
        block = None if self.budget.limit is None else BATCHES * self.context.settings.verifier.max_num_seqs
        for conversation in longest_first(self.conversations, self.expectation, block):
            if conversation.order < self.budget.possible and (request := self.next_turn(conversation)):
                self.undecided.begin(conversation)
                yield request

    def _expectation(self) -> Expectation:
        """From the eval split's answers, which are there before the train split's are begun."""
        answered = self.context.states("eval") / RESPONSES
        earlier = [response for _, _, response in scan_responses(answered)] if self.split == "train" and answered.exists() else []
        return Expectation(earlier, self.context.settings.generate.max_new_tokens)

    def next_turn(self, conversation: Conversation) -> Request | None:
        """The request for the next open turn, or None if there is none or it does not fit."""
        turn = len(conversation.answers)
        if turn == len(conversation.turns):
            conversation.finished = True
            return None
        settings, sample = self.context.settings, f"{conversation.id}#{turn}"
        longest = settings.verifier.max_model_len
        try:
            prompt = self.chat.render(conversation.prompt(), conversation.thinking)
        except MustFix as error:  # a template may refuse a conversation only once the answers are in it
            return self.give_up(conversation, "template_refuses", f"{sample}: {error}")
        room = longest - len(prompt)
        if room < 1:
            return self.give_up(
                conversation, "prompt_too_long", f"{sample} has {len(prompt)} prompt tokens, verifier.max_model_len is {longest}"
            )
        conversation.running_tokens = len(prompt)
        self.budget.changed(conversation)
        sampling = settings.generate.thinking if conversation.thinking else settings.generate.instant
        return Request(
            id=sample, prompt_token_ids=prompt, max_tokens=min(settings.generate.max_new_tokens, room),
            temperature=sampling.temperature, top_p=sampling.top_p, seed=sample_seed(settings.job.seed, sample),
            stop_token_ids=self.chat.stop_token_ids, loop_window=settings.generate.stop_on_repetition or 0, note=conversation,
        )  # fmt: skip

    def give_up(self, conversation: Conversation, reason: str, detail: str) -> None:
        """Drop the open turns of a conversation."""
        conversation.finished = True
        self.budget.changed(conversation)
        self.drop(Lost(reason, len(conversation.turns) - len(conversation.answers), detail, conversation.order))

    def used(self) -> tuple[int, list[Lost]]:
        return self._of_first(self.budget.likely)

    def _of_first(self, conversations: int) -> tuple[int, list[Lost]]:
        return self.turns_before[conversations], [lost for lost in self.lost if lost.order < conversations]

    def on_finished(self, finished: Finished) -> Iterable[Request]:
        request, conversation = finished.request, finished.request.note
        conversation.running_tokens = 0
        follow_ups: list[Request] = []
        if finished.dropped:
            self.give_up(conversation, "states_incomplete", finished.dropped)
        else:
            response = Response(
                id=request.id, prompt_token_ids=request.prompt_token_ids, response_token_ids=finished.response_token_ids,
                finish_reason=finished.finish_reason, source=conversation.source, thinking=conversation.thinking,
                sampling={"temperature": request.temperature, "top_p": request.top_p, "seed": request.seed, "max_tokens": request.max_tokens},
            )  # fmt: skip
            conversation.answered(response, self.chat)
            self.budget.changed(conversation)
            self.undecided.hold(conversation, response)
            self._commit_what_is_certain()
            if conversation.order < self.budget.possible and (following := self.next_turn(conversation)):
                follow_ups.append(following)
        if not follow_ups:
            self.undecided.end(conversation)
        self._commit_what_is_certain()  # what is finished has told its last token, and a prompt the room for its answer
        return follow_ups

    def _commit_what_is_certain(self) -> None:
        belong, outside = self.undecided.decide()
        for response in belong:
            self.log.append(response)
            self.committed_tokens += len(response.response_token_ids)
        if outside:
            self.engine.discard(outside)

    def counts(self, seconds: float) -> dict[str, Any]:
        prompts = self.budget.possible
        self.expected, self.lost = self._of_first(prompts)
        self.refuse_too_many(self.expected, self.lost)  # until here the end of the budget was an estimate
        return {"prompts": prompts, "beyond_budget": len(self.conversations) - prompts, **super().counts(seconds)}


@dataclass
class Existing(Work):
    """Answers that exist already: one prefill pass over prompt and response, every row with its log-probability."""

    def __post_init__(self) -> None:
        responses, self.left_out = existing_responses(self.context, self.split, self.facts, self.chat, self.layout)
        self.responses = responses[: math.ceil(self.share * len(responses))]
        self.expected = len(self.responses)

    def requests(self) -> Iterator[Request]:
        done, longest = self.log.ids(), self.context.settings.verifier.max_model_len
        for response in self.responses:
            if response.id in done:
                continue
            if not 2 <= response.tokens <= longest:
                self.drop(Lost("length", 1, f"{response.id} has {response.tokens} tokens, 2 to {longest} can be fed"))
                continue
            yield Request(
                id=response.id, prompt_token_ids=list(response.prompt_token_ids),
                response_token_ids=list(response.response_token_ids), note=response,
            )  # fmt: skip

    def on_finished(self, finished: Finished) -> Iterable[Request]:
        if finished.dropped:
            self.drop(Lost("states_incomplete", 1, finished.dropped))
        else:
            self.log.append(finished.request.note)
            self.committed_tokens += finished.tokens
        return ()

    def counts(self, seconds: float) -> dict[str, Any]:
        return super().counts(seconds) | self.left_out


def sample_seed(seed: int, sample: str) -> int:
    """A sample's own seed (63 bits), so that its answer does not depend on the others."""
    return int.from_bytes(seeded(seed, f"sampling:{sample}")[:8], "big") >> 1


def _chain(first: Request, rest: Iterator[Request]) -> Iterator[Request]:
    yield first
    yield from rest
