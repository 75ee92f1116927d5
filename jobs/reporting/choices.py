"""The questions people ask of a plan: where, on spot or on demand, and how much for this money.

Each is answered in a sentence with ranges, from the same plans, with what it assumes.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jobs.errors import MustFix
from jobs.reporting import figures
from jobs.reporting.machines import MACHINES, Machine, Rates
from jobs.reporting.plan import Plan, plan, span
from jobs.reporting.stage_times import over_link
from jobs.reporting.workload import Range
from jobs.settings import RentalSettings, Settings
from jobs.wording import counted

HOME = MACHINES["8x-rtx-pro-6000"].name  # the box that is there already
# From the last word of a lost machine to the job's first on the next one: offers, boot, the image of some 20 GB.
NEW_MACHINE_SECONDS = Range(5 * 60, 20 * 60)
LINK_SHARE_AT_WORST = 0.3
ON_THE_VERIFIER = ("prompts", "engine start", "generate.eval", "baseline", "generate.train", "live")


def answers(plans: Sequence[Plan], settings: Settings, *, amount: float | None = None) -> dict[str, Any]:
    """{question: {…, "text": sentence}}: `places`, `spot` and `samples`, as far as prices and machines allow an answer."""
    found: dict[str, Any] = {}
    rented = next((each for each in plans if each.machine != HOME and not each.problems), plans[0])
    home = next((each for each in plans if each.machine == HOME and not each.problems), None)
    if home is not None and rented is not home:
        found["places"] = places(home, rented)
    priced = next((each for each in plans if each.cost is not None and not each.problems), None)
    if priced is not None and settings.rental.spot_price_per_hour:
        found["spot"] = spot(priced, settings.rental)
    if amount is not None:
        found["samples"] = _samples(amount, settings, priced)
    return found


def places(home: Plan, rented: Plan) -> dict[str, Any]:
    """All at home, all rented, or the states made at home, sent while they are written, and the head trained on the rented machine.

    Sending overlaps with making, so the longer of both counts. The rented machine then never loads the verifier.
    """
    states = _train_states(home) + home.stage("generate.eval").bytes
    link = Range(over_link(states.low, home.link_gbps), over_link(states.high, home.link_gbps) / LINK_SHARE_AT_WORST)
    at_home = _total(home, lambda name: name in ON_THE_VERIFIER)
    made = Range(max(at_home.low, link.low), max(at_home.high, link.high))
    trained = _total(rented, lambda name: name not in (*ON_THE_VERIFIER, "fetch"))
    split = made + trained
    options = {
        f"all on {home.machine}": {"seconds": home.seconds, "cost": None},
        f"all on {rented.machine}": {"seconds": rented.seconds, "cost": rented.cost},
        f"states on {home.machine}, training on {rented.machine}": {"seconds": split, "cost": _share(rented, trained)},
    }
    parts = [f"{name} {span(option['seconds'])}{_paid(option['cost'], rented)}" for name, option in options.items()]
    text = (
        f"Where: {'; '.join(parts)}. Sending the {span(states, figures.bytes_text)} of states over {home.link_gbps:g} Gbps takes {span(link)} "
        f"and {'overlaps with' if link.middle <= at_home.middle else 'outlasts'} making them ({span(at_home)})."
    )
    listed = {
        name: {"seconds": option["seconds"].as_dict(), "cost": option["cost"].as_dict() if option["cost"] else None}
        for name, option in options.items()
    }
    return {"options": listed, "states_bytes": states.as_dict(), "link_seconds": link.as_dict(), "text": text}


def spot(planned: Plan, rental: RentalSettings) -> dict[str, Any]:
    """The same run on machines that are taken away `rental.interruptions_per_day` times a day, saved as `push.backup` does.

    An interruption costs a new machine, what was not saved, and, while the verifier is needed, fetching and
    loading it again and bringing the states back. With r hours an interruption and n of them an hour, a run
    of T hours takes T / (1 - n r); at n r >= 1 it never ends.
    """
    each_hour = rental.interruptions_per_day / 24
    states = _train_states(planned)
    restart = Range(
        NEW_MACHINE_SECONDS.low + over_link(states.low / 2, planned.link_gbps),
        NEW_MACHINE_SECONDS.high + planned.stage("fetch").seconds.high + planned.stage("engine start").seconds.high
        + over_link(states.high, planned.link_gbps) / LINK_SHARE_AT_WORST,
    )  # fmt: skip
    lost = [min(each_hour * seconds / 3600, 1.0) for seconds in (restart.low, restart.high)]
    ends = lost[1] < 1
    per_hour = rental.spot_price_per_hour
    worst = planned.seconds.high / (1 - lost[1]) if ends else float("inf")
    seconds = Range(planned.seconds.low / (1 - lost[0]) if lost[0] < 1 else float("inf"), worst)
    if not ends:
        text = f"Spot: at {counted(rental.interruptions_per_day, 'interruptions')} a day a restart of up to {figures.seconds_text(restart.high)} can eat all progress: rent on demand."
        return {"seconds": None, "cost": None, "cheaper": False, "text": text}
    cost = seconds.times(per_hour / 3600)
    cheaper = cost.middle < planned.cost.middle
    text = (
        f"Spot at {per_hour:,.2f} an hour with {counted(rental.interruptions_per_day, 'interruptions')} a day, each costing {span(restart)}: {span(seconds)} and "
        f"{span(cost, figures.money_text)} {planned.currency}, on demand {span(planned.seconds)} and {span(planned.cost, figures.money_text)}: "
        f"{'spot is likely cheaper' if cheaper else 'on demand is likely cheaper'}."
    )
    return {"seconds": seconds.as_dict(), "cost": cost.as_dict(), "cheaper": cheaper, "text": text}


def _samples(amount: float, settings: Settings, priced: Plan | None) -> dict[str, Any]:
    if priced is None:
        raise MustFix(
            "How many samples an amount buys depends on the price", where="rental.price_per_hour", remedy="give it, and rental.machine"
        )
    machine = next(each for each in MACHINES.values() if each.name == priced.machine)
    found = samples_within(amount, settings, priced.rates, machine)
    text = f"For {amount:,.0f} {priced.currency} on {priced.machine}: {found.low:,.0f} to {found.high:,.0f} training samples (prompts.train_samples is {settings.prompts.train_samples:,})."
    return {"amount": amount, "samples": found.as_dict(), "text": text}


def _total(planned: Plan, wanted: Callable[[str], bool]) -> Range:
    return sum((stage.seconds for stage in planned.stages if wanted(stage.name)), Range(0.0, 0.0))


def _share(planned: Plan, seconds: Range) -> Range | None:
    """What `seconds` of the planned machine cost."""
    if planned.cost is None:
        return None
    return seconds.times(planned.cost.high / planned.seconds.high)


def _paid(cost: Range | None, planned: Plan) -> str:
    return f" for {span(cost, figures.money_text)} {planned.currency} of rent" if cost else ""


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


def _train_states(planned: Plan) -> Range:
    """Bytes of the train split; the gate's trial makes the first of them."""
    return planned.stage("baseline").bytes + planned.stage("generate.train").bytes
