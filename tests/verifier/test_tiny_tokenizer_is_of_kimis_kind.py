"""The miniature's tokenizer: Python code over tiktoken, no offsets, special ids last, nothing lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.verifier.chat import Chat
from jobs.verifier.tiny import CHECKPOINT, HELD_OUT, PROMPTS
from jobs.verifier.tiny.corpus import Renderer

# Distances from the start of the special ids in the real tokenizer (163,584 there).
OFFSETS = {
    "[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|im_system|>": 10,
    "<|im_middle|>": 17, "<|media_begin|>": 18, "<|media_content|>": 19, "<|media_end|>": 20, "<|media_pad|>": 21,
    "<think>": 22, "</think>": 23, "[UNK]": 30, "[PAD]": 31,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return Chat.load(CHECKPOINT).tokenizer


def test_it_is_remote_python_code_without_offsets(tokenizer):
    assert not tokenizer.is_fast and type(tokenizer).__module__.startswith("transformers_modules.")
    with pytest.raises(NotImplementedError):
        tokenizer("x = 1", return_offsets_mapping=True)


def test_special_ids_are_the_last_of_the_vocabulary_at_the_real_distances(tokenizer):
    base = tokenizer.vocab_size - 32
    assert {name: tokenizer.convert_tokens_to_ids(name) - base for name in OFFSETS} == OFFSETS
    assert tokenizer.encode("<think></think><|im_end|>", add_special_tokens=False) == [base + 22, base + 23, base + 2]
    assert tokenizer.decode([base + 22, base + 2], skip_special_tokens=True) == "<think>"


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80))
def test_any_text_comes_back_unchanged(text):
    tokenizer = Chat.load(CHECKPOINT).tokenizer
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_code_comes_back_unchanged_in_fewer_tokens_than_bytes(tokenizer):
    text = "\n".join(m["content"] for line in PROMPTS.read_text().splitlines()[:50] for m in json.loads(line)["messages"])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode()) / 2.2


def test_saving_and_loading_keeps_every_id(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == tokenizer.chat_template


def test_training_sequences_are_what_the_template_renders(tokenizer):
    pieces = [tokenizer.model.decode_single_token_bytes(i) for i in range(tokenizer.vocab_size - 32)]
    renderer, compared = Renderer(pieces), 0
    for line in HELD_OUT.read_text().splitlines():
        messages = json.loads(line)["messages"]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for at, (ids, prompt) in zip(answers, renderer.sequences(messages), strict=True):
            thinking = "reasoning_content" in messages[at]
            rendered = tokenizer.apply_chat_template(messages[:at], add_generation_prompt=True, thinking=thinking)
            assert ids[:prompt] == rendered
            compared += 1
    assert compared >= 40
