"""The model card: what a person who finds the head needs to know, every figure from the run itself."""

import json
from typing import Any

from jobs.context import Context
from jobs.draft.model import HeadConfig
from jobs.reporting.public_cards import cards_for, differences
from jobs.settings import PromptsSettings, Settings
from jobs.stages import initial
from jobs.wording import counted

CARD = """---
library_name: vllm
tags: [eagle3, speculative-decoding, draft-model]
base_model: {verifier}
{licence}---

# {name}

An EAGLE-3 draft head for `{verifier}` (revision `{revision}`), for speculative decoding.

## Use

```
vllm serve {verifier} --speculative-config '{speculative}'
```

## How good it is

Mean acceptance length with {draft_tokens} drafted tokens (top-1, the bonus token included, so 1 is no speculation and {most} the most),
by exact replay over {sequences} held-out answers of the verifier, 95 % interval over prompts:

{table}
{standard}{live}
## How it was made

- Head: {shape}
- Taps: {taps} (EAGLE-3 ids: the residual stream at the INPUT of these layers)
- Data: {train_prompts} conversations from {sources}; every answer written by the verifier itself
  ({train_tokens} tokens; thinking mode {thinking_share:.0%}, sampling {thinking} / {instant})
- Training: {epochs:g} epochs, {steps} steps of {tokens_per_step} x {accumulate} tokens, {ttt_steps} TTT steps fed with true tokens, {loss},
  {start}
- Draft vocabulary: {draft_vocab} of {vocab} tokens, {coverage:.2%} of the response tokens covered
- Software: {versions}

Settings, versions and the sha256 of every file are in `manifest.json`.
"""


def model_card(context: Context, config: HeadConfig, figures: dict[str, Any]) -> str:
    settings, stages, verifier = context.settings, context.run.ledger["stages"], context.fetched()["verifier"]
    counts = {name: record.get("counts") or {} for name, record in stages.items()}
    licence = settings.package.licence
    return CARD.format(
        name=settings.package.name, verifier=verifier["model"], revision=verifier["revision"], licence=f"license: {licence}\n" if licence else "",
        speculative=json.dumps({"method": "eagle3", "model": settings.package.name, "num_speculative_tokens": figures["draft_tokens"]}),
        draft_tokens=figures["draft_tokens"], most=figures["draft_tokens"] + 1, sequences=counts["evaluate"].get("sequences"), table=_table(figures),
        standard=_standard(settings, figures), live=_live(figures.get("live")),
        shape=f"one Llama layer, {config.heads} heads, {config.kv_heads} KV heads of {config.head_dim}, FFN {config.intermediate_size}, rope base {config.rope_theta:g}",
        taps=list(config.taps), train_prompts=counts["prompts"].get("train"), sources=_sources(settings.prompts),
        train_tokens=counts["vocab"].get("counted_tokens"),
        thinking_share=settings.prompts.thinking_share, thinking=_sampling(settings.generate.thinking), instant=_sampling(settings.generate.instant),
        epochs=settings.train.epochs, steps=counts["train"].get("steps"), tokens_per_step=settings.train.tokens_per_step, accumulate=settings.train.accumulate,
        ttt_steps=settings.train.ttt_steps, loss=settings.train.loss.replace("_", " "),
        start=f"warm start: {start.name}" if (start := initial.chosen(context)) else "from scratch",
        draft_vocab=config.draft_vocab_size, vocab=config.vocab_size, coverage=counts["vocab"].get("coverage", float("nan")),
        versions=", ".join(f"{name} {version}" for name, version in context.run.ledger["versions"].items()),
    )  # fmt: skip


def _sources(prompts: PromptsSettings) -> str:
    """Every source of the train split with its licence; what a mix takes of each is said, the rest is the first one's."""
    named = [f"`{prompts.source}`" + (f" ({prompts.licence})" if prompts.licence else "")]
    for part in prompts.mix:
        named.append(f"`{part.source}` ({part.samples:,} at most{f', {part.licence}' if part.licence else ''})")
    return ", ".join(named)


def _standard(settings: Settings, figures: dict[str, Any]) -> str:
    """Standard sets in the field's convention, the public cards beside them, and what differs."""
    judged = {name: figure["standard"] for name, figure in figures["heads"].items() if figure.get("standard")}
    if not judged:
        return ""
    sets = list(dict.fromkeys(name for of in judged.values() for name in of))
    rows = [f"| head | {' | '.join(sets)} |", "|---" * (len(sets) + 1) + "|"]
    rows += [f"| {name} | {' | '.join(_length(of.get(each)) for each in sets)} |" for name, of in judged.items()]
    cards = cards_for(settings)
    for card in cards:
        lengths = (f"{card.lengths[each]:.3f}" if each in card.lengths else "-" for each in sets)
        rows.append(f"| {card.model}, by its card{f' ({card.remark})' if card.remark else ''} | {' | '.join(lengths)} |")
    said = ["", *(f"- {line}" for line in differences(settings))] if cards else []
    heading = "### Standard prompts, never trained on"
    return "\n".join(("", heading, "", *rows, *(["", "What differs from the cards:"] if cards else []), *said, ""))


def _length(figure: dict[str, Any] | None) -> str:
    if not figure or figure["acceptance_length"]["mean"] is None:
        return "-"
    length = figure["acceptance_length"]
    interval = f" ({length['low']:.3f} to {length['high']:.3f})" if "low" in length else ""
    return f"{length['mean']:.3f}{interval}, {counted(figure['prompts'], 'prompts')}"


def _live(live: dict[str, Any] | None) -> str:
    """Speed through the real server, plain and with the winner."""
    if not live or not live["speedup"]:
        return ""
    rows = ["| concurrency | way | output tokens/s | median inter-token ms | acceptance length | speed-up |", "|---|---|---|---|---|---|"]
    for concurrency in live["speedup"]:
        for way, entry in live["ways"].items():
            run = entry["runs"][concurrency]
            accepted = f"{run['spec_decode_acceptance_length']:.3f}" if "spec_decode_acceptance_length" in run else "-"
            gained = f"{live['speedup'][concurrency]:.2f}" if way == live["winner"] else "-"
            rows.append(f"| {concurrency} | {way} | {run['output_throughput']:.1f} | {run['median_itl_ms']:.2f} | {accepted} | {gained} |")
    said = f"`vllm serve` and `vllm bench serve`, {live['requests']} prompts, temperature {live['sampling']['temperature']:g}; acceptance from the engine's counters."
    if "same_answers" in live:
        said += f" Greedy answers equal to plain decoding's: {', '.join(f'{share:.0%}' for share in live['same_answers']['winner_and_plain'].values())}."
    return "\n".join(("", "### Through the real server", "", said, "", *rows, ""))


def _sampling(sampling: Any) -> str:
    return f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"


def _table(figures: dict[str, Any]) -> str:
    rows = ["| head | acceptance length | 95 % interval | accepted at position 1, 2, … |", "|---|---|---|---|"]
    for name, figure in figures["heads"].items():
        length, rates = figure["acceptance_length"], " ".join("-" if rate is None else f"{rate:.3f}" for rate in figure["rates"])
        rows.append(f"| {name} | {length['mean']:.3f} | {length['low']:.3f} to {length['high']:.3f} | {rates} |")
    return "\n".join(rows)
