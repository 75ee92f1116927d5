"""From a published head to the packaged one: its rope, head counts and widths are kept, whatever the settings say of a head from
scratch, and the note on its coverage of our responses gives the share that it can draft."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import untrained_head
from test_baseline_goes_on_with_the_heads_it_can_judge import made, notes

from jobs.context import Context
from jobs.draft.formats import load_head, read_config, save_llama_eagle3
from jobs.draft.model import Eagle3Head, HeadConfig
from jobs.draft.weights import VerifierWeights
from jobs.stages import baseline, evaluate, initial, package, train, vocab
from jobs.storage.states import Response, ResponseLog, StateLayout, StateWriter
from jobs.verifier.chat import Chat
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.tiny import CHECKPOINT

# The head drafts the ids below DRAFTED: 7 of these 12 tokens; after the warm start the special id, too.
ANSWER = [3, 4, 900, 3, 4, 901, 902, 3, 4, 900, 5, max(Chat.load(CHECKPOINT).special_token_ids)]
DRAFTED_SHARE = "58.33%"
ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def published(folder: Path) -> HeadConfig:
    """A head of no other's shape: rope, key-value heads, widths, residual."""
    facts = VerifierFacts.read(CHECKPOINT)
    config = HeadConfig(
        facts.vocab_size,
        untrained_head.DRAFTED,
        facts.hidden_size,
        96,
        facts.heads,
        facts.heads // 2,
        24,
        1e-5,
        5e4,
        ROPE,
        (2, 5, 7),
        False,
    )
    head = Eagle3Head.from_scratch(config, VerifierWeights.read(CHECKPOINT), torch.arange(untrained_head.DRAFTED), seed=1)
    save_llama_eagle3(head, folder, dtype=torch.float32)
    return config


def train_split(context: Context) -> None:
    facts, folder = VerifierFacts.read(CHECKPOINT), context.states("train")
    layout = StateLayout((2, 3, 5, 6, 7, 8), facts.hidden_size, "float32", "tiny", facts.revision, Chat.load(CHECKPOINT).tokenizer_sha256)
    generator, writer = torch.Generator().manual_seed(1), StateWriter(folder, layout)
    with ResponseLog(folder) as log:
        for number in range(4):
            answer = Response(f"t{number}#0", [5, 9, 11], ANSWER, "stop", {}, "own", False)
            rows = answer.tokens - 1
            taps, final = (torch.randn(rows, *shape, facts.hidden_size, generator=generator) for shape in ((6,), ()))
            writer.append(answer.id, 0, taps, final, torch.zeros(rows))
            writer.finish(answer.id, answer.tokens)
            writer.sync()
            log.append(answer)
        writer.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Context, HeadConfig]:
    folder = tmp_path_factory.mktemp("warm-start")
    config = published(folder / "published")
    context = made(folder, {"ours": folder / "published"})
    changes = {
        "vocab": {"min_coverage": 0.1},
        "train": {"epochs": 2.0, "tokens_per_step": 32, "max_length": 32, "evaluate_every": None, "log_every": 1},
        "evaluate": {"min_gain_over_untrained": None, "min_gain_over_ngram": None},
        "package": {"sglang": True},
    }
    sections = {name: getattr(context.settings, name).model_copy(update=values) for name, values in changes.items()}
    context = Context(context.settings.model_copy(update=sections), context.run, context.display)
    train_split(context)
    for stage in (baseline, vocab, train, evaluate, package):
        stage.run(context)
    return context, config


def test_the_trained_and_the_packaged_head_have_its_shape_and_rope(run):
    context, config = run
    own = initial.scratch_config(context.settings, VerifierFacts.read(CHECKPOINT), config.draft_vocab_size)
    changed = {name for name, value in asdict(config).items() if value != asdict(own)[name]}
    assert {"rope_theta", "rope_scaling", "kv_heads", "head_dim", "intermediate_size", "norm_before_residual"} <= changed, changed

    start = initial.chosen(context)
    wanted = replace(config, taps=start.taps)  # in the reading that scored better
    for folder in (context.path / "trained", context.path / "head", context.path / "head/sglang"):
        written = json.loads((folder / "config.json").read_text())
        assert read_config(written, where=str(folder))[1] == wanted, folder
    before, after = load_head(start.folder), load_head(context.path / "head")
    assert not torch.equal(before.fc.weight, after.fc.weight), "it was trained"
    positions = torch.tensor([0, 1, 100, 5000])
    for one, other in zip(before.rotation(positions), after.rotation(positions), strict=True):
        assert torch.equal(one, other)


def test_the_head_in_training_turns_as_the_published_one(run):
    context, _ = run
    head, is_warm = train.initial_head(context, VerifierWeights.read(CHECKPOINT))
    assert is_warm
    for one, other in zip(
        head.rotation(torch.arange(300)), load_head(initial.chosen(context).folder).rotation(torch.arange(300)), strict=True
    ):
        assert torch.equal(one, other)


def test_the_note_tells_which_share_of_our_responses_it_drafts(run):
    context, config = run
    told = [text for text in notes(context) if "warm start from ours" in text]
    assert told, "vocab and train tell it"
    special = sorted(i for i in Chat.load(CHECKPOINT).special_token_ids if i >= config.draft_vocab_size)
    assert special
    for text in told:
        assert re.search(r"it drafts (\S+) of the response tokens", text)[1] == DRAFTED_SHARE, text
        assert f"special ids it could not draft: {special};" in text
