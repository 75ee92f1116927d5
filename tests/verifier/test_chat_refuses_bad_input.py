"""What Chat refuses, and how: one sentence, exit code 78, the place and the remedy named."""

import shutil
from pathlib import Path

import pytest

from jobs.errors import EXIT_MUST_FIX, MustFix
from jobs.verifier.chat import Chat
from jobs.verifier.tiny import CHECKPOINT


@pytest.fixture
def folder(tmp_path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(CHECKPOINT, copy, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    return copy


def refusal(folder: Path) -> MustFix:
    with pytest.raises(MustFix) as caught:
        Chat.load(folder)
    assert caught.value.exit_code == EXIT_MUST_FIX and caught.value.remedy and "\n" not in caught.value.sentence()
    assert str(folder) in caught.value.sentence()
    return caught.value


def test_tokenizer_without_a_chat_template(folder):
    (folder / "chat_template.jinja").unlink()
    assert "chat template" in refusal(folder).message


def test_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "empty").mkdir()
    refusal(tmp_path / "empty")


def test_tokenizer_whose_ranks_are_missing(folder):
    (folder / "tiktoken.model").unlink()
    refusal(folder)


def test_generation_config_that_is_torn(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": 15')
    refusal(folder)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x.png"}}]}],
    ],
    ids=["unknown role", "picture"],
)
def test_messages_that_the_template_refuses(messages):
    with pytest.raises(MustFix, match="template refuses") as caught:
        Chat.load(CHECKPOINT).render(messages, True)
    assert messages[0]["role"] in caught.value.sentence()
