"""The plan, held to what was measured on 8 x RTX PRO 6000 and to published sizes and link times."""

import json
from dataclasses import replace

import pytest

from jobs.errors import MustFix
from jobs.job_file import load
from jobs.reporting.choices import samples_within
from jobs.reporting.machines import B300_RATES, MACHINES, RTX_RATES, calibrate, machine_of, scaled, transfer, with_disk
from jobs.reporting.plan import Plan, for_all_machines, plan, render_plans
from jobs.reporting.stage_times import over_link
from jobs.reporting.workload import (
    KIMI_K25,
    REFERENCE_FLOP,
    Range,
    head_size,
    hidden_bytes_per_token,
    standard_samples,
    training_flop,
    workload,
)
from jobs.settings import Settings

LOCAL = MACHINES["8x-rtx-pro-6000"]
B300 = MACHINES["8x-b300"]


def run_to_beat(**changes) -> Settings:
    """1,000 samples (950 train), 503,000 tokens of existing answers, one sample a step, 10 epochs."""
    sections = {
        "job": {"name": "run-to-beat"},
        "verifier": {
            "model": "moonshotai/Kimi-K2.5",
            "revision": "a" * 40,
            "taps": [2, 30, 58],
            "max_num_seqs": 200,
            "max_model_len": 2048,
        },
        "prompts": {"train_samples": 950, "eval_samples": 50},
        "generate": {"responses": "answers"},
        "vocab": {"size": 32000},
        "train": {"tokens_per_step": 503, "max_length": 503, "epochs": 10, "heads": 64, "head_dim": 128, "intermediate_size": 18432},
        "push": {"uri": "s3://bucket/prefix"},
    }
    return Settings(**{name: sections.get(name, {}) | changes.get(name, {}) for name in sections | changes})


def steps_alone(planned: Plan) -> Range:
    """Seconds of training without the replay at its end, which the run to beat did not make."""
    train, judged = planned.stage("train").seconds, planned.stage("evaluate").seconds
    return Range(train.low - judged.low, train.high - judged.high)


def local_plan(settings: Settings, **options):
    return plan(settings, replace(RTX_RATES, tokens_per_sample=503), LOCAL, **options)


def test_the_measured_phases_come_out_to_the_rounding_of_the_table():
    planned = local_plan(run_to_beat())
    minutes = {stage.name: stage.seconds.middle / 60 for stage in planned.stages}
    assert round(minutes["engine start"], 1) == 22.5
    assert round(minutes["generate.eval"] + minutes["generate.train"], 1) == 2.9
    assert round(steps_alone(planned).middle / 60, 1) == 27.7
    assert round(minutes["train"] / 10, 1) == 2.8  # an epoch
    assert planned.stage("train").limit.endswith("9,500 steps")
    for stage in planned.stages:
        assert stage.seconds.low <= stage.seconds.high


def test_generation_gives_the_measured_rates_alone_and_at_two_hundred_requests():
    assert RTX_RATES.generate_at(200) == Range(1536, 1536)
    assert RTX_RATES.generate_at(1).high == pytest.approx(60, rel=0.01)
    more = RTX_RATES.generate_at(1000)
    assert more.low == 1536 and 1536 < more.high < 1536 * 200 / 170  # nothing promised beyond the measurement
    settings = run_to_beat(generate={"responses": None})
    planned = plan(settings, replace(RTX_RATES, tokens_per_sample=503, response_share=0.9), LOCAL)
    expected = 950 * 503 * (0.9 / 1536 + 0.1 / 2912)
    assert planned.stage("generate.train").seconds.middle == pytest.approx(expected, rel=0.01)


def test_sizes_are_the_published_ones():
    assert hidden_bytes_per_token(7168, 3, "bfloat16") == 57_344
    assert hidden_bytes_per_token(7168, 6, "bfloat16") == 7 * 7168 * 2  # both readings of the taps in the eval split
    assert round(503_000 * 57_344 / 1e9, 1) == 28.8 and round(100e6 * 57_344 / 1e12, 1) == 5.7
    head = head_size(run_to_beat(), KIMI_K25)
    assert round(head.trained / 1e9, 2) == 1.19 and round(head.embedding / 1e9, 2) == 1.17
    assert round(head.file_bytes / 1e9, 1) == 4.7
    assert round(head.train_flop(3) / 1e9) == 20
    work = workload(run_to_beat(), KIMI_K25, tokens_per_sample=503)
    assert work.train_bytes_per_token == 57_344 + 4 and work.eval_bytes_per_token == 100_352 + 4
    half = workload(run_to_beat(states={"dtype": "fp8"}), KIMI_K25, tokens_per_sample=503)
    assert 0.499 < half.train_bytes_per_token / work.train_bytes_per_token < 0.502
    assert half.eval_bytes_per_token == work.eval_bytes_per_token  # eval is never FP8


@pytest.mark.parametrize(
    ("size", "unit", "expected"),
    [(4.73e9, 1, 7.6), (28.8e9, 1, 46), (540e9, 60, 14.4), (5.7e12, 3600, 2.5)],
    ids=["head", "states", "verifier", "hero states"],
)
def test_transfers_take_what_the_link_allows(size, unit, expected):
    digits = 0 if expected == 46 else 1
    assert round(over_link(size, 5.0) / unit, digits) == expected


def test_the_push_is_at_link_speed_at_best():
    push = local_plan(run_to_beat()).stage("push")
    assert round(push.seconds.low, 1) == 7.6 and push.seconds.high > push.seconds.low
    assert round(push.bytes.high / 1e9, 1) == 4.7


def test_the_projection_for_b300_is_kept_and_explained():
    assert B300_RATES.load_seconds == Range(15 * 60, 18 * 60)
    assert (B300_RATES.extract, B300_RATES.generate) == (Range(8000, 15000), Range(5000, 10000))
    planned = plan(run_to_beat(), replace(B300_RATES, tokens_per_sample=503), B300)
    steps_per_second = Range(9500 / steps_alone(planned).high, 9500 / steps_alone(planned).low)
    assert steps_per_second.low == pytest.approx(10, rel=0.01), "the slow side is the projection's lower figure"
    assert steps_per_second.high > 12
    # The scaling rule, from the local box and data sheets alone, meets the projection.
    ours = scaled(1536, 8 / 1.792)
    assert ours.low < 10000 and ours.high > 5000 and 5000 <= ours.low <= 6000 and 9000 <= ours.high <= 10000
    assert any("PROJECTION" in line for line in planned.assumptions) and any("10 steps/s" in line for line in planned.assumptions)


def test_the_longest_pole_and_the_money_follow_from_the_stages():
    priced = local_plan(run_to_beat(rental={"machine": "8 x RTX PRO 6000", "price_per_hour": 12.0, "currency": "EUR"}))
    assert priced.longest_pole.name == "fetch"
    assert priced.cost.low == pytest.approx(priced.seconds.low / 3600 * 12.0)
    assert priced.cost.high == pytest.approx(sum(stage.cost.high for stage in priced.stages))
    assert priced.currency == "EUR"
    local = local_plan(run_to_beat(verifier={"model": "./kimi", "revision": None}), verifier=KIMI_K25)
    assert local.stage("fetch").seconds == Range(0.0, 0.0) and local.longest_pole.name == "train"


def test_replays_while_training_are_in_the_plan():
    """All GPUs wait while one judges: the whole eval split each time would be half as long again as hero's steps."""

    def train(*overrides: str) -> Range:
        return plan(load("hero", overrides=overrides), B300_RATES, B300).stage("train").seconds

    hero = load("hero")
    own, judged = hero.prompts.eval_samples, plan(hero, B300_RATES, B300).stage("evaluate").seconds
    once, often, shipped = (
        train("train.evaluate_every=1000000", f"train.evaluate_samples={own}"),
        train(f"train.evaluate_samples={own}"),
        train(),
    )
    times = workload(hero, KIMI_K25).steps.high / hero.train.evaluate_every
    assert times > 10 and often.high - once.high == pytest.approx(
        (times - 1) * judged.high * own / (own + standard_samples(hero)), rel=0.01
    )
    assert shipped.high - once.high < 0.25 * (often.high - once.high)
    scaled_run = plan(load("hero", overrides=["evaluate.scaling=[0.99]"]), B300_RATES, B300)
    assert scaled_run.stage("scaling").seconds.high < train().high + judged.high, "nothing is judged in between there"


def test_a_disk_that_cannot_deliver_the_states_is_the_limit_of_training():
    """Preflight measured it: training then takes the bytes of its states over that rate, once read at best and every epoch at worst."""
    settings, size = run_to_beat(train={"epochs": 2}), 950 * 503 * (57_344 + 4)

    def training(rate: float, read: float) -> tuple[str, Range]:
        measured = {"stages": {"preflight": {"counts": {"bytes_per_second": {"disk_written": rate, "disk_read": read}}}}}
        planned = plan(settings, with_disk(replace(RTX_RATES, tokens_per_sample=503), measured), LOCAL)
        return planned.stage("train").limit, steps_alone(planned)

    # 27.7 min for 9,500 steps of one sample: 0.16 GB/s.
    assert training(50e6, 80e6) == ("reading the states from disk", Range(pytest.approx(size / 80e6), pytest.approx(2 * size / 50e6)))
    fast, faster = training(3e9, 3e9), training(6e9, 6e9)
    assert fast[0] == faster[0] == "arithmetic of 1 device, 1,900 steps"
    assert (fast[1].low, fast[1].high) == pytest.approx((faster[1].low, faster[1].high))


def test_no_price_is_invented():
    planned = local_plan(run_to_beat())
    assert planned.cost is None and planned.as_dict()["cost"] is None
    assert planned.render().count("price not set") == len(planned.stages) + 2  # every stage, the total, the assumption
    # The price of one machine is not used for another.
    other = plan(run_to_beat(rental={"machine": "8 x H200", "price_per_hour": 9.0}), None, B300)
    assert other.cost is None
    with pytest.raises(MustFix, match="No price|no price"):
        samples_within(100, run_to_beat(), None, B300)


def test_samples_for_an_amount_cost_that_amount():
    machine = replace(LOCAL, price_per_hour=20.0)
    rates = replace(RTX_RATES, tokens_per_sample=503)
    found = samples_within(100.0, run_to_beat(), rates, machine)
    assert found.low < found.high
    dearest = plan(run_to_beat(prompts={"train_samples": int(found.low)}), rates, machine).cost
    assert dearest.high == pytest.approx(100.0, rel=0.02)


def test_a_verifier_that_does_not_fit_is_a_problem_in_the_plan():
    small = replace(LOCAL, gpus=2)
    assert "do not fit" in plan(run_to_beat(), None, small).problems[0]
    assert local_plan(run_to_beat()).problems == ()


def finished_run(model: str = "moonshotai/Kimi-K2.5") -> dict:
    """A run of the same work that was twice as fast as the table in generating and exactly as fast in training."""
    settings = run_to_beat(generate={"responses": None}, verifier={"model": model})
    tokens = 950 * 503
    return {
        "settings": settings.as_dict(),
        "verifier_loads": 1,
        "machine": {"gpus": ["NVIDIA RTX PRO 6000 Blackwell Server Edition"] * 8},
        "stages": {
            "generate.train": {
                "state": "done",
                "seconds": 0.9 * tokens / 3072,
                "counts": {"prompts": 950, "turns": 1200, "tokens": tokens, "response_tokens": 0.9 * tokens},
            },
            # Ten seconds of work after an engine start of 20 minutes.
            "generate.eval": {
                "state": "done",
                "seconds": 1210.0,
                "counts": {"tokens": 40_000, "response_tokens": 30_720, "tokens_per_second": 3072.0},
            },
            "train": {"state": "done", "seconds": 27.7 * 60, "counts": {"steps": 9500}},
        },
    }


def test_a_finished_run_calibrates_its_own_machine_and_carries_over_to_another():
    ledger = finished_run()
    assert machine_of(ledger) is LOCAL
    rates = calibrate(ledger, RTX_RATES)
    assert rates.generate.middle == pytest.approx(3072) and rates.tokens_per_sample == pytest.approx(503)
    assert rates.response_share == pytest.approx(0.9) and rates.load_seconds.middle == pytest.approx(1200)
    assert plan(run_to_beat(), rates, LOCAL).stage("train").seconds.middle == pytest.approx(27.7 * 60, rel=0.01)
    plans = {planned.machine: planned for planned in for_all_machines(run_to_beat(generate={"responses": None}), ledger)}
    table = plan(run_to_beat(generate={"responses": None}), replace(B300_RATES, tokens_per_sample=503, response_share=0.9), B300)
    # Twice the table's generation at home is taken to be twice the table's elsewhere; training was as in the table.
    ratio = table.stage("generate.train").seconds.middle / plans["8 x B300"].stage("generate.train").seconds.middle
    assert 1.7 < ratio < 2.2
    assert plans["8 x B300"].stage("train").seconds.middle == pytest.approx(table.stage("train").seconds.middle, rel=0.15)
    assert any("MEASURED on 8 x RTX PRO 6000" in line for line in plans["8 x B300"].assumptions)


def test_compilation_and_earlier_processes_do_not_calibrate_a_step():
    ledger = finished_run()
    stage = ledger["stages"]["train"]
    steps, seconds = stage["counts"]["steps"], stage["seconds"]
    stage["seconds"] += 1200  # a killed process and its compilation among them
    stage["counts"] |= {
        "first_step_seconds": 600.0,
        "resumed_from": steps // 2,
        "seconds": 600 + seconds * (steps - steps // 2 - 1) / steps,
    }
    assert plan(run_to_beat(), calibrate(ledger, RTX_RATES), LOCAL).stage("train").seconds.middle == pytest.approx(27.7 * 60, rel=0.01)
    stage["counts"] |= {"steps": 1, "resumed_from": None}
    assert calibrate(ledger, RTX_RATES).step_fast.fixed > 0


def test_links_and_disk_are_those_of_the_machine_that_is_planned_for():
    rates = transfer(calibrate(finished_run(), RTX_RATES), LOCAL, B300)
    assert (rates.exchange, rates.update, rates.disk) == (B300_RATES.exchange, B300_RATES.update, B300_RATES.disk)


def test_runs_that_say_nothing_about_the_plan_are_refused():
    with pytest.raises(MustFix, match="The run measured verifier 'tiny'"):
        for_all_machines(run_to_beat(), finished_run(model="tiny"))
    unknown = finished_run() | {"machine": {"gpus": ["Some Card"]}}
    with pytest.raises(MustFix, match="not in the table"):
        for_all_machines(run_to_beat(), unknown)
    with pytest.raises(MustFix, match="no finished stage"):
        for_all_machines(run_to_beat(), finished_run() | {"stages": {"train": {"state": "failed", "seconds": 3}}})
    with pytest.raises(MustFix, match="not known before it is fetched"):
        plan(run_to_beat(verifier={"model": "somebody/else"}), None, LOCAL)


@pytest.mark.parametrize("job", ["smoke", "local-test", "hero"])
def test_every_shipped_job_has_a_plan_for_every_machine(job):
    plans = for_all_machines(load(job))
    assert {planned.machine for planned in plans} >= {"8 x B300", "8 x B200", "8 x H200", "8 x RTX PRO 6000"}
    text = render_plans(plans)
    assert "Longest pole" in text and "Assumptions" in text and "\x1b" not in text
    for planned in plans:
        assert json.loads(json.dumps(planned.as_dict()))["seconds"]["low"] > 0


def test_the_training_step_of_one_and_two_h200_is_in_the_model():
    """Measured with `tests/benchmarks/training_rate.py`: 133, 250 and 967 ms at 4,096, 8,192 and 32,768 tokens; two GPUs 12.7 ms more at 8,192."""
    rates, trained = MACHINES["8x-h200"].rates, 1.19e9
    for tokens, seconds in ((4096, 0.1331), (8192, 0.2497), (32_768, 0.9674)):
        assert rates.step_seconds(tokens, 1, REFERENCE_FLOP).low == pytest.approx(seconds, rel=0.025)
    for tokens, seconds in ((2048, 0.0925), (4096, 0.1568), (8192, 0.2885)):
        assert rates.step_seconds(tokens, 1, REFERENCE_FLOP).high == pytest.approx(seconds, rel=0.025)
    exchange = rates.exchange_seconds(trained, 2)
    assert exchange.low == pytest.approx(0.0157 - 0.0074, rel=0.02) and exchange.high == pytest.approx(0.2613 - 0.2486, rel=0.03)
    assert rates.exchange_seconds(trained, 1).high == 0


def test_the_type_of_the_products_is_in_the_model():
    """Measured on one H200 at 8,192 tokens a step: 42,216 tokens/s in FP8 and 15,234 in TF32."""
    for train, rate in (({}, 32_808), ({"fp8": True}, 42_216), ({"precision": "tf32"}, 15_234)):
        settings = run_to_beat(train={"tokens_per_step": 8192, "max_length": 8192} | train)
        flop = training_flop(settings, head_size(settings, KIMI_K25))
        assert 8192 / MACHINES["8x-h200"].rates.step_seconds(8192, 1, flop).low == pytest.approx(rate, rel=0.03), train


def test_a_run_in_another_type_calibrates_the_plan_for_this_one():
    ledger = finished_run()
    ledger["settings"]["train"]["precision"] = "tf32"
    rates = calibrate(ledger, RTX_RATES)
    same, faster = (plan(run_to_beat(train={"precision": products}), rates, LOCAL).stage("train").seconds for products in ("tf32", "bf16"))
    assert same.middle == pytest.approx(27.7 * 60, rel=0.01) and faster.low < 0.6 * same.low


def test_the_trial_of_the_gate_is_in_the_plan():
    """Its part of the train split is answered and trained on before the rest: the same answers, and one training more."""

    def planned(*overrides: str) -> Plan:
        few = "prompts.train_samples=6000"  # which no token budget cuts short
        return plan(load("hero", overrides=[few, *overrides], environment={}), None, B300)

    without, tried = planned(), planned("gate.min_gain=0.1", "gate.trial_fraction=0.05", "train.epochs=3")
    answered = without.stage("generate.train").seconds.high - tried.stage("generate.train").seconds.high
    assert answered == pytest.approx(0.05 * without.stage("generate.train").seconds.high)
    trial = tried.stage("baseline").seconds.high - without.stage("baseline").seconds.high
    trained = 0.05 / 3 * steps_alone(planned("train.epochs=3", "train.evaluate_every=1000000")).high
    assert trial == pytest.approx(answered + trained + tried.stage("evaluate").seconds.high, rel=0.05), "one epoch, one head judged"
    assert "the gate's trial: 5% of the train split" in tried.stage("baseline").limit and "trial" not in without.stage("baseline").limit
    assert tried.seconds.high - without.seconds.high == pytest.approx(trial - answered)
    made = tried.stage("baseline").bytes.high + tried.stage("generate.train").bytes.high
    assert made == pytest.approx(without.stage("generate.train").bytes.high) and tried.disk == without.disk
    nothing = planned("gate.min_gain=0.1", "heads.candidates=[]", "heads.warm_start=none", "heads.ngram=false")
    assert "trial" not in nothing.stage("baseline").limit, "nothing to gain over"


def test_a_trial_takes_of_a_token_budget_what_its_prompts_need():
    budget = 10_000_000
    tried = workload(
        load("hero", overrides=["gate.min_gain=0.1", "gate.trial_fraction=0.5", f"generate.train_token_budget={budget}"], environment={}),
        KIMI_K25,
    )
    assert tried.trial_tokens.high == budget == tried.train_tokens.high, "half of the prompts fill it already"
