"""The miniature was really trained: it predicts text it never saw, uses all its experts and keeps its form.

Computed by transformers' code in fp32, not by anything of this project.
"""

import pytest
import torch
from deepseek_reference import Reference
from held_out import sequences

from jobs.verifier.chat import Chat
from jobs.verifier.tiny import CHECKPOINT


@pytest.fixture(scope="module")
def predicted() -> dict:
    """Greedy predictions of every answer token of the held-out conversations, and the loads of the experts."""
    reference = Reference(CHECKPOINT)
    loads = [torch.zeros(8) for _ in range(9)]

    def count(load: torch.Tensor):
        def hook(gate, inputs, output) -> None:
            load.add_(torch.bincount(output[0].flatten(), minlength=8))

        return hook

    hooks = [layer.mlp.gate.register_forward_hook(count(load)) for layer, load in zip(reference.model.model.layers[1:], loads, strict=True)]
    guesses, truths = [], []
    for ids, prompt in sequences():
        with torch.no_grad():
            logits = reference.model(input_ids=torch.tensor([ids])).logits[0]  # [n, V]
        guesses.append(logits[prompt - 1 : -1].argmax(-1))
        truths.append(torch.tensor(ids[prompt:]))
    for hook in hooks:
        hook.remove()
    return {"guesses": torch.cat(guesses), "truths": torch.cat(truths), "loads": torch.stack(loads)}


def test_at_least_forty_percent_of_held_out_tokens_are_predicted_greedily(predicted):
    correct = predicted["guesses"] == predicted["truths"]
    assert len(correct) > 4000
    assert correct.float().mean() >= 0.40


def test_the_end_of_thinking_and_of_an_answer_are_learned(predicted):
    tokenizer = Chat.load(CHECKPOINT).tokenizer
    for token, share in (("</think>", 0.6), ("<|im_end|>", 0.05)):  # an answer may end at any line, so its end is a guess
        at = predicted["truths"] == tokenizer.convert_tokens_to_ids(token)
        assert at.sum() >= 20
        assert (predicted["guesses"][at] == predicted["truths"][at]).float().mean() >= share


def test_no_expert_is_idle(predicted):
    shares = predicted["loads"] / predicted["loads"].sum(dim=1, keepdim=True)  # [9, 8], 1/8 each if even
    assert shares.min() > 0.02
