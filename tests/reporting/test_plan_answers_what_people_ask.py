"""Where, on spot or on demand, how many samples for the money: sentences that follow from the plans by hand arithmetic."""

import subprocess
import sys
from dataclasses import replace

import pytest

from jobs.errors import MustFix
from jobs.job_file import load
from jobs.reporting.choices import NEW_MACHINE_SECONDS, answers, places, spot
from jobs.reporting.plan import for_all_machines
from jobs.reporting.stage_times import over_link
from jobs.reporting.workload import Range


def settings(*overrides):
    return load("hero", overrides=["rental.price_per_hour=48", *overrides], environment={})


def plans(*overrides):
    return {plan.machine: plan for plan in for_all_machines(settings(*overrides))}


def test_states_made_at_home_and_sent_while_they_are_written():
    found = plans()
    home, rented = found["8 x RTX PRO 6000"], found["8 x B300"]
    answer = places(home, rented)
    split = answer["options"]["states on 8 x RTX PRO 6000, training on 8 x B300"]
    states = home.stage("generate.train").bytes.low + home.stage("generate.eval").bytes.low
    assert answer["link_seconds"]["low"] == pytest.approx(states / 0.625e9), "5 Gbps at best"
    trained = sum(rented.stage(name).seconds.low for name in ("preflight", "vocab", "train", "evaluate", "package", "push"))
    assert split["cost"]["low"] == pytest.approx(trained / 3600 * 48), "only the rented hours cost"
    making = sum(
        home.stage(name).seconds.low for name in ("prompts", "engine start", "generate.eval", "baseline", "generate.train", "live")
    )
    assert split["seconds"]["low"] == pytest.approx(trained + max(making, states / 0.625e9))
    assert "Sending the" in answer["text"] and "over 5 Gbps" in answer["text"]


def test_a_link_slower_than_the_box_is_what_counts():
    found = plans()
    home = replace(found["8 x RTX PRO 6000"], link_gbps=0.1)
    answer = places(home, found["8 x B300"])
    assert "outlasts making them" in answer["text"]
    split = answer["options"]["states on 8 x RTX PRO 6000, training on 8 x B300"]
    assert split["seconds"]["low"] > answer["link_seconds"]["low"]


def test_spot_counts_every_restart():
    planned = plans()["8 x B300"]
    calm = spot(planned, settings("rental.spot_price_per_hour=20", "rental.interruptions_per_day=0").rental)
    assert calm["seconds"] == planned.seconds.as_dict(), "never taken away: the same run"
    assert calm["cost"]["high"] == pytest.approx(planned.seconds.high / 3600 * 20) and calm["cheaper"]
    daily = spot(planned, settings("rental.spot_price_per_hour=20", "rental.interruptions_per_day=1").rental)
    restart = NEW_MACHINE_SECONDS.low + over_link(planned.stage("generate.train").bytes.low / 2, 5)
    assert daily["seconds"]["low"] == pytest.approx(planned.seconds.low / (1 - restart / 3600 / 24))
    assert "likely cheaper" in daily["text"] and "1 interruption a day" in daily["text"]
    dear = spot(planned, settings("rental.spot_price_per_hour=47", "rental.interruptions_per_day=1").rental)
    assert not dear["cheaper"] and "on demand is likely cheaper" in dear["text"]
    hopeless = spot(planned, settings("rental.spot_price_per_hour=1", "rental.interruptions_per_day=24").rental)
    assert hopeless["seconds"] is None and "rent on demand" in hopeless["text"]


def test_samples_for_an_amount_need_a_price():
    job = settings()
    found = answers(for_all_machines(job), job, amount=1000)["samples"]
    assert 0 < found["samples"]["low"] < found["samples"]["high"] and "For 1,000 USD on 8 x B300" in found["text"]
    free = load("hero", environment={})
    with pytest.raises(MustFix, match="rental.price_per_hour"):
        answers(for_all_machines(free), free, amount=1000)
    assert "spot" not in answers(for_all_machines(free), free), "no price is invented"


def test_the_plan_in_full_is_of_the_machine_the_job_is_for():
    for name in ("CPU only", "this machine"):
        assert for_all_machines(load("smoke", overrides=[f"rental.machine={name}"], environment={}))[0].machine == "CPU only"
    assert for_all_machines(load("hero", overrides=["rental.machine=this machine"], environment={}))[0].machine == "8 x B300"
    assert for_all_machines(load("smoke", overrides=["rental.machine=8 x H200"], environment={}))[0].machine == "8 x H200"


def test_the_command_line_answers():
    command = [
        sys.executable,
        "-m",
        "entrypoints.cli",
        "plan",
        "hero",
        "--set",
        "rental.price_per_hour=48",
        "--set",
        "rental.spot_price_per_hour=20",
        "--for",
        "2000",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for start in ("Where: all on", "Spot at 20.00 an hour", "For 2,000 USD on 8 x B300"):
        assert start in done.stdout


def test_each_machine_has_its_own_price():
    """By key or by name; that of the machine that is rented stands in `rental.price_per_hour`, and no other is planned with it."""
    made = plans('rental.prices={"8x-h200" = 30, "8 x B200" = 40, "8x-b300" = 1}')
    for name, price in (("8 x B300", 48), ("8 x B200", 40), ("8 x H200", 30)):
        assert made[name].cost.high == pytest.approx(made[name].seconds.high / 3600 * price)
        assert sum(stage.cost.low for stage in made[name].stages) == pytest.approx(made[name].cost.low)
    assert made["8 x RTX PRO 6000"].cost is None, "no price is invented"
    assert plans("rental.prices.8x-h200=30")["8 x H200"].cost == made["8 x H200"].cost
    rented = for_all_machines(settings("rental.machine=8x-h200", "rental.price_per_hour=30"))[0]
    assert (rented.machine, rented.cost) == ("8 x H200", made["8 x H200"].cost), "the key is a name, too"
    for wrong, said in (('{"8x-h20" = 30}', "rental.prices names '8x-h20', `plan` knows 8x-"), ('{"8x-h200" = 0}', "greater than 0")):
        with pytest.raises(MustFix, match=said):
            plans(f"rental.prices={wrong}")


def test_a_range_of_money_is_a_range_of_hours():
    planned = plans()["8 x B300"]
    assert planned.cost == Range(pytest.approx(planned.seconds.low / 75), pytest.approx(planned.seconds.high / 75))
