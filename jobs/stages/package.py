"""Package: the head as vLLM loads it, a model card with measured figures, and the manifest.

The manifest names every file with bytes and sha256, the settings, versions and figures. It holds
nothing that differs between two packagings of the same head, so that publishing twice is seen to
be the same thing.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from jobs.context import Context
from jobs.draft.export import save_llama_eagle3, save_speculators
from jobs.draft.formats import load_head
from jobs.draft.model import Eagle3Head
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix
from jobs.stages import card
from jobs.storage.files import read_json, sha256_file, write_atomically, write_json_atomically
from jobs.verifier.facts import VerifierFacts

NAME = "package"
SETTINGS = ("package", "verifier.dtype")
MANIFEST_VERSION = 1


def inputs(context: Context) -> list[Path]:
    return [context.path / "trained", context.path / "evaluation.json", context.path / "baseline.json", context.path / "live.json"]


def outputs(context: Context) -> list[Path]:
    return [context.path / "head"]


def run(context: Context) -> dict[str, Any]:
    folder = context.path / "head"
    building = context.path / ".head-building"
    shutil.rmtree(building, ignore_errors=True)
    head = load_head(context.path / "trained", verifier=VerifierWeights.read(context.verifier_path))
    dtype = getattr(torch, context.settings.verifier.dtype)
    names = {
        "verifier_name": context.fetched()["verifier"]["model"],
        "verifier_architecture": VerifierFacts.read(context.verifier_path).architecture,
    }
    save_speculators(head, building, **names, draft_tokens=context.settings.evaluate.draft_tokens, dtype=dtype)
    if context.settings.package.sglang:
        _export_for_sglang(context, head, building / "sglang", dtype)
    evaluation, baseline = read_json(context.path / "evaluation.json"), read_json(context.path / "baseline.json")
    figures = {"draft_tokens": evaluation["draft_tokens"], "heads": _short(baseline) | _short(evaluation), "gains": evaluation["gains"]}
    if context.settings.evaluate.live.concurrencies and (context.path / "live.json").exists():
        figures["live"] = _published_live(read_json(context.path / "live.json"))
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
    return {
        "files": len(files) + 1,
        "bytes": sum(f["bytes"] for f in files.values()),
        "parameters": sum(p.numel() for p in head.parameters()),
    }


def _export_for_sglang(context: Context, head: Eagle3Head, folder: Path, dtype: torch.dtype) -> None:
    """An extra, so its refusal is a remark: the head itself is done and paid for."""
    try:
        save_llama_eagle3(head, folder, dtype=dtype)
    except MustFix as error:
        context.note(f"package: no SGLang form: {error}")
        shutil.rmtree(folder, ignore_errors=True)


def published_settings(context: Context) -> dict[str, Any]:
    """The settings that made the head; where it is sent and what the machine cost is nobody's business."""
    return {section: values for section, values in context.settings.as_dict().items() if section not in ("push", "rental")}


def _short(judged: dict[str, Any]) -> dict[str, Any]:
    shown = ("acceptance_length", "rates", "standard")
    return {name: {key: figure[key] for key in shown if key in figure} for name, figure in judged["heads"].items()}


def _published_live(live: dict[str, Any]) -> dict[str, Any]:
    """The figures without commands and errors, which name this machine's paths."""
    ways = {
        way: {"runs": {c: {k: v for k, v in run.items() if k != "command"} for c, run in of["runs"].items()}}
        for way, of in live["ways"].items()
    }
    shown = ("winner", "replay", "draft_tokens", "sampling", "mode", "requests", "speedup", "same_answers", "first_divergences")
    return {key: live[key] for key in shown if key in live} | {"ways": ways}
