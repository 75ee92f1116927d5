"""Speculation while the verifier answers (`generate.speculate`): who drafts, and what vLLM counts of it.

Decision: the drafter is chosen before the engine starts, because the verifier is loaded once. So `best` is what is
known by then: the best of this run's own baseline where a continued run has one, else the only candidate there is.
With several candidates and no baseline it is refused; name one of them, or `ngram`.

Off by default: it pays where the verifier decodes few requests at once. A full batch of a mixture of experts is
limited by arithmetic and by the experts that rejected tokens wake, and no machine has measured the whole yet.

What changes: greedy answers are the same. Sampled ones follow the same distribution, but their random numbers are
spent otherwise, so an answer then depends on the drafts too and not on seed and id alone.

vLLM's own counters are kept in `speculation.json` while the verifier answers, an entry a start, so that a killed one
loses seconds of them. They are a live measurement of that head, which `baseline` holds against its replay.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jobs.context import Context
from jobs.draft.export import save_speculators
from jobs.draft.formats import load_head, names_taps_for_sglang_only, read_config
from jobs.draft.weights import VerifierWeights
from jobs.errors import JobError, MustFix
from jobs.run import now
from jobs.storage.files import read_json, write_json_atomically
from jobs.verifier.drafter import Drafter
from jobs.verifier.facts import VerifierFacts

OFF, BEST, NGRAM = "off", "best", "ngram"
FILE = "speculation.json"
# Seconds between two writings of the counters.
KEEP_EVERY = 10.0


def drafter(context: Context) -> Drafter | None:
    """The drafter of this start, its head written as vLLM loads it; None where nothing drafts."""
    name = chosen(context)
    if name is None:
        return None
    refuse_sampling_on_cpu(context)
    defaults = VerifierFacts.read(context.verifier_path).default_taps
    taps = None if name == NGRAM else taps_of(context, name, read_json(Path(context.locations()["heads"][name]) / "config.json"), defaults)
    return Drafter(name, taps, config_of(context, name, context.path / "speculation", taps))


def chosen(context: Context) -> str | None:
    """`ngram`, a candidate's name, or None. Raises MustFix where the best one is not known yet."""
    wanted, candidates = context.settings.generate.speculate, context.settings.heads.candidates
    if wanted == OFF:
        return None
    if wanted != BEST:
        return wanted
    judged = _judged(context)
    if judged.get("best"):
        return judged["best"]
    if len(candidates) == 1:
        return candidates[0].name
    raise MustFix(
        f"Which of {len(candidates)} heads is the best is known after the baseline, which needs the answers of this very engine start",
        where='generate.speculate = "best"', remedy=f"name one of {', '.join(c.name for c in candidates)} or ngram; once its baseline is done a run may say best",
    )  # fmt: skip


def taps_of(context: Context, name: str, raw: Mapping[str, Any], default_taps: tuple[int, int, int]) -> tuple[int, ...]:
    """EAGLE-3 ids a candidate reads: as the baseline found, as the settings say, else as vLLM reads its config."""
    judged = _judged(context).get("heads", {}).get(name, {}).get("taps")
    listed = next(c for c in context.settings.heads.candidates if c.name == name)
    if judged or listed.taps:
        return tuple(judged or listed.taps)
    if names_taps_for_sglang_only(raw):
        raise MustFix(
            f"The head {name} names its taps in eagle_config only, which SGLang reads one layer later and vLLM not at all",
            where="generate.speculate", remedy=f"say which layers' inputs it reads: taps = [i, j, k] beside {name} in heads.candidates",
        )  # fmt: skip
    return read_config(raw, where=name, default_taps=default_taps)[1].taps


def config_of(context: Context, name: str, folder: Path, taps: tuple[int, ...] | None, source: Path | None = None) -> dict[str, Any]:
    """vLLM's speculative config. A head is written into `folder` as it would be published, with these taps (None: its own).

    source: the head's folder where it is none of the candidates.
    """
    settings = context.settings
    config: dict[str, Any] = {"num_speculative_tokens": settings.evaluate.draft_tokens}
    if name == NGRAM:
        shortest, longest = settings.heads.ngram_window
        return config | {"method": "ngram", "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    head = load_head(source or Path(context.locations()["heads"][name]), verifier=VerifierWeights.read(context.verifier_path), taps=taps)
    save_speculators(
        head, folder / name, verifier_name=context.fetched()["verifier"]["model"], draft_tokens=settings.evaluate.draft_tokens,
        verifier_architecture=VerifierFacts.read(context.verifier_path).architecture, dtype=getattr(torch, settings.verifier.dtype),
    )  # fmt: skip
    return config | {"method": "eagle3", "model": str(folder / name)}


def problems(context: Context, configs: Mapping[str, Mapping[str, Any]], default_taps: tuple[int, int, int]) -> list[str]:
    """For preflight: why nothing can draft as the settings say. configs: config.json of the candidates, as far as it is known."""
    try:
        name = chosen(context)
        if name is not None:
            refuse_sampling_on_cpu(context)
        if name in configs:
            taps_of(context, name, configs[name], default_taps)
    except JobError as error:
        return [error.sentence()]
    return []


def refuse_sampling_on_cpu(context: Context) -> None:
    """Drafts of sampled answers are verified by a Triton kernel, of greedy ones by compat's own code."""
    settings = context.settings
    share, generate = settings.prompts.thinking_share, settings.generate
    used = {"thinking": (share > 0, generate.thinking), "instant": (share < 1, generate.instant)}
    hot = [
        f"generate.{mode}.temperature = {sampling.temperature:g}"
        for mode, (asked, sampling) in used.items()
        if asked and sampling.temperature > 0
    ]
    if hot and not torch.cuda.is_available():
        raise MustFix(
            f"Without a GPU speculation verifies greedily only, and {' and '.join(hot)}", where=f"generate.speculate = {generate.speculate!r}",
            remedy='set the temperatures to 0, or generate.speculate = "off"',
        )  # fmt: skip


def _judged(context: Context) -> dict[str, Any]:
    path = context.path / "baseline.json"
    return read_json(path) if path.exists() else {}


@dataclass
class Counted:
    """vLLM's counters over one start of one split, kept in `speculation.json` beside those of earlier starts."""

    context: Context
    split: str
    engine: Any
    before: dict[str, Any]
    earlier: dict[str, list[dict[str, Any]]]
    begun: str = field(default_factory=now)
    kept_at: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(cls, context: Context, split: str, engine: Any, answers: int) -> "Counted | None":
        """None for an engine that does not speculate. answers: committed by earlier starts; without any their counts are of a split set aside."""
        counters = engine.speculation() if context.settings.generate.speculate != OFF else None
        if counters is None:
            return None
        path = context.path / FILE
        earlier = read_json(path) if path.exists() else {}
        if not answers:
            earlier.pop(split, None)
        return cls(context, split, engine, counters, earlier)

    def keep(self, answers: int, *, now_and_then: bool = False) -> None:
        """Write what this start counted so far; `answers` of it are committed."""
        if now_and_then and time.monotonic() - self.kept_at < KEEP_EVERY:
            return
        self.kept_at = time.monotonic()
        counters = self.engine.speculation()
        since = {key: counters[key] - self.before[key] for key in ("drafts", "draft_tokens")}
        since["accepted"] = [now_ - then for now_, then in zip(counters["accepted"], self.before["accepted"], strict=True)]
        entry = {"head": self.engine.drafter.name, "taps": self.engine.drafter.taps, "started": self.begun, "answers": answers, **since}
        write_json_atomically(self.context.path / FILE, self.earlier | {self.split: [*self.earlier.get(self.split, []), entry]})


def live(context: Context, split: str) -> dict[str, dict[str, Any]]:
    """Head -> what vLLM counted of it over all starts of a split: acceptance length over the steps that drafted, as vLLM gives it."""
    path, found = context.path / FILE, {}
    for entry in read_json(path).get(split, []) if path.exists() else []:
        sums = found.setdefault(
            entry["head"], {"drafts": 0, "draft_tokens": 0, "accepted": [0] * len(entry["accepted"]), "answers": 0, "starts": 0}
        )
        sums["starts"] += 1
        sums["taps"] = entry["taps"]
        for key in ("drafts", "draft_tokens", "answers"):
            sums[key] += entry[key]
        sums["accepted"] = [a + b for a, b in zip(sums["accepted"], entry["accepted"], strict=True)]
    for sums in found.values():
        sums["mean"] = length(sums["drafts"], sums["accepted"])
    return found


def length(drafts: int, accepted: list[int]) -> float | None:
    """Tokens a drafting step, the bonus token included: vLLM's mean acceptance length; None without a step."""
    return 1 + sum(accepted) / drafts if drafts else None
