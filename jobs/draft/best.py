"""The best head so far by acceptance length, and when there is no more to be gained.

A loss says how near the draft's distribution is to the verifier's; what is paid for is how many drafts
are accepted. So evaluations, not losses, choose the weights a training ends with, and end it early.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from jobs.draft.checkpoint import PARTIAL
from jobs.draft.snapshot import write_tensors
from jobs.storage.files import disk_full_named, fsync_folder, write_json_atomically

FOLDER = "best"


@dataclass
class Best:
    """The longest acceptance of all evaluations so far; goes into every checkpoint."""

    acceptance: float | None = None
    step: int = 0
    worse_since: int = 0  # evaluations without a gain

    def hear(self, acceptance: float | None, step: int, gain: float) -> bool:
        """Takes note of an evaluation; whether it is the best. Less than `gain` more does not end a plateau."""
        if acceptance is None or not math.isfinite(acceptance):
            return False
        longer = self.acceptance is None or acceptance > self.acceptance
        self.worse_since = 0 if self.acceptance is None or acceptance > self.acceptance + gain else self.worse_since + 1
        if longer:
            self.acceptance, self.step = acceptance, step
        return longer


def write(folder: Path, weights: Mapping[str, Tensor], step: int, acceptance: float) -> None:
    """Puts the weights into `folder`/best, whole or not at all, in place of the best before."""
    final, partial = folder / FOLDER, folder / f"{FOLDER}{PARTIAL}"
    with disk_full_named(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write_tensors(partial / "weights.safetensors", weights)
        write_json_atomically(partial / "best.json", {"step": step, "acceptance": acceptance})
        fsync_folder(partial)
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        fsync_folder(folder)


def read(folder: Path, step: int) -> dict[str, Tensor] | None:
    """The best weights, where they are those of this step."""
    try:
        told = json.loads((folder / FOLDER / "best.json").read_text())
    except (OSError, ValueError):
        return None
    return load_file(folder / FOLDER / "weights.safetensors") if told["step"] == step else None
