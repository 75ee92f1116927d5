"""Training checkpoints: `folder/step-000123`, there as a whole or not at all.

What a folder holds: `weights.safetensors` (trained tensors and the vocabulary map, fp32; the frozen
embedding comes from the verifier), `optimizer.safetensors` (AdamW's moments, fp32), `rng.safetensors`,
and `checkpoint.json`, written last, with step, data cursor, counters, the settings that decide the
result, and size and xxh3 of every other file.

Decisions:
* Written on another thread from a copy (`jobs.draft.snapshot`), so training stands still for the copy
  only. At most one is on its way; an error of the write is raised at the next save.
* Everything goes to `step-000123.partial`, is fsynced, then renamed. On opening, partial folders are
  removed and a folder whose files do not match their checksums is passed over for the one before it,
  both with a note: a machine taken away in the middle of a write must not cost the run.
* A resumed run is refused when a setting that changes the result differs: a run that is half one
  recipe and half another cannot be described afterwards.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import load_file
from torch import Tensor

from jobs.draft.model import Eagle3Head
from jobs.draft.packing import Piece
from jobs.draft.snapshot import write_tensors
from jobs.errors import MustFix
from jobs.settings import TrainSettings
from jobs.storage.files import disk_full_named, fsync_folder, write_json_atomically
from jobs.storage.states import StateLayout

VERSION = 1
NAME = re.compile(r"step-(\d{6,})")
PARTIAL = ".partial"
PARTS = ("weights", "optimizer", "rng")

# What a resumed run may change: where and how often something is written down, and where it runs.
# The last three change rounding only, so they are taken with a note; everything else is refused.
FREE = frozenset({"checkpoint_every", "keep_checkpoints", "evaluate_every", "evaluate_samples", "log_every", "bad_step_limit"})
ROUNDING = frozenset({"device", "compile", "processes"})


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk; `state` is its checkpoint.json."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]

    def tensors(self, part: str) -> dict[str, Tensor]:
        """`weights`, `optimizer` or `rng`, by name, on CPU."""
        return load_file(self.folder / f"{part}.safetensors")


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def newest(folder: Path, note: Callable[[str], None] = lambda text: None) -> Checkpoint | None:
    """The newest whole checkpoint, None where none was ever finished. Reads every byte of it once, for the checksums.

    MustFix: there are checkpoints and none of them is whole. To begin anew would throw away what was paid for.
    """
    problems = []
    for path in _finished(folder):
        problem, state = _check(path)
        if problem is None:
            return Checkpoint(path, state)
        problems.append(f"{path.name}: {problem}")
        note(f"checkpoint {path.name} is passed over: {problem}")
    if problems:
        raise MustFix(
            f"no checkpoint is whole ({'; '.join(problems)})",
            where=str(folder),
            remedy="restore one from a copy, or train anew with --redo train",
        )
    return None


def clean(folder: Path, note: Callable[[str], None] = lambda text: None) -> None:
    """Removes what a killed run left half written. One process of the run calls it."""
    for path in sorted(folder.glob(f"step-*{PARTIAL}")):
        note(f"half-written checkpoint {path.name} removed")
        shutil.rmtree(path)


def _finished(folder: Path) -> list[Path]:
    """Finished folders, newest first."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _check(path: Path) -> tuple[str | None, dict[str, Any]]:
    """(what is wrong or None, checkpoint.json)."""
    try:
        state = json.loads((path / "checkpoint.json").read_text())
        files = state["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return "checkpoint.json is missing or unreadable", {}
    if state.get("version") != VERSION:
        return f"it has version {state.get('version')}, this program reads {VERSION}", state
    for name, wanted in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != wanted["bytes"]:
            return f"{name} is missing or has another size", state
        if _checksum(file) != wanted["xxh3"]:
            return f"{name} does not match its checksum", state
    return None, state


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write(folder: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], keep: int) -> Path:
    """Writes one checkpoint and removes the oldest beyond `keep`; a full disk is MustFix."""
    final = folder / name_of(state["step"])
    partial = final.with_name(final.name + PARTIAL)
    with disk_full_named(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        files = {}
        for part in PARTS:
            file = partial / f"{part}.safetensors"
            checksum = write_tensors(file, tensors[part])
            files[file.name] = {"bytes": file.stat().st_size, "xxh3": checksum}
        write_json_atomically(partial / "checkpoint.json", {"version": VERSION, **state, "files": files})
        fsync_folder(partial)
        if final.exists():  # passed over on opening, or the same step saved again
            shutil.rmtree(final)
        partial.rename(final)
        fsync_folder(folder)
    for old in _finished(folder)[keep:]:
        # Renamed first: a folder that vanishes half way must not look finished.
        doomed = old.with_name(old.name + PARTIAL)
        shutil.rmtree(doomed, ignore_errors=True)
        old.rename(doomed)
        shutil.rmtree(doomed)
    return final


class CheckpointWriter:
    """Writes behind the training loop's back, one thing after the other, of each kind at most one at a time."""

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: dict[Callable, Future] = {}  # by what writes

    def save(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Takes copies nobody changes any more and returns; waits for the checkpoint before."""
        self.submit(write, self.folder, tensors, state, self.keep)

    def submit(self, write: Callable, *arguments: Any) -> None:
        """Anything that is written, in its turn; raises what an earlier write has raised."""
        for earlier, running in list(self._running.items()):
            if earlier is write or running.done():
                del self._running[earlier]
                running.result()
        self._running[write] = self._pool.submit(write, *arguments)

    def wait(self) -> None:
        """Until everything is on disk; raises what a write raised."""
        while self._running:
            _, running = self._running.popitem()
            running.result()

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def identity(
    settings: TrainSettings, seed: int, warm: bool, pieces: Sequence[Piece], layout: StateLayout, head: Eagle3Head
) -> dict[str, Any]:
    """Everything that decides a training's result, flat and as JSON values: `refuse_changes` compares it."""
    names = "\n".join(f"{p.sample_id} {p.first} {p.rows}" for p in pieces)
    return json.loads(json.dumps({
        **settings.model_dump(mode="json"), "seed": seed, "warm start": warm,
        "samples": hashlib.sha256(names.encode()).hexdigest(),
        "state store": asdict(layout), "head": asdict(head.config),
        "draft vocabulary": hashlib.sha256(head.d2t.cpu().numpy().tobytes()).hexdigest(),
    }))  # fmt: skip


def refuse_changes(saved: Mapping[str, Any], current: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """MustFix naming every difference that would change the result; others are taken, with a note.

    Both are flat: name -> JSON value. Settings of the train section go by their key.
    """
    changed = [name for name in sorted({*saved, *current}) if saved.get(name) != current.get(name)]
    refused = [name for name in changed if name not in FREE | ROUNDING]
    if refused:
        listed = ", ".join(f"{name} was {saved.get(name)!r} and is {current.get(name)!r}" for name in refused)
        raise MustFix(
            f"training cannot be continued with other settings: {listed}",
            where="train, against its newest checkpoint",
            remedy="set them back, or train anew with --redo train",
        )
    for name in changed:
        effect = "the result changes in rounding" if name in ROUNDING else "the result does not depend on it"
        note(f"train.{name} was {saved.get(name)!r} and is {current.get(name)!r}: {effect}")
