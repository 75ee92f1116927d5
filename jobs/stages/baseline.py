"""Baseline: what exists already, judged on the eval split before the train split is paid for.

Existing heads are judged under both readings of their tap ids: EAGLE-3 code and vLLM mean the
input of layer i, the worker inside speculators captured its output, and a published config does
not say which it was trained with. n-gram speculation and an untrained head are the floors. The
replay needs no verifier and runs while its engine idles. No speculation (`none`: one token a step, by
definition) stands beside them in the ledger only, for a reader to compare with: it is no head, so it has
no judgement, cannot be the best one or a warm start, and is not published.

The gate reads these figures and may end the run: exit code 0, verdict `no_go`, nothing published.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.context import Context
from jobs.draft.formats import load_head, tap_readings
from jobs.draft.replay import Candidate, Judgement
from jobs.draft.rope import served_alike
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix
from jobs.stages import gate, initial, judging, speculation
from jobs.stages.vocab import draft_vocabulary
from jobs.storage.states import StateStore
from jobs.verifier.facts import VerifierFacts

NAME = "baseline"
NO_SPECULATION = 1.0  # tokens a step of the verifier alone
SETTINGS = (
    "heads", "gate", "verifier.dtype", "evaluate.draft_tokens", "evaluate.bootstrap", "prompts.domains", "job.seed", "vocab",
    "train.heads", "train.kv_heads", "train.head_dim", "train.intermediate_size", "train.rope_theta", "train.norm_before_residual",
)  # fmt: skip


def inputs(context: Context) -> list[Path]:
    return [context.path / "fetched.json", context.states("eval") / "index.jsonl", context.states("eval") / "responses.jsonl"]


def outputs(context: Context) -> list[Path]:
    return [context.path / "baseline.json"]


def run(context: Context) -> dict[str, Any]:
    store = StateStore(context.states("eval"))
    readings = _readings(context, store)
    judged = judging.judge_all(context, {key: candidate for of in readings.values() for key, candidate in of.items()}, store)
    heads: dict[str, Any] = {}
    if context.settings.heads.ngram:
        heads["ngram"] = judging.figures(context, judging.judge_ngram(context, store))
    for name, of in readings.items():
        heads[name] = _better_reading(context, name, of, judged)
    _beside_live(context, heads, judged)
    best = best_head(heads)
    context.run.ledger["acceptance"]["none"] = {"mean": NO_SPECULATION}
    judging.write_figures(context, context.path / "baseline.json", heads, best=best.name if best else None)
    if best is not None:
        context.run.ledger["acceptance"]["baseline"] = heads[best.name]["acceptance_length"]
    context.run.ledger["gate"] = gate.decide(context, best)
    context.run.save()
    context.note(f"gate: {context.run.ledger['gate']['verdict']}: {context.run.ledger['gate']['why']}")
    return {
        "heads": len(heads),
        "sequences": len(judging.own_ids(store)),
        "best": best.name if best else None,
        "verdict": context.run.ledger["gate"]["verdict"],
    }


def _readings(context: Context, store: StateStore) -> dict[str, dict[str, Candidate]]:
    """Head name -> {key of a reading: head and taps}; a head that cannot be judged is noted and left out.

    MustFix: it is the one that `heads.warm_start` names. Nothing can be trained from it, and the train split is not paid for yet.
    """
    settings, found = context.settings, {}
    device = judging.replay_device(context)
    if settings.heads.untrained or settings.heads.candidates:
        verifier = VerifierWeights.read(context.verifier_path)
    if settings.heads.untrained:
        head = initial.scratch(context, verifier, draft_vocabulary(context, "eval").draft_ids).to(device)
        found["untrained"] = {"untrained": Candidate(head, head.config.taps)}
    layers = VerifierFacts.read(context.verifier_path).layers
    for listed in settings.heads.candidates:
        try:
            head = load_head(
                Path(context.locations()["heads"][listed.name]), verifier=verifier, taps=listed.taps, default_taps=store_default(context)
            ).to(device)
        except MustFix as error:
            if listed.name == settings.heads.warm_start:
                raise
            # One odd head must not end a run that can judge the others.
            context.note(f"baseline: {listed.name} is left out: {error}")
            continue
        if not served_alike(head.config.rope_scaling):
            context.note(
                f"baseline: {listed.name} scales its rope by a YaRN factor that vLLM 0.16.0 leaves out: served, it accepts less than is judged here"
            )
        meant = [listed.taps] if listed.taps else tap_readings(head.config.taps, layers)
        readings = [taps for taps in meant if set(taps) <= set(store.layout.taps)]
        if not readings:
            told = f"{listed.name} reads taps {list(head.config.taps)}, the eval states hold {list(store.layout.taps)}"
            if listed.name == settings.heads.warm_start:
                raise MustFix(f"Training cannot start: {told}", where="heads.warm_start", remedy="choose another head, `best` or `none`")
            context.note(f"baseline: {told}: it is left out")
            continue
        found[listed.name] = {_key(listed.name, taps): Candidate(head, taps) for taps in readings}
    return found


def _key(name: str, taps: Sequence[int]) -> str:
    return f"{name}-taps-{'-'.join(map(str, taps))}"


def store_default(context: Context) -> tuple[int, int, int]:
    """What a head without tap ids of its own is taken to read: vLLM's default for this verifier."""
    return VerifierFacts.read(context.verifier_path).default_taps


def _better_reading(context: Context, name: str, readings: dict[str, Candidate], judged: dict[str, Judgement]) -> dict[str, Any]:
    means = {key: judging.own(judged[key]).mean_acceptance_length for key in readings}
    best = max(means, key=means.__getitem__)
    judging.keep(context, judged[best], name)
    lengths = {"-".join(map(str, readings[key].taps)): mean for key, mean in means.items()}
    return judging.figures(context, judged[best]) | {"taps": list(readings[best].taps), "readings": lengths}


def _beside_live(context: Context, heads: dict[str, Any], judged: dict[str, Judgement]) -> None:
    """What vLLM counted while a head drafted for the eval split (`generate.speculate`), beside its replay over the same answers.

    Both over the steps that drafted anything. They differ by what was accepted past the end of an answer, which vLLM counts,
    and by steps of starts that were killed or of requests that were preempted.
    """
    for name, counted in speculation.live(context, "eval").items():
        judgement = judged.get(_key(name, counted["taps"])) if counted["taps"] else judging.kept(context, name) if name in heads else None
        if judgement is None or name not in heads:
            continue
        walk = judgement.walk
        replay = {
            "mean": speculation.length(walk.drafts, walk.accepted),
            "drafts": walk.drafts,
            "draft_tokens": walk.draft_tokens,
            "accepted": list(walk.accepted),
        }
        heads[name]["live"] = counted | {"replay": replay}
        if counted["mean"] is not None and replay["mean"] is not None:
            context.note(
                f"baseline: {name} drafted for the eval split and accepted {counted['mean']:.3f} tokens a step by vLLM's count, {replay['mean']:.3f} by replay"
            )
        if counted["taps"] and counted["taps"] != heads[name]["taps"]:
            context.note(
                f"baseline: {name} drafted with taps {counted['taps']} and accepts more with {heads[name]['taps']}, which a continued run will use"
            )


def best_head(heads: dict[str, Any]) -> gate.Best | None:
    """The best existing way to speculate: candidates and n-gram, not the untrained head."""
    lengths = {name: figure["acceptance_length"]["mean"] for name, figure in heads.items() if name != "untrained"}
    return max((gate.Best(name, length) for name, length in lengths.items()), key=lambda best: best.length, default=None)
