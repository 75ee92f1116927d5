"""A run of the tiny verifier up to the states of both splits, made in a second without an engine: for the stages behind them.

The answers are of 24 tokens in a circle, one in ten out of its order, and the states know what comes next: a head accepts
something after a few steps.
"""

import json
import sys
from pathlib import Path

import torch

from jobs.context import Context
from jobs.draft.weights import VerifierWeights
from jobs.job_file import load
from jobs.reporting.display import Display
from jobs.run import RunDirectory
from jobs.stages import fetch, vocab
from jobs.storage.states import Response, ResponseLog, StateLayout, StateWriter
from jobs.verifier.chat import Chat
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.tiny import CHECKPOINT

TAPS, EVAL_TAPS = (2, 5, 7), (2, 3, 5, 6, 7, 8)
CIRCLE = torch.randperm(1000, generator=torch.Generator().manual_seed(5))[:24]  # ids of the verifier
SMALL = (
    "train.epochs=4", "train.tokens_per_step=128", "train.max_length=64", "train.intermediate_size=128", "train.log_every=1",
    "train.single_step_share=0.0", "train.learning_rate=1e-2", "evaluate.bootstrap=100",
)  # fmt: skip


def run_with_states(folder: Path, *overrides: str) -> Context:
    """A new run directory with the verifier in its place; nothing stands in its states yet, no head was judged."""
    settings = load("smoke", overrides=[*SMALL, *overrides], environment={})
    floors = {f"min_gain_over_{name}": None for name in ("untrained", "ngram")}  # of heads that are not there
    run = RunDirectory(folder)
    run.begin(settings.model_copy(update={"evaluate": settings.evaluate.model_copy(update=floors)}))
    context = Context(load("smoke", base=run.ledger["settings"], environment={}), run, Display.open("plain", stream=sys.stderr))
    fetch.run(context)
    (folder / "baseline.json").write_text(json.dumps({"draft_tokens": 3, "heads": {}, "best": None}))
    return context


def answered(context: Context) -> Context:
    """Both splits and the draft vocabulary: the run stands before `train`."""
    write_states(context, "eval", [f"e{i}#0" for i in range(8)] + ["std.gsm8k.0#0"], taps=EVAL_TAPS)
    write_states(context, "train", [f"t{i:02d}#0" for i in range(24)])
    vocab.run(context)
    return context


def write_states(
    context: Context, split: str, ids: list[str], *, lengths: tuple[int, int] = (4, 28), taps: tuple[int, ...] = TAPS,
    dtype: str = "float32", width: int | None = None, odd_token: int | None = None,
) -> None:  # fmt: skip
    """Answers with their states; lengths: tokens of prompt and response. width, odd_token: of another verifier."""
    facts, verifier, folder = VerifierFacts.read(CHECKPOINT), VerifierWeights.read(CHECKPOINT), context.states(split)
    width = width or facts.hidden_size
    layout = StateLayout(taps, width, dtype, "tiny", facts.revision, Chat.load(CHECKPOINT).tokenizer_sha256)
    views = torch.randn(6, 2 * width, width, generator=torch.Generator().manual_seed(1)) / width**0.5  # of the taps in EVAL_TAPS
    columns = [EVAL_TAPS.index(tap) if tap in EVAL_TAPS else 0 for tap in taps]
    generator = torch.Generator().manual_seed(len(ids))
    with ResponseLog(folder) as log:
        writer = StateWriter(folder, layout)
        for sample in ids:
            total = sum(lengths)
            steps = 1 + (torch.rand(total, generator=generator) < 0.1) * torch.randint(24, (total,), generator=generator)
            places = steps.cumsum(0) % 24  # [n]
            x = CIRCLE[places]
            here = verifier.embedding.float()[x[:-1], :width]  # [n-1, H]
            both = torch.cat((here, here.roll(1, 0)), -1)
            final = verifier.lm_head.float()[CIRCLE[(places[:-1] + 1) % 24], :width]  # [n-1, H]
            writer.append(sample, 0, torch.einsum("nd,tdh->nth", both, views[columns]), final, torch.zeros(total - 1))
            writer.finish(sample, total)
            writer.sync()
            tokens = x.tolist()
            if odd_token is not None:
                tokens[-1] = odd_token
            log.append(Response(sample, tokens[: lengths[0]], tokens[lengths[0] :], "length", {}, "synthetic", False))
        writer.close()


def notes(context: Context) -> list[str]:
    told = [json.loads(line) for line in (context.path / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in told if event["kind"] == "note"]
