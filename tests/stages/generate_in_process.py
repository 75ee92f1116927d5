"""Runs `generate` for one split in a run directory, as the pipeline does: in a test, or as a process to be killed.

    python generate_in_process.py RUN_DIR SPLIT       prints the counts as one JSON line

RUN_DIR holds `settings.json`, `fetched.json`, `locations.json` and `prompts.jsonl` (see `prepare`).
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from jobs.context import Context
from jobs.errors import JobError
from jobs.job_file import validated
from jobs.reporting.display import Display
from jobs.run import RunDirectory
from jobs.settings import Settings, VerifierSettings
from jobs.stages import generate
from jobs.verifier.engine import VerifierEngine
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.tiny import CHECKPOINT

SMALL = {
    "job": {"name": "generate-test", "seed": 3},
    "verifier": {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128, "enforce_eager": True},
    "prompts": {"max_prompt_tokens": 128},
    "generate": {"max_new_tokens": 24},
    "states": {"shard_mib": 4, "extent_rows": 16},
}


def settings_with(changes: dict[str, dict[str, Any]]) -> Settings:
    values = {section: dict(SMALL.get(section, {})) | dict(changes.get(section, {})) for section in SMALL.keys() | changes.keys()}
    return validated(values, where="test")


def prepare(folder: Path, rows: list[dict[str, Any]], verifier: Path = CHECKPOINT, **changes: dict[str, Any]) -> Path:
    """A run directory as `prompts` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings_with(changes).as_dict()))
    (folder / "locations.json").write_text(json.dumps({"verifier": str(verifier), "heads": {}}))
    (folder / "fetched.json").write_text(json.dumps({"verifier": {"model": "tiny"}, "heads": {}}))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def prompt(number: int, *turns: str, split: str = "eval", thinking: bool = False) -> dict[str, Any]:
    return {
        "id": f"p{number:03d}",
        "messages": [{"role": "user", "content": turn} for turn in turns],
        "source": "test",
        "split": split,
        "thinking": thinking,
    }


@contextlib.contextmanager
def small_engine() -> Iterator[VerifierEngine]:
    """The engine of SMALL on the tiny verifier, capturing both readings of its taps, for the tests of a module to share."""
    engine = VerifierEngine(
        CHECKPOINT, VerifierSettings(**SMALL["verifier"]), seed=3, capture_taps=VerifierFacts.read(CHECKPOINT).both_readings(None)
    )
    torch.set_num_threads(1)  # vLLM takes one a core; a tiny model only waits for them
    try:
        yield engine
    finally:
        engine.close()


def context_of(folder: Path, engine: Any = None) -> Context:
    """engine: one that runs already (it is shared by the tests of a module), else the stage starts its own."""
    settings = validated(json.loads((folder / "settings.json").read_text()), where=str(folder))
    run = RunDirectory(folder)
    run.begin(settings)
    start = (lambda context: engine) if engine is not None else generate.start_engine
    return Context(settings=settings, run=run, display=Display(sys.stderr, live=False), start_engine=start)


def run(folder: Path, split: str = "eval", engine: Any = None) -> dict[str, Any]:
    context = context_of(folder, engine)
    try:
        return generate.stage(split).run(context)
    finally:
        context.run.close()
        if engine is None:
            context.release_engine()


if __name__ == "__main__":
    try:
        print(json.dumps(run(Path(sys.argv[1]), sys.argv[2])))
    except JobError as error:
        print(error.sentence(), file=sys.stderr)
        sys.exit(error.exit_code)
