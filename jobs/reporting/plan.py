"""Time, bytes and money of a job, stage by stage, on a named machine: a range, the longest pole, the reasons.

A plan is a model, so it prints what it assumed. Work comes from workload.py (settings and verifier),
rates from machines.py (table or a finished run), and each stage takes the longer of what its arithmetic
and its disk or link need, because they overlap. On the local box's own figures the model gives back the
measured times; tests/reporting holds it to that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jobs.errors import MustFix
from jobs.reporting import figures
from jobs.reporting.display import render
from jobs.reporting.machines import MACHINES, Machine, Rates, calibrate, for_verifier, machine_of, transfer
from jobs.reporting.workload import KNOWN_VERIFIERS, REFERENCE_FLOP, Range, VerifierSize, Workload, mean_ttt_steps, workload
from jobs.settings import Settings

ENGINE_START = "engine start"  # once a run, inside the first stage that needs the verifier
ZERO = Range(0.0, 0.0)
LINK_SHARE = (0.3, 1.0)  # of the link's nominal rate that a download or upload reaches
REPLAY_SPREAD = (1.0, 3.0)  # times the arithmetic of training; replay has not been measured at this size
PROMPTS_PER_SECOND = Range(200, 5000)  # rendered and tokenized
TOKENS_COUNTED_PER_SECOND = Range(1e6, 1e7)
HASHED_PER_SECOND = Range(0.3e9, 2e9)
LARGEST_ON_CPU = 20e9  # bytes of a verifier that a machine without a GPU is planned for


@dataclass(frozen=True)
class StagePlan:
    """One stage: seconds and cost as ranges, bytes it writes or moves, and what limits it."""

    name: str
    seconds: Range
    bytes: Range
    limit: str
    cost: Range | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds.as_dict(),
            "bytes": self.bytes.as_dict(),
            "cost": self.cost.as_dict() if self.cost else None,
            "limit": self.limit,
        }


@dataclass(frozen=True)
class Plan:
    """The whole: `cost` is None while no price is set; `disk` is what the run directory holds at its fullest."""

    job: str
    verifier: str
    machine: str
    stages: tuple[StagePlan, ...]
    disk: Range
    cost: Range | None
    currency: str
    transfers: tuple[tuple[str, float, float], ...]  # (what, bytes, seconds at the link's full rate)
    link_gbps: float
    assumptions: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def seconds(self) -> Range:
        return sum((stage.seconds for stage in self.stages), ZERO)

    @property
    def longest_pole(self) -> StagePlan:
        return max(self.stages, key=lambda stage: stage.seconds.low + stage.seconds.high)

    def stage(self, name: str) -> StagePlan:
        return next(stage for stage in self.stages if stage.name == name)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; seconds, bytes and money as {"low", "high"}."""
        return {
            "job": self.job,
            "verifier": self.verifier,
            "machine": self.machine,
            "stages": {stage.name: stage.as_dict() for stage in self.stages},
            "seconds": self.seconds.as_dict(),
            "disk_bytes": self.disk.as_dict(),
            "cost": self.cost.as_dict() if self.cost else None,
            "currency": self.currency,
            "longest_pole": self.longest_pole.name,
            "transfers": [{"what": what, "bytes": size, "seconds": seconds} for what, size, seconds in self.transfers],
            "assumptions": list(self.assumptions),
            "problems": list(self.problems),
        }

    def render(self) -> str:
        """As plain text."""
        return render(self.table())

    def table(self) -> RenderableType:
        """The same for a rich console."""
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("stage", no_wrap=True)
        for name in ("time", "bytes", f"cost ({self.currency})"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("limited by")
        for stage in self.stages:
            table.add_row(stage.name, span(stage.seconds), span(stage.bytes, figures.bytes_text), _money(stage.cost), stage.limit)
        table.add_section()
        table.add_row("total", span(self.seconds), f"disk {span(self.disk, figures.bytes_text)}", _money(self.cost), "")
        pole = self.longest_pole
        lines = [f"Longest pole: {pole.name}, {span(pole.seconds)}."]
        lines += [
            f"Over {self.link_gbps:g} Gbps: {what}, {figures.bytes_text(size)}, in {figures.seconds_text(seconds)} at best."
            for what, size, seconds in self.transfers
        ]
        lines += [f"PROBLEM: {problem}." for problem in self.problems]
        lines += ["Assumptions:", *(f"- {assumption}" for assumption in self.assumptions)]
        title = Text(f"Plan of {self.job} with {self.verifier} on {self.machine}", style="bold")
        return Group(title, table, Text("\n".join(lines)))


def plan(
    settings: Settings,
    rates: Rates | None,
    machine: Machine,
    *,
    verifier: VerifierSize | None = None,
    train_gpus: int = 1,
) -> Plan:
    """What a job takes on a machine.

    `rates` None takes the machine's own; a finished run's come from `machines.calibrate` (and
    `machines.transfer` for another machine). `verifier` None looks the model up among the known hub
    models; another one must be given (`VerifierSize.read`), else MustFix. `train_gpus` is how many GPUs
    training uses. The price is the machine's own, else `rental.price_per_hour` if `rental.machine` names it.
    """
    verifier = verifier or verifier_size(settings)
    rates = for_verifier(rates or machine.rates, verifier)
    work = workload(
        settings, verifier, tokens_per_sample=rates.tokens_per_sample, response_share=rates.response_share
    )
    price = _price(settings, machine)
    stages = tuple(
        replace(stage, cost=None if price is None else stage.seconds.times(price / 3600))
        for stage in _stages(settings, rates, machine, verifier, work, train_gpus)
    )
    return Plan(
        job=settings.job.name,
        verifier=verifier.name,
        machine=machine.name,
        stages=stages,
        disk=_disk(settings, verifier, work),
        cost=None if price is None else sum((stage.cost for stage in stages), ZERO),
        currency=machine.currency if machine.price_per_hour is not None else settings.rental.currency,
        transfers=_transfers(verifier, work, machine.link_gbps),
        link_gbps=machine.link_gbps,
        assumptions=_assumptions(settings, rates, machine, work, train_gpus, price),
        problems=_problems(settings, machine, verifier),
    )


def verifier_size(settings: Settings) -> VerifierSize:
    """The verifier's shape: a known hub model, the tiny one, or read from a local folder; else MustFix."""
    model = settings.verifier.model
    if model in KNOWN_VERIFIERS:
        return KNOWN_VERIFIERS[model]
    if Path(model).is_dir():
        return VerifierSize.read(Path(model))
    raise MustFix(
        f"The shape of verifier {model!r} is not known before it is fetched", where="verifier.model", remedy="name the folder of its checkpoint"
    )


def for_all_machines(settings: Settings, ledger: Mapping[str, Any] | None = None, *, train_gpus: int = 1) -> list[Plan]:
    """A plan for each machine type, that of `rental.machine` first; `ledger` is a finished run to calibrate by.

    MustFix if that run had another verifier or a machine the table does not know: its rates would say nothing.
    """
    verifier = verifier_size(settings)
    measured, ran_on = (None, None) if ledger is None else _measured(settings, verifier, ledger)
    named = settings.rental.machine.lower()
    machines = sorted(MACHINES.values(), key=lambda machine: machine.name.lower() != named)
    plans = []
    for machine in machines:
        if not machine.gpus and verifier.bytes > LARGEST_ON_CPU:
            continue
        rates = measured if measured is None or machine is ran_on else transfer(measured, ran_on, machine)
        made = plan(settings, rates, machine, verifier=verifier, train_gpus=train_gpus)
        plans.append(replace(made, assumptions=(*made.assumptions, *scaling_lines(ledger or {}))))
    return plans


def scaling_lines(ledger: Mapping[str, Any]) -> list[str]:
    """What a finished run's scaling table says about more data: acceptance by samples, and what a doubling brought."""
    stages = figures.mapping(ledger.get("stages"))
    rows = figures.mapping(figures.mapping(stages.get("scaling")).get("counts")).get("table") or []
    if len(rows) < 2:
        return []
    told = ", ".join(f"{row['acceptance_length']:.2f} with {row['samples']:,} samples" for row in rows)
    before, last = rows[-2:]
    doubled = (last["acceptance_length"] - before["acceptance_length"]) / math.log2(last["samples"] / before["samples"])
    return [f"scaling table of the run: {told}; at its end a doubling of the samples brought {doubled:+.3f}, and the next one brings less or as much"]


def _measured(settings: Settings, verifier: VerifierSize, ledger: Mapping[str, Any]) -> tuple[Rates, Machine]:
    earlier = figures.mapping(figures.mapping(ledger.get("settings")).get("verifier")).get("model")
    if earlier != settings.verifier.model:
        raise MustFix(
            f"The run measured verifier {earlier!r}, the plan is for {settings.verifier.model!r}",
            where="--calibrate",
            remedy="calibrate with a run of the same verifier",
        )
    ran_on = machine_of(ledger)
    if ran_on is None:
        raise MustFix(
            "The run's machine is not in the table of machine types",
            where="run.json, machine",
            remedy=f"set rental.machine of such runs to one of {', '.join(found.name for found in MACHINES.values())}",
        )
    return calibrate(ledger, for_verifier(ran_on.rates, verifier)), ran_on


def _price(settings: Settings, machine: Machine) -> float | None:
    """The settings' price is that of the machine they name; no other machine is planned with it."""
    if machine.price_per_hour is not None:
        return machine.price_per_hour
    named = settings.rental.machine.lower() == machine.name.lower()
    return settings.rental.price_per_hour or None if named else None


def over_link(size: float, gbps: float) -> float:
    """Seconds that `size` bytes need over a link of so many gigabits a second, at best."""
    return size / (gbps * 1e9 / 8)


def samples_within(amount: float, settings: Settings, rates: Rates | None, machine: Machine, **options: Any) -> Range:
    """How many training samples `amount` of money pays for (low with the slow rates, high with the fast ones).

    Cost is a fixed part plus a part that grows with the samples, so two plans give both. A token budget
    and a step limit are set aside. MustFix without a price.
    """

    def cost_of(samples: int) -> Range:
        wanted = {
            "prompts": settings.prompts.model_copy(update={"train_samples": samples}),
            "generate": settings.generate.model_copy(update={"train_token_budget": None}),
            "train": settings.train.model_copy(update={"max_steps": None}),
        }
        cost = plan(settings.model_copy(update=wanted), rates, machine, **options).cost
        if cost is None:
            raise MustFix("no price is set", where="rental.price_per_hour", remedy="give what an hour of the machine costs")
        return cost

    few, many = 1_000, 1_000_000
    small, large = cost_of(few), cost_of(many)

    def affordable(low: float, high: float) -> float:
        each = (high - low) / (many - few)
        return max(0.0, (amount - (low - few * each)) / each)

    return Range(affordable(small.high, large.high), affordable(small.low, large.low))


def render_plans(plans: Sequence[Plan]) -> str:
    """All machines in one table, then the first plan in full: what `plan` prints."""
    return f"{render(comparison(plans))}\n\n{plans[0].render()}"


def comparison(plans: Sequence[Plan]) -> RenderableType:
    """One line a machine: total time, cost, longest pole."""
    table = Table(box=box.SIMPLE_HEAD)
    for name, justify in (("machine", "left"), ("time", "right"), ("cost", "right"), ("longest pole", "left")):
        table.add_column(name, justify=justify)
    for each in plans:
        if each.problems:
            table.add_row(each.machine, "-", "-", each.problems[0])
            continue
        cost = f"{_money(each.cost)} {each.currency}" if each.cost else _money(None)
        table.add_row(each.machine, span(each.seconds), cost, f"{each.longest_pole.name}, {span(each.longest_pole.seconds)}")
    return table


def span(value: Range, text=figures.seconds_text) -> str:
    low, high = text(value.low), text(value.high)
    if value.high == 0:
        return "-"
    return low if low == high else f"{low} to {high}"


def _money(cost: Range | None) -> str:
    return "price not set" if cost is None else span(cost, figures.money_text)


# The model --------------------------------------------------------------------------------------


def _stages(
    settings: Settings, rates: Rates, machine: Machine, verifier: VerifierSize, work: Workload, train_gpus: int
) -> list[StagePlan]:
    fetched = fetch_bytes(settings, verifier, work)
    head = Range.exactly(work.head.file_bytes)
    samples = settings.prompts.train_samples + settings.prompts.eval_samples
    uploads = (settings.push.uri or "").startswith("s3://")
    return [
        StagePlan("preflight", Range(10, 120), ZERO, "device checks; two minutes at most by design"),
        StagePlan("fetch", _linked(fetched, machine), Range.exactly(fetched), _fetch_limit(fetched, machine)),
        StagePlan("prompts", Range.exactly(samples).over(PROMPTS_PER_SECOND), ZERO, "tokenizer"),
        StagePlan(ENGINE_START, rates.load_seconds.times(1 / rates.spread, rates.spread), ZERO, "reading the verifier from disk"),
        _generate("generate.eval", settings, rates, work.eval_tokens, work.eval_response_tokens, work.eval_bytes),
        _replay("baseline", settings, rates, work, work.heads_judged),
        _generate("generate.train", settings, rates, work.train_tokens, work.train_response_tokens, work.train_bytes),
        StagePlan("vocab", work.train_tokens.over(TOKENS_COUNTED_PER_SECOND), ZERO, "counting tokens"),
        _train(settings, rates, work, train_gpus),
        _replay("evaluate", settings, rates, work, 1),
        *_live(settings, rates),
        StagePlan("package", head.over(HASHED_PER_SECOND), head, "writing and hashing"),
        StagePlan(
            "push",
            _linked(work.head.file_bytes, machine) if uploads else head.over(rates.disk),
            head,
            f"link of {machine.link_gbps:g} Gbps" if uploads else "disk",
        ),
        *_scaling(settings, rates, work, train_gpus),
    ]


def _live(settings: Settings, rates: Rates) -> list[StagePlan]:
    """Two loads, and the answers at each concurrency twice; a winner that is faster only shortens it."""
    live = settings.evaluate.live
    if not live.concurrencies:
        return []
    longest = live.max_new_tokens or settings.generate.max_new_tokens
    tokens = Range(0.3 * live.requests * longest, live.requests * longest)
    seconds = rates.load_seconds.times(1 / rates.spread, rates.spread).times(2)
    for concurrency in live.concurrencies:
        seconds = seconds + tokens.over(rates.per_second(rates.generate_at(concurrency))).times(1, 2)
    return [StagePlan("live", seconds, ZERO, f"two loads of the verifier, {live.requests} requests at {', '.join(map(str, live.concurrencies))} at once")]


def _scaling(settings: Settings, rates: Rates, work: Workload, train_gpus: int) -> list[StagePlan]:
    shares = settings.evaluate.scaling
    if not shares:
        return []
    whole, judged = _train(settings, rates, work, train_gpus), _replay("scaling", settings, rates, work, len(shares))
    return [StagePlan("scaling", whole.seconds.times(sum(shares)) + judged.seconds, whole.bytes, f"training on {', '.join(f'{share:.0%}' for share in shares)} of the samples")]


def fetch_bytes(settings: Settings, verifier: VerifierSize, work: Workload) -> int:
    """Bytes from the hub: the verifier unless it is a local folder or the tiny one, and every candidate head."""

    def remote(model: str) -> bool:
        return model != "tiny" and not model.startswith((".", "/", "~")) and model.count("/") == 1

    heads = sum(remote(candidate.model) for candidate in settings.heads.candidates)
    return (verifier.bytes if remote(settings.verifier.model) else 0) + heads * work.head.file_bytes


def _linked(size: float, machine: Machine) -> Range:
    best = over_link(size, machine.link_gbps)
    return Range(best / LINK_SHARE[1], best / LINK_SHARE[0])


def _fetch_limit(size: int, machine: Machine) -> str:
    return f"link of {machine.link_gbps:g} Gbps" if size else "nothing to download"


def _generate(name: str, settings: Settings, rates: Rates, tokens: Range, responses: Range, size: Range) -> StagePlan:
    extract = rates.per_second(rates.extract)
    if settings.generate.responses:
        engine, limit = tokens.over(extract), "extraction of stored answers"
    else:
        generate = rates.per_second(rates.generate_at(settings.verifier.max_num_seqs))
        prompts = Range(max(tokens.low - responses.high, 0.0), max(tokens.high - responses.low, 0.0))
        engine = responses.over(generate) + prompts.over(extract)
        limit = f"generation at {settings.verifier.max_num_seqs} concurrent requests"
    disk = size.over(rates.disk)
    if disk.middle > engine.middle:
        limit = "writing the states to disk"
    return StagePlan(name, _longer(engine, disk), size, limit)


def _train(settings: Settings, rates: Rates, work: Workload, train_gpus: int) -> StagePlan:
    rows = max(1.0, settings.train.accumulate / train_gpus)
    flop = work.head.train_flop(mean_ttt_steps(settings))
    step = rates.step_seconds(settings.train.tokens_per_step, rows, flop)
    arithmetic = Range(work.steps.low * step.low, work.steps.high * step.high)
    epochs = work.steps.high * settings.train.tokens_per_step * settings.train.accumulate / work.train_tokens.high
    # At best the states stay in the page cache after the first pass; at worst each epoch reads them again.
    reading = Range(work.train_bytes.low / rates.disk.high, work.train_bytes.high * epochs / rates.disk.low)
    limit = f"arithmetic of {train_gpus} device{'s' if train_gpus > 1 else ''}, {round(work.steps.high):,} steps"
    if reading.middle > arithmetic.middle:
        limit = "reading the states from disk"
    state = Range.exactly(work.head.checkpoint_bytes * settings.train.keep_checkpoints)
    return StagePlan("train", _longer(arithmetic, reading), state, limit)


def _replay(name: str, settings: Settings, rates: Rates, work: Workload, heads: int) -> StagePlan:
    """Forward passes of K draft steps for every row, one third of a training step's FLOP each."""
    ratio = work.head.train_flop(settings.evaluate.draft_tokens) / 3 / REFERENCE_FLOP
    fast, slow = sorted(step.per_token * ratio * heads for step in (rates.step_fast, rates.step_slow))
    arithmetic = Range(work.eval_tokens.low * fast, work.eval_tokens.high * slow).times(*REPLAY_SPREAD)
    reading = work.eval_bytes.over(rates.disk)
    limit = f"replay of {heads} head{'' if heads == 1 else 's'}" if heads else "n-gram only"
    return StagePlan(name, _longer(arithmetic, reading) + Range(1, 10), ZERO, limit)


def _longer(one: Range, other: Range) -> Range:
    return Range(max(one.low, other.low), max(one.high, other.high))


def _disk(settings: Settings, verifier: VerifierSize, work: Workload) -> Range:
    """The run directory at its fullest; a checkpoint in writing counts beside those kept."""
    copies = 2 + int(settings.package.sglang)  # packaged, published to a folder, exported
    fixed = (
        fetch_bytes(settings, verifier, work)
        + work.head.checkpoint_bytes * (settings.train.keep_checkpoints + 1)
        + work.head.file_bytes * copies
    )
    return work.eval_bytes + work.train_bytes + Range.exactly(fixed)


def _transfers(verifier: VerifierSize, work: Workload, gbps: float) -> tuple[tuple[str, float, float], ...]:
    sizes = (
        ("the head", float(work.head.file_bytes)),
        ("the train states (to extract here and train there)", work.train_bytes.high),
        ("the verifier", float(verifier.bytes)),
    )
    return tuple((what, size, over_link(size, gbps)) for what, size in sizes)


def _assumptions(
    settings: Settings, rates: Rates, machine: Machine, work: Workload, train_gpus: int, price: float | None
) -> tuple[str, ...]:
    row = f"{work.train_bytes_per_token:,} B a token in the train split, {work.eval_bytes_per_token:,} B in the eval split (both readings of the taps)"
    lines = [
        *rates.sources,
        *work.assumptions,
        f"states: {row}",
        f"disk: {span(rates.disk, figures.bytes_text)}/s; link: {machine.link_gbps:g} Gbps, of which 30 to 100 % are reached",
        f"one engine start, no restart; training on {train_gpus} of {machine.gpus} GPUs" if machine.gpus else "one engine start, no restart",
        "replay costs 1 to 3 times the arithmetic of its forward passes (not measured)",
    ]
    if not settings.generate.responses:
        lines.append("generation over concurrency c goes as c / (c + 28): through 60 tok/s alone and 1,536 tok/s at 200 (measured)")
    lines.append(f"price not set (rental.price_per_hour, with rental.machine = {machine.name!r})" if price is None else f"{price:,.2f} an hour, billed for every second")
    return tuple(lines)


def _problems(settings: Settings, machine: Machine, verifier: VerifierSize) -> tuple[str, ...]:
    if not machine.gpus:
        return ("no GPU for a verifier of this size",) if verifier.bytes > LARGEST_ON_CPU else ()
    room = machine.gpus * machine.gpu_memory_gb * 1e9 * settings.verifier.gpu_memory_utilization
    if verifier.bytes > room:
        return (f"the verifier's {figures.bytes_text(verifier.bytes)} do not fit into {figures.bytes_text(room)} of GPU memory",)
    return ()
