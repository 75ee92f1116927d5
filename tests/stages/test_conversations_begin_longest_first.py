"""The order in which conversations are begun: longest expected first, from the lengths the eval split had."""

import pytest

from jobs.stages.conversations import Conversation
from jobs.stages.scheduling import Expectation, longest_first
from jobs.storage.responses import Response


def conversation(order: int, *, thinking: bool = False, source: str = "a", turns: int = 1) -> Conversation:
    return Conversation(f"p{order}", [[]] * turns, thinking, source, order)


def answer(source: str, thinking: bool, length: int) -> Response:
    return Response("e#0", [1], [2] * length, "stop", {}, source, thinking)


def order_of(conversations, expectation, block=None) -> list[int]:
    return [c.order for c in longest_first(conversations, expectation, block)]


def test_by_source_mode_and_open_turns():
    expectation = Expectation([answer("a", False, 100), answer("a", False, 200), answer("b", False, 400), answer("a", True, 900)], 4000)
    given = [
        conversation(0),
        conversation(1, source="b"),
        conversation(2, thinking=True),
        conversation(3, turns=7),
        conversation(4, source="new"),
        conversation(5),
    ]
    # 150, 400, 900, 7 x 150, the mode's mean of 233, 150
    assert order_of(given, expectation) == [3, 2, 1, 4, 0, 5]
    given[3].answers = [{}] * 5  # a continued run: two turns are left
    assert order_of(given, expectation) == [2, 1, 3, 4, 0, 5]


def test_before_anything_is_answered_thinking_comes_first():
    given = [conversation(0), conversation(1, thinking=True), conversation(2, turns=5)]
    assert order_of(given, Expectation([], 1000)) == [2, 1, 0]


def test_under_a_budget_only_blocks_are_ordered():
    given = [conversation(i, thinking=i % 2 == 1) for i in range(6)]
    assert order_of(given, Expectation([], 1000), block=4) == [1, 3, 0, 2, 5, 4]
    assert order_of([], Expectation([], 1000)) == []


def test_what_a_turn_takes_of_a_budget_is_its_prompt_too_and_never_a_guess():
    expectation = Expectation([answer("a", False, 100), answer("a", False, 200), answer("b", False, 400)], 4000)
    assert expectation.tokens_with_prompts(conversation(0)) == 151
    assert expectation.tokens_with_prompts(conversation(0, source="new", turns=3)) == pytest.approx(3 * (700 / 3 + 1))
    assert expectation.tokens_with_prompts(conversation(0, thinking=True)) == 0
