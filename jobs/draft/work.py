"""What the processes of one training have to agree on before it begins, and what became of it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from jobs.draft.data import check_fit, cut_store
from jobs.draft.model import HeadConfig
from jobs.draft.packing import Plan
from jobs.settings import TrainSettings
from jobs.storage.states import StateStore


@dataclass(frozen=True)
class Work:
    """A training, as the first process tells the others; tensors (weights, checkpoint) follow over the process group."""

    settings: TrainSettings
    seed: int
    config: HeadConfig
    draft_ids: tuple[int, ...]
    embedding: torch.dtype
    lm_head: torch.dtype
    store: Path  # folder of the train states
    sample_ids: tuple[str, ...]
    folder: Path  # of checkpoints, which only the first process needs
    warm: bool
    evaluates: bool


@dataclass
class TrainResult:
    """What became of a training; `tokens` are trained rows without padding, over all ranks and runs."""

    steps: int
    tokens: int
    processes: int
    bad_steps: int
    seconds: float  # of this process; less than the whole after a resume
    first_step_seconds: float  # of those until the first step's outcome was known: compilation, for the most part
    resumed_from: int | None
    loss: float | None  # of the last log window
    pieces: int
    split_samples: int
    dropped_pieces: int
    dropped_rows: int
    padding: float
    checkpoint: str
    best_step: int | None  # whose weights the head ends with; None: there was no evaluation
    best_acceptance: float | None
    stopped_early: bool
    checkpoint_seconds: float  # that this process stood still for checkpoints

    def counts(self) -> dict[str, Any]:
        """For the ledger."""
        return asdict(self)


def prepared(work: Work, store: StateStore) -> Plan:
    """The order of everything, the same on every rank; MustFix where states and head do not belong together, or nothing is to be trained on."""
    settings = work.settings
    check_fit(store, work.config)
    pieces = cut_store(store, work.sample_ids, work.config, settings.max_length)
    return Plan(
        pieces, rows=settings.tokens_per_step, accumulate=settings.accumulate, epochs=settings.epochs,
        max_steps=settings.max_steps, seed=work.seed,
    )  # fmt: skip
