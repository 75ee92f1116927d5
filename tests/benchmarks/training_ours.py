"""The trainer's own optimizer step on states that already lie in the device's memory."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from jobs.draft.attention import Documents
from jobs.draft.coverage import Undecided
from jobs.draft.data import PackedRow
from jobs.draft.model import Eagle3Head, HeadConfig, RMSNorm, VerifierWeights
from jobs.draft.packing import Cut, Piece, Plan
from jobs.draft.progress import Reporter, Window
from jobs.draft.ranks import Ranks
from jobs.draft.trainer import _Run
from jobs.settings import TrainSettings
from jobs.storage.shards import StateLayout

TAPS = (2, 30, 58)
STEPS = 3
REAL = dict(vocab_size=163_840, draft_vocab_size=32_000, hidden_size=7168, intermediate_size=18_432, heads=64, kv_heads=64, head_dim=128)
TINY = dict(vocab_size=512, draft_vocab_size=256, hidden_size=64, intermediate_size=96, heads=4, kv_heads=4, head_dim=16)


def config_of(size: Mapping[str, int]) -> HeadConfig:
    return HeadConfig(**size, rms_norm_eps=1e-5, rope_theta=1e6, rope_scaling=None, taps=TAPS, norm_before_residual=False)


def documents_of(rows: int, length: int) -> tuple[int, ...]:
    """Documents of `length` rows that fill a packed row; the last one takes the rest."""
    whole, rest = divmod(rows, length)
    return (length,) * whole + ((rest,) if rest else ())


class Resident:
    """A store's place: what the trainer asks of one when the rows come from elsewhere."""

    def __init__(self, config: HeadConfig):
        self.layout = StateLayout(TAPS, config.hidden_size, "bfloat16", "synthetic", "0" * 40, "0" * 64)

    def lengths(self, ids):
        return dict.fromkeys(ids, 1)


@dataclass
class Feed:
    """Packed rows in the device's memory, taken in turn: what `ReadAhead` is for a store."""

    rows: list[tuple[PackedRow, Documents]]
    first: int = 0
    every: int = 1
    waited: float = 0.0
    bytes: int = 0

    def next(self):
        ready = self.rows[self.first % len(self.rows)]
        self.first += self.every
        return ready


def packed_row(
    config: HeadConfig, rows: int, lengths: tuple[int, ...], seed: int, device: torch.device, flex: bool, undecided: float = 0.0
):
    """Random states; every row predicts, one in a hundred has an argmax outside the draft vocabulary."""
    g = torch.Generator(device).manual_seed(seed)
    wide = torch.bfloat16 if device.type == "cuda" else torch.float32

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device).to(wide)

    used = sum(lengths)
    remaining, positions = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    start = 0
    for length in lengths:
        remaining[start : start + length] = torch.arange(length, 0, -1)
        positions[start : start + length] = torch.arange(length)
        start += length
    open_rows = torch.arange(int(undecided * used))
    row = PackedRow(
        draw(rows, 3, config.hidden_size), draw(rows, config.hidden_size),
        torch.randint(config.vocab_size, (rows,), generator=g, device=device), (torch.arange(rows) < used).to(device),
        remaining.to(device), positions.to(device), lengths, ("synthetic",),
        covered=torch.rand(rows, generator=g, device=device) < 0.99,
        undecided=Undecided(open_rows, open_rows * 0) if len(open_rows) else None,
    )  # fmt: skip
    return row, Documents(lengths, rows, flex).to(device)


def random_head(config: HeadConfig, device: torch.device) -> tuple[Eagle3Head, VerifierWeights]:
    """Random weights, the same in every process, made where they are needed."""
    g = torch.Generator(device).manual_seed(0)
    narrow = torch.bfloat16
    draw = lambda *shape: (0.02 * torch.randn(*shape, generator=g, device=device, dtype=torch.float32)).to(narrow)  # noqa: E731
    head = Eagle3Head(config).to_empty(device=device)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5, generator=g)
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1)
    spread = config.vocab_size // config.draft_vocab_size
    head.set_vocabulary(torch.arange(config.draft_vocab_size) * spread)
    head.embed_tokens.weight = nn.Parameter(draw(config.vocab_size, config.hidden_size), requires_grad=False)
    verifier = VerifierWeights(
        head.embed_tokens.weight.data, torch.ones(config.hidden_size, device=device), draw(config.vocab_size, config.hidden_size)
    )
    return head, verifier


class Ours:
    """One head, its optimizer and its compiled step at one number of rows."""

    def __init__(self, config: HeadConfig, rows: int, ranks: Ranks, folder: Path, accumulate: int = 1, **changes):
        self.config, self.rows, self.ranks, self.accumulate = config, rows, ranks, accumulate
        settings = TrainSettings(
            tokens_per_step=rows, max_length=rows, ttt_steps=STEPS, accumulate=accumulate, learning_rate=1e-5, warmup_share=0.0,
            device=ranks.device.type, epochs=1_000_000, max_steps=100_000, **changes,
        )  # fmt: skip
        cut = Cut((Piece("synthetic", 0, rows),), 0, 0, 0, rows - 1)
        plan = Plan.__new__(Plan)
        plan.cut, plan.rows, plan.accumulate, plan.steps = cut, rows, accumulate, 100_000
        plan.step_rows = lambda step: [cut.pieces] * accumulate
        torch.set_float32_matmul_precision("high" if settings.precision == "tf32" else "highest")  # `trainer.products`, for good
        head, verifier = random_head(config, ranks.device)
        self.run = _Run(settings, 0, head, verifier, Resident(config), plan, folder, False, ranks, Reporter(lambda line: None, None))
        self.device = ranks.device

    def feed(self, lengths: tuple[int, ...], count: int = 2, undecided: float = 0.0) -> Feed:
        """`count` rows in turn; of several ranks each takes its own of one and the same order."""
        flex = self.run.compiled
        made = [packed_row(self.config, self.rows, lengths, 100 + n, self.device, flex, undecided) for n in range(count)]
        return Feed(made, self.ranks.rank, self.ranks.world)

    def first_steps(self, feed: Feed, number: int = 1) -> list[float]:
        """The steps that compile, and the loss of each: from here on a step that leaves their graph raises, and there is no figure."""
        torch.compiler.set_stance("default")
        _, losses = self.steps(feed, number)
        torch.compiler.set_stance("fail_on_recompile")
        return losses

    def steps(self, feed: Feed, number: int) -> tuple[float, list[float]]:
        """(seconds a step without stopping in between, loss of each step as the host heard of them)."""
        run, losses = self.run, []
        window = Window(STEPS, 1.0, self.device)
        _synchronize(self.device)
        began = time.perf_counter()
        for _ in range(number):
            facts = run.optimizer_step(feed, window)
            if run.pending:
                losses.append(_loss(run.pending))
            run._settle()
            run.pending = facts
            run.step += 1
        losses.append(_loss(run.pending))
        run._settle()
        _synchronize(self.device)
        assert run.bad_steps == 0, f"{run.bad_steps} steps were not finite"
        return (time.perf_counter() - began) / number, losses


def _loss(facts) -> float:
    loss, count, *_ = facts.outcome.get().tolist()
    return loss / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
