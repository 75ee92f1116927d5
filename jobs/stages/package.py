"""Package: the head as vLLM loads it, a model card with measured figures, and the manifest.

The manifest names every file with bytes and sha256, the settings, versions and figures. It holds
nothing that differs between two packagings of the same head, so that publishing twice is seen to
be the same thing.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from jobs.draft import formats
from jobs.draft.model import VerifierWeights
from jobs.run import Context
from jobs.stages import card
from jobs.storage.files import sha256_file, write_atomically, write_json_atomically
from jobs.verifier.engine import VerifierFacts

NAME = "package"
SETTINGS = ("package", "verifier.dtype")
MANIFEST_VERSION = 1


def inputs(context: Context) -> list[Path]:
    return [context.path / "trained", context.path / "evaluation.json", context.path / "baseline.json"]


def outputs(context: Context) -> list[Path]:
    return [context.path / "head"]


def run(context: Context) -> dict[str, Any]:
    folder = context.path / "head"
    building = context.path / ".head-building"
    shutil.rmtree(building, ignore_errors=True)
    head = formats.load_head(context.path / "trained", verifier=VerifierWeights.read(context.verifier_path))
    names = {
        "verifier_name": context.fetched()["verifier"]["model"],
        "verifier_architecture": VerifierFacts.read(context.verifier_path).architecture,
    }
    formats.save_speculators(head, building, **names, dtype=context.settings.verifier.dtype)
    if context.settings.package.sglang:
        formats.save_llama_eagle3(head, building / "sglang", dtype=context.settings.verifier.dtype)
    evaluation = json.loads((context.path / "evaluation.json").read_text())
    baseline = json.loads((context.path / "baseline.json").read_text())
    figures = {"draft_tokens": evaluation["draft_tokens"], "heads": _short(baseline) | _short(evaluation), "gains": evaluation["gains"]}
    write_atomically(building / "README.md", card.model_card(context, head.config, figures).encode())
    files = {
        str(path.relative_to(building)): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(building.rglob("*")) if path.is_file()
    }  # fmt: skip
    manifest = {
        "version": MANIFEST_VERSION, "name": context.settings.package.name, "files": files, "verifier": context.fetched()["verifier"],
        "settings": published_settings(context), "versions": context.run.ledger["versions"], "figures": figures,
    }  # fmt: skip
    write_json_atomically(building / "manifest.json", manifest)
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(building, folder)
    return {"files": len(files) + 1, "bytes": sum(f["bytes"] for f in files.values()), "parameters": sum(p.numel() for p in head.parameters())}


def published_settings(context: Context) -> dict[str, Any]:
    """The settings that made the head; where it is sent and what the machine cost is nobody's business."""
    return {section: values for section, values in context.settings.as_dict().items() if section not in ("push", "rental")}


def _short(judged: dict[str, Any]) -> dict[str, Any]:
    return {name: {"acceptance_length": figure["acceptance_length"], "rates": figure["rates"]} for name, figure in judged["heads"].items()}
