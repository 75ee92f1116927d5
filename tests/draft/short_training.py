"""A training of some twenty steps in the test's own process, and twelve samples for it, one a packed row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from synthetic_states import Language, draft_ids, make_store, small_config

from jobs.draft.model import Eagle3Head
from jobs.draft.trainer import train
from jobs.settings import TrainSettings
from jobs.storage.states import StateStore

SETTINGS = dict(device="cpu", epochs=2, tokens_per_step=64, max_length=64, log_every=1, learning_rate=1e-2)


def twelve_samples(folder: Path) -> tuple[StateStore, Language]:
    language = Language.make()
    return make_store(folder, [(4, 60)] * 12, language=language), language


def new_head(language: Language, **changes) -> Eagle3Head:
    config = small_config(**changes)
    return Eagle3Head.from_scratch(config, language.verifier, draft_ids(config), seed=1)


def train_shortly(
    head: Eagle3Head, folder: Path, store: StateStore, language: Language, *, report: Callable[[dict], Any],
    evaluate: Callable[[Eagle3Head], dict] | None = None, should_stop: Callable[[], bool] = lambda: False, **changes,
):  # fmt: skip
    """Trains `head` under these changes to SETTINGS; what `train` returns."""
    return train(
        settings=TrainSettings(**SETTINGS | changes), seed=0, head=head, verifier=language.verifier, store=store, sample_ids=store.ids(),
        folder=folder, warm=False, evaluate=evaluate, should_stop=should_stop, report=report,
    )  # fmt: skip
