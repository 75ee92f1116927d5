"""Chat renders by the rules of Kimi-K2.5's template: what the prompt ends in, and whose thinking is dropped."""

import json
import shutil

import pytest

from jobs.verifier.chat import Chat
from jobs.verifier.tiny import CHECKPOINT

USER, AGAIN = {"role": "user", "content": "import os"}, {"role": "user", "content": "Go on."}
ANSWER = {"role": "assistant", "content": "os.sep", "reasoning_content": "sep"}


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat.load(CHECKPOINT)


def rendered(chat: Chat, messages: list[dict], thinking: bool) -> str:
    return chat.tokenizer.decode(chat.render(messages, thinking))


def test_thinking_prompt_ends_in_think_and_instant_prompt_closes_it(chat):
    start = "<|im_user|>user<|im_middle|>import os<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    assert rendered(chat, [USER], True) == start
    assert rendered(chat, [USER], False) == start + "</think>"


@pytest.mark.parametrize("thinking", [True, False])
def test_thinking_of_earlier_turns_is_dropped(chat, thinking):
    text = rendered(chat, [USER, ANSWER, AGAIN], thinking)
    assert "<|im_assistant|>assistant<|im_middle|><think></think>os.sep<|im_end|><|im_user|>user<|im_middle|>Go on.<|im_end|>" in text
    assert text.endswith("<think>" if thinking else "<think></think>")


def test_thinking_before_a_tool_result_is_kept_while_the_turn_lasts(chat):
    call = {"id": "functions.ls:0", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
    calling = {"role": "assistant", "content": "", "reasoning_content": "look", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "functions.ls:0", "content": "a.py"}
    text = rendered(chat, [USER, calling, result], True)
    assert "<think>look</think><|tool_calls_section_begin|><|tool_call_begin|>functions.ls:0<|tool_call_argument_begin|>" in text
    assert "<|im_system|>tool<|im_middle|>## Return of functions.ls:0\na.py<|im_end|>" in text
    assert "look" not in rendered(chat, [USER, calling, result, ANSWER, AGAIN], True)
    assert "look" not in rendered(chat, [USER, calling, result], False)


def test_system_text_and_content_parts(chat):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "import "}, {"type": "text", "text": "os"}]},
    ]
    assert rendered(chat, messages, True).startswith(
        "<|im_system|>system<|im_middle|>Be short.<|im_end|><|im_user|>user<|im_middle|>import os<|im_end|>"
    )


def test_own_answer_becomes_a_message_and_goes_round(chat):
    prompt = chat.render([USER], True)
    answer = chat.tokenizer.encode("sep</think>os.sep<|im_end|>", add_special_tokens=False)
    message = chat.assistant_message(answer, True)
    assert message == ANSWER
    assert chat.render([USER, message, AGAIN], True)[: len(prompt)] == prompt, "the next turn continues the same conversation"
    assert chat.assistant_message(chat.tokenizer.encode("os.sep<|im_end|>", add_special_tokens=False), False) == {
        "role": "assistant",
        "content": "os.sep",
    }
    cut_off = chat.assistant_message(chat.tokenizer.encode("sep, path", add_special_tokens=False), True)
    assert cut_off["content"] == "" and cut_off["reasoning_content"] == "sep, path"


def test_thinking_span_is_found_from_prompt_and_answer_together(chat):
    encode = chat.tokenizer.encode
    prompt, thoughts = chat.render([USER, ANSWER, AGAIN], True), encode("sep, path", add_special_tokens=False)
    closed = [*thoughts, *encode("</think>os.sep<|im_end|>", add_special_tokens=False)]
    assert chat.thinking_span(prompt, closed) == range(len(prompt), len(prompt) + len(thoughts))
    assert chat.thinking_span(prompt, thoughts) == range(len(prompt), len(prompt) + len(thoughts)), "cut off while thinking"
    assert chat.thinking_span(chat.render([USER], False), encode("os.sep<|im_end|>", add_special_tokens=False)) is None


def test_stop_and_special_ids(chat):
    ids = chat.tokenizer.convert_tokens_to_ids
    assert chat.stop_token_ids == (ids("<|im_end|>"),)
    named = [
        "[BOS]",
        "[EOS]",
        "<|im_end|>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
        "<|im_middle|>",
        "<think>",
        "</think>",
        "[PAD]",
    ]
    assert {ids(name) for name in named} <= set(chat.special_token_ids)
    assert set(chat.render([{"role": "user", "content": ""}], True)) <= set(chat.special_token_ids), "role names too"
    assert len(chat.special_token_ids) < 64 and list(chat.special_token_ids) == sorted(set(chat.special_token_ids))


@pytest.mark.parametrize(("given", "expected"), [([1506, 1505], (1506, 1505)), (1506, (1506,)), (None, (1505,))])
def test_stop_ids_come_from_generation_config_and_else_from_the_tokenizer(tmp_path, given, expected):
    copy = tmp_path / "model"
    shutil.copytree(CHECKPOINT, copy, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    assert Chat.load(copy).stop_token_ids == expected


def test_hash_follows_the_tokenizer_and_nothing_else(chat, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(CHECKPOINT, copy, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    assert Chat.load(copy).tokenizer_sha256 == chat.tokenizer_sha256
    other = tmp_path / "other"
    shutil.copytree(copy, other)
    (other / "chat_template.jinja").write_text((copy / "chat_template.jinja").read_text() + "x")
    assert Chat.load(other).tokenizer_sha256 != chat.tokenizer_sha256
