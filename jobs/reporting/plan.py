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
from jobs.reporting.machines import MACHINES, Machine, Rates, calibrate, called, for_verifier, machine_of, transfer
from jobs.reporting.stage_times import ZERO, StagePlan, fetch_bytes, over_link, stage_times
from jobs.reporting.workload import KNOWN_VERIFIERS, Range, VerifierSize, Workload, workload
from jobs.settings import Settings
from jobs.wording import counted

LARGEST_ON_CPU = 20e9  # bytes of a verifier that a machine without a GPU is planned for


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
    rates: Rates  # that it was made with

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
) -> Plan:
    """What a job takes on a machine.

    `rates` None takes the machine's own; a finished run's come from `machines.calibrate` (and
    `machines.transfer` for another machine). `verifier` None looks the model up among the known hub
    models; another one must be given (`VerifierSize.read`), else MustFix. The price is the machine's own, else the settings' for it.
    """
    verifier = verifier or verifier_size(settings)
    train_gpus = settings.train.processes_on(machine.gpus)
    rates = for_verifier(rates or machine.rates, verifier)
    work = workload(settings, verifier, tokens_per_sample=rates.tokens_per_sample, response_share=rates.response_share)
    price = _price(settings, machine)
    stages = tuple(
        replace(stage, cost=None if price is None else stage.seconds.times(price / 3600))
        for stage in stage_times(settings, rates, machine, verifier, work, train_gpus)
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
        rates=rates,
    )


def verifier_size(settings: Settings) -> VerifierSize:
    """The verifier's shape: a known hub model, the tiny one, or read from a local folder; else MustFix."""
    model = settings.verifier.model
    if model in KNOWN_VERIFIERS:
        return KNOWN_VERIFIERS[model]
    if Path(model).is_dir():
        return VerifierSize.read(Path(model))
    raise MustFix(
        f"The shape of verifier {model!r} is not known before it is fetched",
        where="verifier.model",
        remedy="name the folder of its checkpoint",
    )


def for_all_machines(settings: Settings, ledger: Mapping[str, Any] | None = None) -> list[Plan]:
    """A plan for each machine type, that of `rental.machine` first, then those of the job's kind; `ledger` is a finished run to calibrate by.

    MustFix if that run had another verifier or a machine the table does not know: its rates would say nothing.
    """
    verifier = verifier_size(settings)
    measured, ran_on = (None, None) if ledger is None else _measured(settings, verifier, ledger)
    named = called(settings.rental.machine)
    # After the named one what the job is written for: a job for a CPU is planned for one in full.
    on_cpu = settings.train.device == "cpu"
    machines = sorted(MACHINES.values(), key=lambda machine: (machine is not named, bool(machine.gpus) == on_cpu))
    plans = []
    for machine in machines:
        if not machine.gpus and verifier.bytes > LARGEST_ON_CPU:
            continue
        rates = measured if measured is None or machine is ran_on else transfer(measured, ran_on, machine)
        made = plan(settings, rates, machine, verifier=verifier)
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
    return [
        f"scaling table of the run: {told}; at its end a doubling of the samples brought {doubled:+.3f}, and the next one brings less or as much"
    ]


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
    """`rental.price_per_hour` is that of the machine the settings name; every other one has that of `rental.prices`."""
    if machine.price_per_hour is not None:
        return machine.price_per_hour

    def this_one(name: str) -> bool:
        found = called(name)
        return found is not None and found.name == machine.name

    if settings.rental.price_per_hour and this_one(settings.rental.machine):
        return settings.rental.price_per_hour
    return next((price for name, price in settings.rental.prices.items() if this_one(name)), None)


def render_plans(plans: Sequence[Plan], answers: Sequence[str] = ()) -> str:
    """All machines in one table, the answers to what people ask, then the first plan in full: what `plan` prints."""
    asked = "".join(f"{answer}\n" for answer in answers)
    return f"{render(comparison(plans))}\n{asked}\n{plans[0].render()}"


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


def _disk(settings: Settings, verifier: VerifierSize, work: Workload) -> Range:
    """The run directory at its fullest; a checkpoint in writing counts beside those kept."""
    copies = (
        2 + int(settings.package.sglang) + int(settings.generate.speculate not in ("off", "ngram"))
    )  # packaged, published to a folder, exported, as it drafts
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
        f"one engine start, no restart; training on {train_gpus} of {machine.gpus} GPUs"
        if machine.gpus
        else "one engine start, no restart",
        "replay costs 1 to 3 times the arithmetic of its forward passes (not measured)",
    ]
    if not settings.generate.responses:
        lines.append("generation over concurrency c goes as c / (c + 28): through 60 tok/s alone and 1,536 tok/s at 200 (measured)")
    if settings.generate.endpoints:
        lines.append(
            f"generation as if this machine decoded: {counted(len(settings.generate.endpoints), 'other servers')} of generate.endpoints neither timed nor priced"
        )
    if settings.generate.speculate != "off":
        lines.append(
            f"generation as without generate.speculate = {settings.generate.speculate!r}: what it gains or costs on this machine was not measured"
        )
    lines.append(
        f"price not set (rental.prices, or rental.price_per_hour with rental.machine = {machine.name!r})"
        if price is None
        else f"{price:,.2f} an hour, billed for every second"
    )
    return tuple(lines)


def _problems(settings: Settings, machine: Machine, verifier: VerifierSize) -> tuple[str, ...]:
    if not machine.gpus:
        return ("no GPU for a verifier of this size",) if verifier.bytes > LARGEST_ON_CPU else ()
    room = machine.gpus * machine.gpu_memory_gb * 1e9 * settings.verifier.gpu_memory_utilization
    if verifier.bytes > room:
        return (f"the verifier's {figures.bytes_text(verifier.bytes)} do not fit into {figures.bytes_text(room)} of GPU memory",)
    return ()
