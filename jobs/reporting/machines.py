"""What a machine does per second: the built-in table, how unmeasured machines are scaled, calibration.

One place for every figure, each with its source. Three kinds are kept apart, because money is decided
on them: MEASURED (somebody ran it), PROJECTION (made by the owners of the local box for 8 x B300), and
SCALED (by the two formulas below from a measured one and vendor data sheets). Prices are never built
in: they change weekly and belong to the settings.

How a decode or prefill rate is scaled from the measured 8 x RTX PRO 6000 box: there, all-reduce over
PCIe is 51.5 % of the time; the rest is limited by memory bandwidth (decode) or bf16 arithmetic
(prefill). NVLink is taken to shorten the all-reduce part 3 to 10 times, the rest goes with the
data sheet:  speed-up = 1 / (0.515 / n + 0.485 / r),  n in 3..10, r the ratio of bandwidth or FLOP/s.
For B300 that gives 5,500 to 9,600 generated tokens/s; the projection says 5,000 to 10,000, so the two
agree and the wider one is kept.

How a training step is modelled: seconds = fixed + per_token x tokens; `fixed` is the optimizer and the
launches, `per_token` the arithmetic. Fast and slow are two such lines. Several GPUs exchange fp32 gradients
and weights after the backward pass, in a ring: 2 (n - 1) / n of their bytes over the slowest link, and each
updates 1 / n of the weights. Two H200 took 261 ms a step where one took 249: 15.7 ms of exchange less 7.4 of
update, and 4 that nobody explained, which are counted with the exchange as its low end (NOTES.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jobs.errors import MustFix
from jobs.reporting import figures
from jobs.reporting.workload import KIMI_K25, REFERENCE_FLOP, TINY, Range, VerifierSize, head_size, training_flop
from jobs.settings import Settings

MEASURED_SPREAD = 1.1  # two runs of the same thing on the same box differ by about a tenth
ALL_REDUCE_SHARE = 0.515
NVLINK_GAIN = (3.0, 10.0)
# Decode rate over concurrency c is A*c/(c+h): through 60 tok/s alone and 1,536 tok/s at 200 requests.
MEASURED_CONCURRENCY = 200
HALF_RATE_CONCURRENCY = 28.2
# What an engine start takes beside reading the weights: imports, process groups, graphs. Not measured at this size.
ENGINE_SECONDS = Range(10, 60)


def share_of_peak(concurrency: float) -> float:
    return concurrency / (concurrency + HALF_RATE_CONCURRENCY)


@dataclass(frozen=True)
class StepCost:
    """Seconds of a training step of one GPU: `fixed` plus `per_token` for every token of the packed row."""

    fixed: float
    per_token: float

    def seconds(self, tokens: float, rows: float = 1.0, flop_ratio: float = 1.0) -> float:
        """A step of `rows` packed rows of `tokens`; `flop_ratio` is this head's FLOP a token to the anchor's."""
        return self.fixed + rows * tokens * self.per_token * flop_ratio

    def times(self, factor: float) -> "StepCost":
        return StepCost(self.fixed * factor, self.per_token * factor)


@dataclass(frozen=True)
class Rates:
    """Rates of one machine for one verifier. Ranges in tokens/s, seconds or bytes/s; `sources` says whence each."""

    load_seconds: Range  # engine start until the first token, once a start
    extract: Range  # tokens/s, prefill with states kept
    generate: Range  # response tokens/s at 200 concurrent requests
    step_fast: StepCost
    step_slow: StepCost
    disk: Range = Range(1e9, 6e9)  # bytes/s read or written; one to several NVMe drives, not measured
    exchange: Range = Range(20e9, 50e9)  # bytes/s in a ring of GPUs; PCIe 5 x 16 through the host, not measured
    update: float = 0.0  # seconds for clipping and updating one parameter, divided among GPUs
    step_tokens: float = 4096.0  # the step size at which the two lines were measured
    verifier: VerifierSize = KIMI_K25
    tokens_per_sample: float | None = None
    response_share: float | None = None
    spread: float = 1.0  # run-to-run factor on times of measured rates
    sources: tuple[str, ...] = ()

    def generate_at(self, concurrency: int) -> Range:
        """Response tokens/s with so many requests decoded at once; beyond 200 the low side gains nothing."""
        gain = share_of_peak(concurrency) / share_of_peak(MEASURED_CONCURRENCY)
        return Range(self.generate.low * min(gain, 1.0), self.generate.high * gain)

    def step_seconds(self, tokens: float, rows: float, flop: float) -> Range:
        ratio = flop / REFERENCE_FLOP
        times = sorted(step.seconds(tokens, rows, ratio) for step in (self.step_fast, self.step_slow))
        return Range(times[0] / self.spread, times[1] * self.spread)

    def exchange_seconds(self, trained: float, gpus: int) -> Range:
        """Seconds that so many GPUs add to a step: gradients and weights exchanged, less the part of the update that the others do."""
        exchange, elsewhere = Range.exactly(2 * (gpus - 1) / gpus * 4 * trained).over(self.exchange), (1 - 1 / gpus) * self.update * trained
        return Range(max(exchange.low - elsewhere, 0.0), max(exchange.high - elsewhere, 0.0))

    def per_second(self, rate: Range) -> Range:
        return Range(rate.low / self.spread, rate.high * self.spread)


@dataclass(frozen=True)
class Machine:
    """A machine type. `price_per_hour` None means that the person has not set one (`rental.price_per_hour`)."""

    name: str
    gpus: int
    gpu_names: tuple[str, ...]  # substrings by which a run's ledger is recognised
    gpu_memory_gb: int
    bf16_tflops: float  # dense, one GPU, data sheet
    memory_tb_per_second: float  # one GPU, data sheet
    link_gbps: float
    rates: Rates
    price_per_hour: float | None = None
    currency: str = "USD"


def scaled(rate: float, ratio: float) -> Range:
    """A rate measured on the PCIe box, on an NVLink machine `ratio` times as fast per GPU (see the module)."""
    low, high = (1 / (ALL_REDUCE_SHARE / gain + (1 - ALL_REDUCE_SHARE) / ratio) for gain in NVLINK_GAIN)
    return Range(rate * low, rate * high)


# Data sheets (dense bf16 TFLOP/s, memory TB/s): RTX PRO 6000 Blackwell 504 and 1.79; H200 989 and 4.8; B200 and B300 2,250 and 8.
RTX_FLOPS, RTX_BANDWIDTH = 503.8, 1.792
LOCAL_EXTRACT, LOCAL_GENERATE, LOCAL_LOAD = 2912.0, 1536.0, 22.5 * 60
LOCAL_STEP_TOKENS, LOCAL_STEP_SECONDS = 503.0, 27.7 * 60 / 9500
# H200, states in GPU memory, head of the real size: 34, 133, 250 and 967 ms at 512, 4,096, 8,192 and 32,768 tokens (tests/benchmarks/training_rate.py).
H200_STEP = StepCost(fixed=0.017, per_token=28.6e-6)
# The same card, speculators' step: 48, 92, 157 and 289 ms at 512, 2,048, 4,096 and 8,192 tokens. What ours may fall back to on another card.
H200_STEP_SLOW = StepCost(fixed=0.026, per_token=32.2e-6)
H200_UPDATE = 12.4e-12  # 14.8 ms for 1.19 B parameters; goes with the memory's bandwidth
NVLINK_EXCHANGE = Range(237e9, 303e9)  # two H200: 4.76 GB in 20.1 and in 15.7 ms
RTX_PER_TOKEN = H200_STEP.per_token * 989 / RTX_FLOPS
PROJECTED_STEPS = (10.0, 12.0)  # per second, one sample of about 503 tokens, for B300

RTX_RATES = Rates(
    load_seconds=Range.exactly(LOCAL_LOAD),
    extract=Range.exactly(LOCAL_EXTRACT),
    generate=Range.exactly(LOCAL_GENERATE),
    step_fast=StepCost(LOCAL_STEP_SECONDS - LOCAL_STEP_TOKENS * RTX_PER_TOKEN, RTX_PER_TOKEN),
    step_slow=StepCost(0.0, LOCAL_STEP_SECONDS / LOCAL_STEP_TOKENS),
    step_tokens=LOCAL_STEP_TOKENS,
    update=H200_UPDATE * 4.8 / RTX_BANDWIDTH,
    spread=MEASURED_SPREAD,
    sources=(
        "MEASURED on this machine: engine start 22.5 min, extraction 2,912 tok/s, generation 1,536 tok/s at 200 requests; "
        "training 9,500 steps of one sample (503 tokens) in 27.7 min on one GPU",
        "larger steps than 503 tokens: between all the extra at H200's arithmetic scaled by bf16 rate and no gain at all",
    ),
)
H200_RATES = Rates(
    load_seconds=Range(15 * 60, LOCAL_LOAD),
    extract=scaled(LOCAL_EXTRACT, 989 / RTX_FLOPS),
    generate=scaled(LOCAL_GENERATE, 4.8 / RTX_BANDWIDTH),
    step_fast=H200_STEP,
    step_slow=H200_STEP_SLOW,
    exchange=NVLINK_EXCHANGE,
    update=H200_UPDATE,
    sources=(
        "training step MEASURED on one H200 with states in GPU memory: ours (fast side), speculators 0.4.0.1 (slow side); exchange of gradients and weights on two",
        "extraction and generation SCALED from 8 x RTX PRO 6000; engine start between the B300 projection's best and the local 22.5 min",
    ),
)
B300_RATES = Rates(
    load_seconds=Range(15 * 60, 18 * 60),
    extract=Range(8000, 15000),
    generate=Range(5000, 10000),
    step_fast=StepCost(H200_STEP.fixed * 4.8 / 8, H200_STEP.per_token * 989 / 2250),
    step_slow=StepCost(1 / PROJECTED_STEPS[0] - LOCAL_STEP_TOKENS * H200_STEP.per_token, H200_STEP.per_token),
    exchange=Range(NVLINK_EXCHANGE.low, 2 * NVLINK_EXCHANGE.high),  # NVLink 5 has twice the H200's data sheet rate
    update=H200_UPDATE * 4.8 / 8,
    sources=(
        "PROJECTION for 8 x B300: engine start 15 to 18 min, extraction 8,000 to 15,000 tok/s, generation 5,000 to 10,000 tok/s",
        "training, slow side: the projection's 10 steps/s of 503 tokens, which is 1.5 to 2 times the local loop with its data wait; "
        "fast side: the H200's measured step SCALED by data sheet, which shows the projection to be cautious (an H200 already does 18 steps/s)",
    ),
)
B200_RATES = replace(
    B300_RATES,
    sources=(
        "SCALED: a B200 has the bf16 rate and memory bandwidth of a B300 (not its capacity: 180 against 288 GB), so the "
        "B300 PROJECTION is used unchanged: engine start 15 to 18 min, extraction 8,000 to 15,000, generation 5,000 to 10,000 tok/s",
        B300_RATES.sources[1],
    ),
)

# Without a GPU: the tiny verifier on a few cores. 66 GFLOP/s were reached training a head of that size on two.
CPU_RATES = Rates(
    load_seconds=Range(5, 60),
    extract=Range(1000, 20000),
    generate=Range(200, 4000),
    step_fast=StepCost(0.005, REFERENCE_FLOP / 150e9),
    step_slow=StepCost(0.05, REFERENCE_FLOP / 20e9),
    disk=Range(0.1e9, 2e9),
    verifier=TINY,
    sources=("GUESS around what two cores reached in training (66 GFLOP/s); calibrate with a finished smoke run",),
)

MACHINES = {
    "8x-b300": Machine("8 x B300", 8, ("B300",), 288, 2250, 8.0, 5.0, B300_RATES),
    "8x-b200": Machine("8 x B200", 8, ("B200",), 180, 2250, 8.0, 5.0, B200_RATES),
    "8x-h200": Machine("8 x H200", 8, ("H200",), 141, 989, 4.8, 5.0, H200_RATES),
    "8x-rtx-pro-6000": Machine("8 x RTX PRO 6000", 8, ("RTX PRO 6000",), 96, RTX_FLOPS, RTX_BANDWIDTH, 5.0, RTX_RATES),
    "cpu": Machine("CPU only", 0, (), 0, 0.07, 0.05, 1.0, CPU_RATES),
}


def called(name: str) -> Machine | None:
    """The table's machine of this name (`rental.machine`), which may be its key."""
    return next((found for key, found in MACHINES.items() if name.lower() in (key, found.name.lower())), None)


def machine_of(ledger: Mapping[str, Any]) -> Machine | None:
    """The table's machine of the ledger's run: by `machine.name` as in the table, else by the GPUs' names and number."""
    found = called(str(figures.mapping(ledger.get("machine")).get("name")))
    if found is not None:
        return found
    gpus = figures.mapping(ledger.get("machine")).get("gpus")
    names = [str(gpu.get("name", "")) if isinstance(gpu, Mapping) else str(gpu) for gpu in gpus] if isinstance(gpus, list) else []
    device = figures.mapping(figures.mapping(ledger.get("settings")).get("train")).get("device")
    if not names and (gpus == [] or device == "cpu"):
        return MACHINES["cpu"]
    for found in MACHINES.values():
        if names and len(names) == found.gpus and all(any(part in name for part in found.gpu_names) for name in names):
            return found
    return None


# Calibration ------------------------------------------------------------------------------------


def tokens_of(stage: figures.StageRow | None) -> float | None:
    """Prompt + response tokens of a generate stage, under the names a stage may give them."""
    if stage is None:
        return None
    whole = figures.number(stage.counts.get("tokens"))
    if whole is not None:
        return whole
    parts = [figures.number(stage.counts.get(name)) for name in ("prompt_tokens", "response_tokens")]
    return None if None in parts else sum(parts)


def calibrate(ledger: Mapping[str, Any], base: Rates) -> Rates:
    """The rates a finished run reached; what it did not measure stays as in `base`, its machine's rates for its verifier.

    Of a run that has only begun these are the disk's rates. MustFix if it has nothing to learn from.
    """
    stages = {row.name: row for row in figures.stage_rows(ledger) if row.state == "done" and row.seconds}
    generated = [stages[name] for name in ("generate.train", "generate.eval") if tokens_of(stages.get(name))]
    trained = stages.get("train")
    table, base = base, with_disk(base, ledger)
    if not generated and trained is None:
        if base is table:
            raise MustFix("The run has no finished stage to measure rates by", where="run.json", remedy="finish generate or train first")
        return base
    found: dict[str, Any] = {"spread": MEASURED_SPREAD}
    if generated:
        found |= _generation_rates(ledger, generated)
    if trained is not None:
        found |= _training_rates(ledger, trained, base)
    learned = ", ".join(sorted(set(found) - {"spread"})) or "nothing"
    sources = (f"MEASURED by the given run: {learned}", *base.sources)
    return replace(base, **found, sources=sources)


def _generation_rates(ledger: Mapping[str, Any], stages: list[figures.StageRow]) -> dict[str, Any]:
    """Rates of the largest split that was generated; an engine start is what its first stage took beyond its work."""
    settings = figures.mapping(ledger.get("settings"))
    extracted = bool(figures.mapping(settings.get("generate")).get("responses"))
    stage = stages[0]
    tokens, response = tokens_of(stage), figures.number(stage.counts.get("response_tokens"))
    samples = next((found for name in ("prompts", "samples", "turns") if (found := figures.number(stage.counts.get(name)))), None)
    found: dict[str, Any] = {"tokens_per_sample": tokens / samples} if samples else {}
    if response:
        found["response_share"] = response / tokens
    done = tokens if extracted else response
    if not done:
        return found
    rate = stage.given_rates.get("tokens") or done / stage.seconds
    if extracted:
        found["extract"] = Range.exactly(rate)
    else:
        concurrency = figures.number(figures.mapping(settings.get("verifier")).get("max_num_seqs")) or MEASURED_CONCURRENCY
        # Brought to the table's 200 requests, so that another concurrency can be asked of it.
        found["generate"] = Range.exactly(rate * share_of_peak(MEASURED_CONCURRENCY) / share_of_peak(concurrency))
    return found | _engine_start(ledger, extracted)


def with_disk(rates: Rates, ledger: Mapping[str, Any]) -> Rates:
    """The rates with what the run's preflight measured of this machine's disk; unchanged where it measured nothing.

    A load takes at least as long as reading the files; at worst it is as slow as the table's, whatever the disk could do.
    """
    preflight = figures.mapping(figures.mapping(ledger.get("stages")).get("preflight"))
    measured = figures.mapping(figures.mapping(preflight.get("counts")).get("bytes_per_second"))
    disk = [rate for key in ("disk_written", "disk_read") if (rate := figures.number(measured.get(key)))]
    read = figures.number(measured.get("verifier_read"))
    found: dict[str, Any] = {"disk": Range(min(disk), max(disk))} if disk else {}
    if read:
        at_best = rates.verifier.bytes / read + ENGINE_SECONDS.low
        found["load_seconds"] = Range(at_best, max(rates.load_seconds.high, rates.verifier.bytes / read + ENGINE_SECONDS.high))
    told = [
        f"disk {figures.bytes_text(min(disk))}/s and more" if disk else "",
        f"the verifier read at {figures.bytes_text(read)}/s" if read else "",
    ]
    return (
        replace(rates, **found, sources=(f"MEASURED by preflight here: {', '.join(filter(None, told))}", *rates.sources))
        if found
        else rates
    )


def _engine_start(ledger: Mapping[str, Any], extracted: bool) -> dict[str, Any]:
    """The eval split's stage starts the engine: its time less its tokens at the rate it measured itself."""
    first = next((row for row in figures.stage_rows(ledger) if row.name == "generate.eval" and row.state == "done"), None)
    loads = figures.number(ledger.get("verifier_loads"))
    if first is None or not first.seconds or loads != 1 or not first.given_rates.get("tokens"):
        return {}
    done = tokens_of(first) if extracted else figures.number(first.counts.get("response_tokens"))
    seconds = first.seconds - (done or 0.0) / first.given_rates["tokens"]
    return {"load_seconds": Range.exactly(seconds)} if seconds > 1 else {}


def _training_rates(ledger: Mapping[str, Any], stage: figures.StageRow, base: Rates) -> dict[str, Any]:
    """The two bracketing lines through the one measured point (see RTX_RATES), of one GPU, brought to the reference head."""
    steps = figures.number(stage.counts.get("steps"))
    if not steps:
        return {}
    settings = Settings.model_validate(ledger.get("settings") or {})
    gpus = int(figures.number(stage.counts.get("processes")) or 1)
    tokens = settings.train.tokens_per_step * settings.train.accumulate / gpus
    head = head_size(settings, base.verifier)
    ratio = training_flop(settings, head) / REFERENCE_FLOP
    # The last process's own steps, less its first with the compilation: in a short rehearsal that is most of the time.
    # Of a run with `single_step_share` a second compilation is still among them.
    counted = [figures.number(stage.counts.get(key)) for key in ("seconds", "first_step_seconds", "resumed_from")]
    own, first, before = (value or 0.0 for value in counted)
    if own and steps - before >= 2:
        seconds = (own - first) / (steps - before - 1)
    else:
        seconds = stage.seconds / steps
    seconds = max(seconds - base.exchange_seconds(head.trained, gpus).middle, seconds / 2) if gpus > 1 else seconds
    whole = seconds / (tokens * ratio)  # seconds a token if nothing were fixed
    arithmetic = min(H200_STEP.per_token, 0.9 * whole)
    return {
        "step_fast": StepCost(seconds - tokens * ratio * arithmetic, arithmetic),
        "step_slow": StepCost(0.0, whole),
        "step_tokens": float(tokens),
    }


def transfer(measured: Rates, ran_on: Machine, target: Machine) -> Rates:
    """Rates measured on `ran_on`, expected on `target`: the target's table times how far the run was from its own.

    Sample lengths carry over as they are; the table's ranges stay in the result.
    """
    home, table = for_verifier(ran_on.rates, measured.verifier), for_verifier(target.rates, measured.verifier)

    def factor(name: str) -> float:
        return getattr(measured, name).middle / getattr(home, name).middle

    def steps(rates: Rates) -> float:
        tokens = measured.step_tokens
        return math.sqrt(rates.step_fast.seconds(tokens) * rates.step_slow.seconds(tokens))

    step = steps(measured) / steps(home)
    return replace(
        measured,
        load_seconds=table.load_seconds.times(factor("load_seconds")),
        extract=table.extract.times(factor("extract")),
        generate=table.generate.times(factor("generate")),
        step_fast=table.step_fast.times(step),
        step_slow=table.step_slow.times(step),
        disk=table.disk,
        exchange=table.exchange,
        update=table.update,
        sources=(f"MEASURED on {ran_on.name}; {target.name} is taken to be off the table by the same factors", *table.sources),
    )


def for_verifier(rates: Rates, verifier: VerifierSize) -> Rates:
    """The rates for a verifier of another size: by its active parameters at best, no gain at worst.

    Small models are limited by launches, not arithmetic, so the gain is capped at 20. An engine start is
    a fixed 10 to 60 s plus the checkpoint at the rate the reference is read with.
    """
    if verifier.name == rates.verifier.name:
        return replace(rates, verifier=verifier)
    ratio = min(rates.verifier.active_parameters / verifier.active_parameters, 20.0)
    weight = verifier.bytes / rates.verifier.bytes
    return replace(
        rates,
        verifier=verifier,
        load_seconds=rates.load_seconds.times(weight) + ENGINE_SECONDS,
        extract=rates.extract.times(min(ratio, 1.0), max(ratio, 1.0)),
        generate=rates.generate.times(min(ratio, 1.0), max(ratio, 1.0)),
        sources=(
            f"for {verifier.name}: SCALED from {rates.verifier.name} by active parameters (at most 20 times, at worst no gain)",
            *rates.sources,
        ),
    )
