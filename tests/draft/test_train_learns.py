"""Training on states that can be learned from lowers the loss and raises the accuracy at every TTT step."""

import pytest
import torch
from synthetic_states import Language, draft_ids, make_store, one_core, small_config  # noqa: F401 - a fixture

from jobs.draft.model import Eagle3Head
from jobs.draft.trainer import train
from jobs.settings import TrainSettings

pytestmark = pytest.mark.usefixtures("one_core")


def test_loss_falls_and_accuracy_rises(tmp_path):
    language = Language.make()
    store = make_store(tmp_path / "states", [(5 + i % 9, 20 + i % 17) for i in range(60)], language=language)
    config = small_config(draft_vocab_size=64)
    head = Eagle3Head.from_scratch(config, language.verifier, draft_ids(config), seed=1)
    settings = TrainSettings(
        device="cpu", epochs=12, tokens_per_step=128, max_length=64, learning_rate=1e-2, warmup_share=0.05,
        final_share=0.05, single_step_share=0.4, log_every=10, checkpoint_every=50, evaluate_every=60,
    )  # fmt: skip
    lines = []
    result = train(
        settings=settings, seed=0, head=head, verifier=language.verifier, store=store, sample_ids=store.ids(),
        folder=tmp_path / "checkpoints", warm=False, evaluate=lambda h: {"training": float(h.training)},
        should_stop=lambda: False, report=lines.append,
    )  # fmt: skip
    logged = [line for line in lines if "loss" in line]
    first, last = logged[0], logged[-1]
    assert first["loss_by_step"][1] is None, "the curriculum's first part has one TTT step"
    assert last["loss"] < 0.35 * first["loss"], (first["loss"], last["loss"])
    assert first["accuracy_by_step"][0] < 0.5
    assert min(last["accuracy_by_step"]) > 0.85, last["accuracy_by_step"]
    assert last["acceptance_estimate"] > 3.3
    assert last["step"] == last["steps"] == result.steps
    assert [line["evaluation"] for line in lines if "evaluation" in line] == [{"training": 0.0}] * len(range(60, result.steps + 60, 60))
    assert all(line["tokens_per_second"] > 0 and 0 <= line["data_wait"] < 1 for line in logged)
    assert list((tmp_path / "checkpoints/tensorboard").glob("events.out.tfevents.*"))
    assert torch.equal(head.embed_tokens.weight, language.verifier.embedding), "the embedding is frozen"
