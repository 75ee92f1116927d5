"""Settings that are fine alone and wrong together."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.settings import Settings


def contradictions(settings: "Settings") -> list[str]:
    """Settings that are fine alone and wrong together: every one found, so that one look mends all."""
    v, p, g, t = settings.verifier, settings.prompts, settings.generate, settings.train
    found = []
    if p.max_prompt_tokens >= v.max_model_len:
        found.append(
            f"prompts.max_prompt_tokens = {p.max_prompt_tokens} leaves no room for an answer within verifier.max_model_len = {v.max_model_len}"
        )
    replicas = v.data_parallel_size or v.tensor_parallel_size
    if v.parallel.startswith("dp") and (v.tensor_parallel_size < 2 or v.tensor_parallel_size % replicas):
        found.append(
            f"verifier.parallel = {v.parallel!r} needs 2 or more GPUs, and {replicas} replicas do not divide verifier.tensor_parallel_size = {v.tensor_parallel_size}"
        )
    if v.data_parallel_size and not v.parallel.startswith("dp"):
        found.append(f'verifier.data_parallel_size = {v.data_parallel_size} is for verifier.parallel = "dp" or "dp_ep", not {v.parallel!r}')
    if v.taps is not None and len(v.taps) != 3:
        found.append(f"verifier.taps names {len(v.taps)} layers, an EAGLE-3 head reads 3")
    if v.taps is not None and len(set(v.taps)) != len(v.taps):
        found.append(f"verifier.taps = {list(v.taps)} names a layer twice")
    if sum(m.samples for m in p.mix) >= p.train_samples:
        found.append(
            f"prompts.mix takes {sum(m.samples for m in p.mix)} of prompts.train_samples = {p.train_samples}, nothing is left for prompts.source"
        )
    if t.max_length > t.tokens_per_step:
        found.append(f"train.max_length = {t.max_length} does not fit into train.tokens_per_step = {t.tokens_per_step}")
    if t.heads and t.kv_heads and t.heads % t.kv_heads:
        found.append(f"train.heads = {t.heads} is no multiple of train.kv_heads = {t.kv_heads}")
    if g.backend == "speculators" and not g.responses:
        found.append('generate.backend = "speculators" only extracts states of existing responses: name them in generate.responses')
    found += _of_endpoints(settings)
    found += _of_speculation(settings)
    if t.fp8 and t.precision != "bf16":
        found.append(f"train.fp8 and train.precision = {t.precision!r} contradict each other: FP8 stands in the place of bf16")
    if t.fp8 and t.tokens_per_step % 16:
        found.append(f"train.fp8 needs train.tokens_per_step = {t.tokens_per_step} to be a multiple of 16")
    e = settings.evaluate
    if any(c < 1 for c in e.live.concurrencies) or len(set(e.live.concurrencies)) != len(e.live.concurrencies):
        found.append(f"evaluate.live.concurrencies = {list(e.live.concurrencies)} are not different numbers of requests, each 1 or more")
    if any(not 0 < share < 1 for share in e.scaling) or len(set(e.scaling)) != len(e.scaling):
        found.append(f"evaluate.scaling = {list(e.scaling)} are not different shares between 0 and 1; the whole is the head itself")
    standard = [s.name for s in p.standard]
    if len(set(standard)) != len(standard) or any(not re.fullmatch(r"[\w-]+", name) for name in standard):
        found.append("prompts.standard needs different names of letters, digits, - and _")
    names = [c.name for c in settings.heads.candidates]
    if len(set(names)) != len(names):
        found.append("heads.candidates uses a name twice")
    if {"untrained", "ngram", "trained", "baseline", "none", "trial", "off", "best"} & set(names):
        found.append("heads.candidates may not be called untrained, ngram, trained, baseline, none, trial, off or best")
    if settings.heads.warm_start not in ("best", "none", *names):
        found.append(f"heads.warm_start = {settings.heads.warm_start!r} is neither `best`, `none` nor one of {names}")
    if settings.evaluate.min_gain_over_untrained is not None and not settings.heads.untrained:
        found.append("evaluate.min_gain_over_untrained needs heads.untrained = true")
    if settings.evaluate.min_gain_over_ngram is not None and not settings.heads.ngram:
        found.append("evaluate.min_gain_over_ngram needs heads.ngram = true")
    if settings.package.sglang and t.norm_before_residual and (settings.heads.warm_start == "none" or not names):
        found.append("package.sglang needs train.norm_before_residual = false: SGLang's layer takes the raw feature and has no switch")
    if settings.push.uri is not None and not settings.push.uri.startswith(("s3://", "file:///")):
        found.append(f"push.uri = {settings.push.uri!r} starts with neither s3:// nor file:///")
    if settings.push.backup_uri is not None and not settings.push.backup_uri.startswith(("s3://", "file:///")):
        found.append(f"push.backup_uri = {settings.push.backup_uri!r} starts with neither s3:// nor file:///")
    if settings.rental.spending_limit is not None and not settings.rental.price_per_hour:
        found.append("rental.spending_limit needs rental.price_per_hour: nothing is spent at a price of 0")
    found += _of_prices(settings)
    saved = settings.push.backup_uri is not None and settings.push.backup != "off"
    if settings.rental.on_finish and settings.push.uri is None and not saved:
        found.append(
            "rental.on_finish would end the machine with the only head on it: give push.uri (or push.backup_uri) an address that outlives it, s3://… or a file:///… of another disk"
        )
    return found


def _of_prices(settings: "Settings") -> list[str]:
    if not settings.rental.prices:
        return []
    from jobs.reporting.machines import MACHINES, called

    return [f"rental.prices names {name!r}, `plan` knows {', '.join(MACHINES)}" for name in settings.rental.prices if called(name) is None]


def _of_endpoints(settings: "Settings") -> list[str]:
    g, found = settings.generate, []
    if g.endpoints and g.responses:
        found.append("generate.endpoints would answer what generate.responses already answers: give one of them")
    for url in g.endpoints:
        if not re.fullmatch(r"https?://[^\s/@]+(/[^\s@]*)?", url):
            # The value is not repeated: it may hold a password.
            found.append(
                "generate.endpoints needs addresses such as http://host:8000, without a user or key in them: a key belongs into the environment variable VLLM_API_KEY"
            )
    if len(set(g.endpoints)) != len(g.endpoints):
        found.append("generate.endpoints names a server twice")
    return found


def _of_speculation(settings: "Settings") -> list[str]:
    g, names = settings.generate, [c.name for c in settings.heads.candidates]
    if g.speculate == "off":
        return []
    found = []
    if g.speculate not in ("ngram", "best", *names):
        found.append(f"generate.speculate = {g.speculate!r} is neither `off`, `ngram`, `best` nor one of {names}")
    if g.speculate == "best" and not names:
        found.append('generate.speculate = "best" needs a head in heads.candidates, or take ngram')
    if g.responses or g.backend == "speculators":
        found.append(
            f"generate.speculate = {g.speculate!r} drafts while the verifier decodes, and with generate.responses it decodes nothing"
        )
    if settings.verifier.parallel.startswith("dp"):
        found.append(
            f"generate.speculate = {g.speculate!r} has not been tried with verifier.parallel = {settings.verifier.parallel!r}: choose off, or tp"
        )
    if g.endpoints:
        found.append(
            f"generate.speculate = {g.speculate!r} is for this machine's engine, and with generate.endpoints others decode: give them their own --speculative-config"
        )
    return found
