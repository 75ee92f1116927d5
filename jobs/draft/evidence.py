"""What is kept of an optimizer step that was left out, so that somebody can find out why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from jobs.draft.checkpoint import name_of
from jobs.storage.files import write_json_atomically
from jobs.storage.states import StateStore


@dataclass(frozen=True)
class Found:
    """The figures of the step; `loss` and `grad_norm` may be NaN or infinite."""

    step: int
    reason: str
    loss: float
    usual_loss: float
    grad_norm: float
    learning_rate: float

    @property
    def name(self) -> str:
        return f"bad-{name_of(self.step)}.json"

    def keep(
        self, place: Path, number: int, store: StateStore, taps: tuple[int, ...], samples: Sequence[str], weights: Mapping[str, Tensor]
    ) -> None:
        """Writes them down with what is not finite: the states of which of the step's samples, which weights."""
        content = {
            "step": self.step, "reason": self.reason, "loss": repr(self.loss), "usual_loss": repr(self.usual_loss), "grad_norm": repr(self.grad_norm),
            "learning_rate": self.learning_rate, "states_finite_by_sample": {s: _finite(store, s, taps) for s in dict.fromkeys(samples)},
            "weights_not_finite": [name for name, p in weights.items() if not bool(p.isfinite().all())], "bad_steps": number,
        }  # fmt: skip
        write_json_atomically(place, content)


def _finite(store: StateStore, sample_id: str, taps: tuple[int, ...]) -> bool:
    sample = store.read(sample_id, taps)
    return bool(sample.taps.isfinite().all() and sample.final.isfinite().all())
