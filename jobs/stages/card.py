"""The model card: what a person who finds the head needs to know, every figure from the run itself."""

import json
from typing import Any

from jobs.draft.model import HeadConfig
from jobs.run import Context

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

Mean acceptance length with {draft_tokens} drafted tokens (top-1, the bonus token included, so {most} is the most),
by exact replay over {sequences} held-out answers of the verifier, 95 % interval over prompts:

{table}

## How it was made

- Head: {shape}
- Taps: {taps} (EAGLE-3 ids: the residual stream at the INPUT of these layers)
- Data: {train_prompts} conversations from `{source}`{source_licence}; every answer written by the verifier itself
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
    licence, data_licence = settings.package.licence, settings.prompts.licence
    return CARD.format(
        name=settings.package.name, verifier=verifier["model"], revision=verifier["revision"], licence=f"license: {licence}\n" if licence else "",
        speculative=json.dumps({"method": "eagle3", "model": settings.package.name, "num_speculative_tokens": figures["draft_tokens"]}),
        draft_tokens=figures["draft_tokens"], most=figures["draft_tokens"] + 1, sequences=counts["evaluate"].get("sequences"), table=_table(figures),
        shape=f"one Llama layer, {config.heads} heads, {config.kv_heads} KV heads of {config.head_dim}, FFN {config.intermediate_size}, rope base {config.rope_theta:g}",
        taps=list(config.taps), train_prompts=counts["prompts"].get("train"), source=settings.prompts.source,
        source_licence=f" ({data_licence})" if data_licence else "", train_tokens=counts["vocab"].get("counted_tokens"),
        thinking_share=settings.prompts.thinking_share, thinking=_sampling(settings.generate.thinking), instant=_sampling(settings.generate.instant),
        epochs=settings.train.epochs, steps=counts["train"].get("steps"), tokens_per_step=settings.train.tokens_per_step, accumulate=settings.train.accumulate,
        ttt_steps=settings.train.ttt_steps, loss=settings.train.loss.replace("_", " "),
        start="from scratch" if settings.heads.warm_start == "none" or not settings.heads.candidates else f"warm start: {settings.heads.warm_start}",
        draft_vocab=config.draft_vocab_size, vocab=config.vocab_size, coverage=counts["vocab"].get("coverage", float("nan")),
        versions=", ".join(f"{name} {version}" for name, version in context.run.ledger["versions"].items()),
    )  # fmt: skip


def _sampling(sampling: Any) -> str:
    return f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"


def _table(figures: dict[str, Any]) -> str:
    rows = ["| head | acceptance length | 95 % interval | accepted at position 1, 2, … |", "|---|---|---|---|"]
    for name, figure in figures["heads"].items():
        length, rates = figure["acceptance_length"], " ".join("-" if rate is None else f"{rate:.3f}" for rate in figure["rates"])
        rows.append(f"| {name} | {length['mean']:.3f} | {length['low']:.3f} to {length['high']:.3f} | {rates} |")
    return "\n".join(rows)
