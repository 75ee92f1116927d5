"""Existing answers whose ids are another tokenizer's, though all in range, are 78 before the verifier is loaded; plain text of this one's is taken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jobs.errors import MustFix
from jobs.stages.own_prompts import LOOKED_AT, OwnPrompts, refuse_other_prompts
from jobs.storage.responses import Response, ResponseLog
from jobs.verifier.chat import Chat
from jobs.verifier.tiny import CHECKPOINT, PROMPTS

WHERE = Path("responses.jsonl")


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat.load(CHECKPOINT)


@pytest.fixture(scope="module")
def said() -> list[list[dict]]:
    return [json.loads(line)["messages"] for line in PROMPTS.read_text().splitlines()][:200]


def other_ids(first_special: int, last: int = 1536) -> dict[int, int]:
    """A tokenizer of the same pieces under other ids; those from first_special on are where they were."""
    order = torch.randperm(first_special, generator=torch.Generator().manual_seed(1)).tolist()
    return dict(enumerate(order)) | {i: i for i in range(first_special, last)}


def answers(prompts: list[list[int]]) -> list[Response]:
    return [Response(f"p{i}#0", ids, [5, 6, 7], "stop", {}, "test", False) for i, ids in enumerate(prompts)]


def rendered(chat: Chat, said: list[list[dict]]) -> list[list[int]]:
    return [chat.render(messages, thinking=i % 2 == 0) for i, messages in enumerate(said)]


def plain(chat: Chat, said: list[list[dict]]) -> list[list[int]]:
    """Completions without a template: the text alone, and after [BOS]."""
    ids = [chat.tokenizer(messages[-1]["content"], add_special_tokens=False)["input_ids"] for messages in said]
    return [[chat.tokenizer.bos_token_id, *each] if i % 2 else each for i, each in enumerate(ids)]


@pytest.mark.parametrize("made", [rendered, plain])
def test_this_tokenizer_is_taken_and_another_refused(chat, said, made):
    prompts = made(chat, said)
    assert refuse_other_prompts(answers(prompts), WHERE, chat) is None
    for kept in (1536, 1504):  # every id another, and all but the special ones
        other = other_ids(kept)
        foreign = [[other[i] for i in ids] for ids in prompts]
        with pytest.raises(MustFix, match=r"another verifier or tokenizer: the prompt of p\d+#0 \(line \d+\)") as refused:
            refuse_other_prompts(answers(foreign), WHERE, chat)
        assert refused.value.exit_code == 78 and "\n" not in refused.value.sentence()


def test_conversations_of_every_kind_are_this_verifiers(chat):
    user, system, answer = (
        {"role": "user", "content": "Why?"},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "So."},
    )
    tool = {"role": "tool", "content": "42", "tool_call_id": "t"}
    own = OwnPrompts(chat)
    for conversation in ([user], [system, user], [user, answer, user], [system, user, answer, user, answer, user], [user, answer, tool]):
        for thinking in (True, False):
            assert chat.render(conversation, thinking) in own


def test_a_template_that_opens_the_answer_otherwise_is_another_verifiers(chat, said):
    """Kimi-K2 has K2.5's tokenizer, and no `<think>` before its answers."""
    without = [ids[: ids.index(chat.think_id, len(ids) - 2)] for ids in rendered(chat, said)]
    with pytest.raises(MustFix, match="another verifier"):
        refuse_other_prompts(answers(without), WHERE, chat)


def test_one_in_a_hundred_is_told_and_more_are_refused(chat, said):
    own, other = rendered(chat, said), other_ids(1536)
    foreign = [other[i] for i in own[0]]
    few = answers([*own[:150], foreign, *own[151:]])
    assert "p150#0 (line 151)" in (refuse_other_prompts(few, WHERE, chat) or "")
    with pytest.raises(MustFix, match=r"p7#0 \(line 8\).* 3 of the first 200 prompts"):
        refuse_other_prompts(answers([*own[:7], foreign, foreign, foreign, *own[10:]]), WHERE, chat)
    late = answers([*(own * 5)[:LOOKED_AT], foreign])
    assert refuse_other_prompts(late, WHERE, chat) is None, "only the first lines are looked at"


def test_a_run_on_them_is_78_with_one_sentence_and_no_load(chat, said, tmp_path):
    other = other_ids(1536)
    for split in ("eval", "train"):
        with ResponseLog(tmp_path / "given" / split) as log:
            for response in answers([[other[i] for i in ids] for ids in rendered(chat, said)[:30]]):
                log.append(response)
    command = [sys.executable, "-m", "entrypoints.cli", "smoke", "--json", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([*command, "--set", f"generate.responses={tmp_path / 'given'}"], capture_output=True, text=True)
    told = json.loads(done.stdout)
    assert done.returncode == told["exit_code"] == 78, done.stderr[-2000:]
    assert told["error"]["message"].startswith("The responses are of another verifier or tokenizer: the prompt of p0#0 (line 1)"), told
    assert told["error"]["where"] == str(tmp_path / "given" / "eval" / "responses.jsonl")
    assert told["verifier_loads"] == 0 and told["stages"]["generate.eval"]["state"] == "failed"
