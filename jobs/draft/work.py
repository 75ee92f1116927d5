"""What the processes of one training have to agree on before it begins."""

from dataclasses import dataclass
from pathlib import Path

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


def prepared(work: Work, store: StateStore) -> Plan:
    """The order of everything, the same on every rank; MustFix where states and head do not belong together, or nothing is to be trained on."""
    settings = work.settings
    check_fit(store, work.config)
    pieces = cut_store(store, work.sample_ids, work.config, settings.max_length)
    return Plan(
        pieces, rows=settings.tokens_per_step, accumulate=settings.accumulate, epochs=settings.epochs,
        max_steps=settings.max_steps, seed=work.seed,
    )  # fmt: skip
