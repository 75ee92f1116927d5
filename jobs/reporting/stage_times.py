"""The model behind the plan: how long each stage takes, from the work, the rates and the link.

Each stage takes the longer of what its arithmetic and its disk or link need, because they overlap.
"""

from dataclasses import dataclass, replace
from typing import Any

from jobs.reporting.machines import Machine, Rates
from jobs.reporting.workload import REFERENCE_FLOP, Range, VerifierSize, Workload, standard_samples, training_flop
from jobs.settings import Settings
from jobs.wording import counted

ENGINE_START = "engine start"  # once a run, inside the first stage that needs the verifier
ZERO = Range(0.0, 0.0)
LINK_SHARE = (0.3, 1.0)  # of the link's nominal rate that a download or upload reaches
REPLAY_SPREAD = (1.0, 3.0)  # times the arithmetic of training; replay has not been measured at this size
PROMPTS_PER_SECOND = Range(200, 5000)  # rendered and tokenized
TOKENS_COUNTED_PER_SECOND = Range(1e6, 1e7)
HASHED_PER_SECOND = Range(0.3e9, 2e9)


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


def over_link(size: float, gbps: float) -> float:
    """Seconds that `size` bytes need over a link of so many gigabits a second, at best."""
    return size / (gbps * 1e9 / 8)


def stage_times(
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
        _baseline(settings, rates, work, train_gpus),
        _generate_train(settings, rates, work, _without(work.train_tokens, work.trial_tokens)),
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


def _baseline(settings: Settings, rates: Rates, work: Workload, train_gpus: int) -> StagePlan:
    """The heads there are, and the gate's trial: its part of the train split answered, trained on once and judged."""
    judged, trial = _replay("baseline", settings, rates, work, work.heads_judged), work.trial_tokens
    if not trial.high:
        return judged
    answered = _generate_train(settings, rates, work, trial)
    steps = trial.times(1 / (settings.train.tokens_per_step * settings.train.accumulate))
    trained = _steps(settings, rates, replace(work, train_tokens=trial, steps=steps), train_gpus)
    return replace(
        judged,
        seconds=judged.seconds + answered.seconds + trained.seconds + _replay("baseline", settings, rates, work, 1).seconds,
        bytes=answered.bytes,
        limit=f"{judged.limit}, and the gate's trial: {settings.gate.trial_fraction:.0%} of the train split answered and trained on",
    )


def _generate_train(settings: Settings, rates: Rates, work: Workload, tokens: Range) -> StagePlan:
    """So many tokens of the train split, its responses and bytes in the same proportion."""
    low, high = tokens.low / work.train_tokens.low, tokens.high / work.train_tokens.high
    responses, size = (Range(whole.low * low, whole.high * high) for whole in (work.train_response_tokens, work.train_bytes))
    return _generate("generate.train", settings, rates, tokens, responses, size)


def _without(whole: Range, part: Range) -> Range:
    return Range(whole.low - part.low, whole.high - part.high)


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
    return [
        StagePlan(
            "live",
            seconds,
            ZERO,
            f"two loads of the verifier, {counted(live.requests, 'requests')} at {', '.join(map(str, live.concurrencies))} at once",
        )
    ]


def _scaling(settings: Settings, rates: Rates, work: Workload, train_gpus: int) -> list[StagePlan]:
    shares = settings.evaluate.scaling
    if not shares:
        return []
    whole, judged = _steps(settings, rates, work, train_gpus), _replay("scaling", settings, rates, work, len(shares))
    return [
        StagePlan(
            "scaling",
            whole.seconds.times(sum(shares)) + judged.seconds,
            whole.bytes,
            f"training on {', '.join(f'{share:.0%}' for share in shares)} of the samples",
        )
    ]


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
    """The steps, and the replays between them, for which all GPUs wait while one judges."""
    steps, train, own = _steps(settings, rates, work, train_gpus), settings.train, settings.prompts.eval_samples
    judged = min(train.evaluate_samples or own, own) / (own + standard_samples(settings))
    once = _replay("train", settings, rates, work, 1).seconds.times(judged)
    often = [max(1.0, count / train.evaluate_every) if train.evaluate_every else 1.0 for count in (work.steps.low, work.steps.high)]
    return replace(steps, seconds=steps.seconds + Range(once.low * often[0], once.high * often[1]))


def _steps(settings: Settings, rates: Rates, work: Workload, train_gpus: int) -> StagePlan:
    rows = max(1.0, settings.train.accumulate / train_gpus)
    step = rates.step_seconds(settings.train.tokens_per_step, rows, training_flop(settings, work.head)) + rates.exchange_seconds(
        work.head.trained, train_gpus
    )
    arithmetic = Range(work.steps.low * step.low, work.steps.high * step.high)
    epochs = work.steps.high * settings.train.tokens_per_step * settings.train.accumulate / work.train_tokens.high
    # At best the states stay in the page cache after the first pass; at worst each epoch reads them again.
    reading = Range(work.train_bytes.low / rates.disk.high, work.train_bytes.high * epochs / rates.disk.low)
    limit = f"arithmetic of {counted(train_gpus, 'devices')}, {counted(round(work.steps.high), 'steps')}"
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
    limit = f"replay of {counted(heads, 'heads')}" if heads else "n-gram only"
    return StagePlan(name, _longer(arithmetic, reading) + Range(1, 10), ZERO, limit)


def _longer(one: Range, other: Range) -> Range:
    return Range(max(one.low, other.low), max(one.high, other.high))
