"""Baseline: what exists already, judged on the eval split before the train split is paid for.

Existing heads are judged under both readings of their tap ids: EAGLE-3 code and vLLM mean the
input of layer i, the worker inside speculators captured its output, and a published config does
not say which it was trained with. n-gram speculation and an untrained head are the floors. The
replay needs no verifier and runs while its engine idles.

The gate reads these figures and may end the run: exit code 0, verdict `no_go`, nothing published.
"""

from pathlib import Path
from typing import Any

from jobs.draft import formats
from jobs.draft.model import Eagle3Head, VerifierWeights
from jobs.errors import MustFix
from jobs.run import Context
from jobs.stages import judging
from jobs.stages.vocab import draft_vocabulary
from jobs.storage.states import StateStore
from jobs.verifier.engine import VerifierFacts

NAME = "baseline"
SETTINGS = (
    "heads", "gate.train_if_best_below", "evaluate.draft_tokens", "evaluate.bootstrap", "job.seed", "vocab",
    "train.heads", "train.kv_heads", "train.head_dim", "train.intermediate_size", "train.rope_theta", "train.norm_before_residual",
)  # fmt: skip


def inputs(context: Context) -> list[Path]:
    return [context.path / "fetched.json", context.states("eval") / "index.jsonl", context.states("eval") / "responses.jsonl"]


def outputs(context: Context) -> list[Path]:
    return [context.path / "baseline.json"]


def run(context: Context) -> dict[str, Any]:
    settings = context.settings
    store = StateStore(context.states("eval"))
    heads: dict[str, Any] = {}
    if settings.heads.ngram:
        heads["ngram"] = judging.figures(context, judging.judge_ngram(context, store))
    if settings.heads.untrained or settings.heads.candidates:
        verifier = VerifierWeights.read(context.verifier_path)
    if settings.heads.untrained:
        vocabulary = draft_vocabulary(context, "eval")
        head = untrained_head(context, verifier, vocabulary.draft_ids)
        heads["untrained"] = judging.figures(context, judging.judge_head(context, "untrained", head, store))
    for candidate in settings.heads.candidates:
        figure = _judge_candidate(context, candidate.name, verifier, store)
        if figure is not None:
            heads[candidate.name] = figure
    best = best_head(context, heads)
    context.run.ledger["gate"] = gate(context, best, heads)
    judging.write_figures(context, context.path / "baseline.json", heads, best=best)
    if best is not None:
        context.run.ledger["acceptance"]["baseline"] = heads[best]["acceptance_length"]
        context.run.save()
    return {"heads": len(heads), "sequences": len(store.ids()), "best": best}


def untrained_head(context: Context, verifier: VerifierWeights, draft_ids: Any) -> Eagle3Head:
    """The head from scratch, as training will start it."""
    facts = VerifierFacts.read(context.verifier_path)
    return Eagle3Head.from_scratch(formats.config_from_scratch(facts, context.settings, len(draft_ids)), verifier, draft_ids, context.settings.job.seed)


def _judge_candidate(context: Context, name: str, verifier: VerifierWeights, store: StateStore) -> dict[str, Any] | None:
    """The better of the two readings of the head's tap ids; None for a head that cannot be judged."""
    folder = Path(context.locations()["heads"][name])
    try:
        head = formats.load_head(folder, verifier=verifier)
    except MustFix as error:
        # One odd head must not end a run that can judge the others.
        context.note(f"baseline: {name} is left out: {error}")
        return None
    readings = {}
    for shift in (0, 1):
        taps = tuple(tap + shift for tap in head.config.taps)
        if set(taps) <= set(store.layout.taps):
            readings[taps] = judging.judge_head(context, f"{name}-taps-{'-'.join(map(str, taps))}", formats.with_taps(head, taps), store)
    if not readings:
        context.note(f"baseline: {name} reads taps {list(head.config.taps)}, the eval states hold {list(store.layout.taps)}")
        return None
    taps = max(readings, key=lambda t: readings[t].acceptance_length)
    judging.keep(context, name, readings[taps])
    return judging.figures(context, readings[taps]) | {"taps": list(taps), "readings": {"-".join(map(str, t)): r.acceptance_length for t, r in readings.items()}}


def best_head(context: Context, heads: dict[str, Any]) -> str | None:
    """The best existing way to speculate: candidates and n-gram, not the untrained head."""
    existing = {name: figure for name, figure in heads.items() if name != "untrained"}
    return max(existing, key=lambda name: existing[name]["acceptance_length"]["mean"], default=None)


def gate(context: Context, best: str | None, heads: dict[str, Any]) -> dict[str, Any]:
    """Go or no-go, with its why."""
    threshold = context.settings.gate.train_if_best_below
    if threshold is None or best is None:
        why = "no threshold is set" if threshold is None else "no existing head could be judged"
        return {"verdict": "go", "why": why, "forced": False}
    mean = heads[best]["acceptance_length"]["mean"]
    if mean < threshold:
        return {"verdict": "go", "why": f"the best existing head, {best}, accepts {mean:.3f} tokens a step, under gate.train_if_best_below = {threshold}", "forced": False}
    saved = "the train split, the training and its publication are saved"
    why = f"{best} already accepts {mean:.3f} tokens a step, gate.train_if_best_below is {threshold}; {saved}"
    return {"verdict": "no_go", "why": why, "forced": context.force}
