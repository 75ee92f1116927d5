"""Live: none and the winner through the real server, at several concurrencies, on prompts of the eval split.

Replay says how many tokens a step gives; what that is worth in tokens a second depends on the machine,
the batch and the verifier (n-gram speculation made one server slower with 17 to 31 % of its drafts
accepted). So the best way to speculate is served as a user would serve it, beside plain decoding, and
vLLM's own benchmark is run against both. Acceptance comes from the engine's counters.

A server costs a load of the verifier, two in all, so the stage is there on request only
(`evaluate.live.concurrencies`). Every finished measurement is kept in `live.json` at once: a server
that dies costs its own open measurements, the others are made, the run goes on, and the next start
measures what is missing.
"""

import gc
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jobs.context import Context
from jobs.errors import Interrupted, JobError, MustFix, TryAgain
from jobs.run import digest
from jobs.stages import speculation, standard
from jobs.stages.conversations import seeded
from jobs.storage.files import read_json, write_atomically, write_json_atomically
from jobs.storage.responses import RESPONSES, Response, scan_responses
from jobs.verifier.chat import Chat
from jobs.verifier.serve import load, served

NAME = "live"
SETTINGS = (
    "evaluate.live", "evaluate.draft_tokens", "heads.ngram_window", "generate.max_new_tokens", "generate.thinking", "generate.instant", "job.seed",
    "verifier.dtype", "verifier.max_model_len", "verifier.max_num_seqs", "verifier.max_num_batched_tokens", "verifier.tensor_parallel_size",
    "verifier.parallel", "verifier.enforce_eager",
)  # fmt: skip
NONE = "none"
# What is kept of the benchmark's result, under the names it gives.
KEPT = (
    "completed", "duration", "total_input_tokens", "total_output_tokens", "output_throughput", "mean_itl_ms", "median_itl_ms", "p90_itl_ms", "p99_itl_ms",
    "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "spec_decode_acceptance_length",
    "spec_decode_acceptance_rate", "spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens",
    "spec_decode_per_position_acceptance_rates", "command",
)  # fmt: skip


@dataclass(frozen=True)
class Traffic:
    """What is sent: prompts as text and the sampling of their mode."""

    prompts: list[dict[str, Any]]  # prompt, output_tokens
    sampling: dict[str, float]
    mode: str  # thinking | instant


def inputs(context: Context) -> list[Path]:
    return [
        context.path / "trained",
        context.path / "baseline.json",
        context.path / "evaluation.json",
        context.states("eval") / "responses.jsonl",
    ]


def outputs(context: Context) -> list[Path]:
    return [context.path / "live.json"]


def run(context: Context) -> dict[str, Any]:
    wanted, folder = context.settings.evaluate.live.concurrencies, context.path / "live"
    folder.mkdir(exist_ok=True)
    traffic = traffic_of(context)
    write_atomically(folder / "prompts.jsonl", "".join(json.dumps(row) + "\n" for row in traffic.prompts).encode())
    name = winner(context)
    speculative = {NONE: None, name: _speculative(context, name, folder)}
    _free_this_process()
    kept = _kept(context, name, traffic)
    problems = []
    for way, config in speculative.items():
        try:
            _measure(context, way, config, traffic, kept)
        except Interrupted:
            raise
        except JobError as error:
            kept["ways"][way]["error"] = str(error)
            problems.append(error)
        _save(context, kept)
    if problems:
        done = sum(len(way["runs"]) for way in kept["ways"].values())
        kind = MustFix if isinstance(problems[0], MustFix) else TryAgain
        raise kind(
            f"{done} of {len(wanted) * len(speculative)} live measurements were made: {problems[0].message}", where=problems[0].where,
            remedy="run the same command again for the others, or do without them: --set evaluate.live.concurrencies=[]",
        )  # fmt: skip
    return {
        "winner": name,
        "measurements": len(wanted) * len(speculative),
        "requests": len(traffic.prompts),
        "best_speedup": round(max(kept["speedup"].values()), 4),
    }


def winner(context: Context) -> str:
    """The best way to speculate that was judged; the untrained head is none."""
    heads = _judged(context)
    return max((name for name in heads if name != "untrained"), key=lambda name: heads[name]["acceptance_length"]["mean"])


def _judged(context: Context) -> dict[str, Any]:
    return read_json(context.path / "baseline.json")["heads"] | read_json(context.path / "evaluation.json")["heads"]


def traffic_of(context: Context) -> Traffic:
    """Prompts of the eval split in seeded order, of the mode that most of them have, as the server gets them.

    A prompt goes as text, as a user's does; one whose text does not give its ids again is left out, so that
    the server sees what the replay saw. Raises MustFix if none is left.
    """
    settings, chat = context.settings, Chat.load(context.verifier_path)
    found = (response for _, _, response in scan_responses(context.states("eval") / RESPONSES))
    answers = [answer for answer in found if standard.set_of(answer.id) is None]
    thinking = 2 * sum(answer.thinking for answer in answers) >= len(answers)
    chosen = sorted((a for a in answers if a.thinking == thinking), key=lambda answer: seeded(settings.job.seed, answer.id))
    rows = [row for answer in chosen if (row := _row(context, chat, answer)) is not None][: settings.evaluate.live.requests]
    if not rows:
        raise MustFix(
            "No prompt of the eval split can be sent as text",
            where="evaluate.live",
            remedy="measure without it: --set evaluate.live.concurrencies=[]",
        )
    mode = settings.generate.thinking if thinking else settings.generate.instant
    temperature = mode.temperature if settings.evaluate.live.temperature is None else settings.evaluate.live.temperature
    if temperature > 0 and not torch.cuda.is_available():
        context.note("live: greedy on CPU, where speculation is verified greedily only")
        temperature = 0.0
    return Traffic(rows, {"temperature": temperature, "top_p": mode.top_p if temperature else 1.0}, "thinking" if thinking else "instant")


def _row(context: Context, chat: Chat, answer: Response) -> dict[str, Any] | None:
    settings = context.settings
    text = chat.tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False)
    if list(chat.tokenizer.encode(text)) != answer.prompt_token_ids:
        return None
    longest = settings.evaluate.live.max_new_tokens or settings.generate.max_new_tokens
    return {"prompt": text, "output_tokens": min(longest, settings.verifier.max_model_len - len(answer.prompt_token_ids))}


def _speculative(context: Context, name: str, folder: Path) -> dict[str, Any]:
    """vLLM's speculative config of the winner, with the taps it was judged under."""
    if name == "trained":
        return speculation.config_of(context, name, folder, None, source=context.path / "trained")
    taps = read_json(context.path / "baseline.json")["heads"][name].get("taps")
    return speculation.config_of(context, name, folder, tuple(taps) if taps else None)


def _kept(context: Context, name: str, traffic: Traffic) -> dict[str, Any]:
    """What an earlier start measured of the same thing, or the empty table."""
    heads = _judged(context)
    what = {
        "winner": name, "replay": heads[name]["acceptance_length"], "draft_tokens": context.settings.evaluate.draft_tokens, "sampling": traffic.sampling, "mode": traffic.mode,
        "requests": len(traffic.prompts), "prompts_sha256": digest(traffic.prompts),
    }  # fmt: skip
    path = context.path / "live.json"
    earlier = read_json(path) if path.exists() else {}
    if {key: earlier.get(key) for key in what} != what or context.run.stage(NAME)["inputs"] != earlier.get("inputs"):
        earlier = {}
    ways = earlier.get("ways") or {way: {"runs": {}} for way in (NONE, name)}
    for way in ways.values():
        way.pop("error", None)
    return what | {"inputs": context.run.stage(NAME)["inputs"], "ways": ways, "speedup": {}}


def _measure(context: Context, way: str, config: dict[str, Any] | None, traffic: Traffic, kept: dict[str, Any]) -> None:
    """One server, every concurrency that is not measured yet."""
    settings, folder, entry = context.settings, context.path / "live", kept["ways"][way]
    missing = [c for c in settings.evaluate.live.concurrencies if str(c) not in entry["runs"]]
    if not missing:
        return
    context.note(f"live: serving {way}")
    with served(
        context.verifier_path, settings.verifier, folder / f"{way}-server.log", speculative=config, seed=settings.job.seed,
        start_seconds=settings.evaluate.live.start_seconds, should_stop=context.should_stop.raise_if_set,
    ) as server:  # fmt: skip
        context.count_load()
        context.run.event("live server started", way=way, process=server.process.pid, command=server.command)
        entry["command"] = server.command
        for concurrency in missing:
            context.progress(
                sum(len(w["runs"]) for w in kept["ways"].values()), 2 * len(settings.evaluate.live.concurrencies), "measurements"
            )
            result = load(
                server, context.verifier_path, folder / "prompts.jsonl", folder / f"{way}-{concurrency}.json", concurrency=concurrency,
                requests=len(traffic.prompts), sampling=traffic.sampling, seed=settings.job.seed, trust_remote_code=settings.verifier.trust_remote_code,
                stall_seconds=settings.verifier.stall_seconds, should_stop=context.should_stop.raise_if_set,
            )  # fmt: skip
            entry["runs"][str(concurrency)] = {key: result[key] for key in KEPT if result.get(key) is not None and not _is_nan(result[key])}
            _save(context, kept)


def _save(context: Context, kept: dict[str, Any]) -> None:
    plain, best = (kept["ways"][way]["runs"] for way in (NONE, kept["winner"]))
    kept["speedup"] = {c: best[c]["output_throughput"] / plain[c]["output_throughput"] for c in best if c in plain}
    if kept["sampling"]["temperature"] == 0:
        kept["same_answers"] = same_answers(context.path / "live", kept["winner"], list(plain), list(best))
        kept["first_divergences"] = first_divergences(context.path / "live", kept["winner"], list(plain), list(best))
    write_json_atomically(context.path / "live.json", kept)


def same_answers(folder: Path, winner: str, plain: list[str], best: list[str]) -> dict[str, dict[str, float]]:
    """Share of the prompts with the same greedy answer: the winner's and the plain one, and plain ones of two concurrencies.

    Speculation is lossless up to rounding: on a GPU another batch gives other last bits, and now and then another
    token. So the first figure is to be held against the second, and in fp32 on CPU both are 1.
    """

    def share(pair: list[tuple[Answer, Answer]]) -> float:
        return sum(one.text == other.text for one, other in pair) / len(pair)

    return {kind: {c: share(pair) for c, pair in pairs.items()} for kind, pairs in _pairs(folder, winner, plain, best).items()}


def first_divergences(folder: Path, winner: str, plain: list[str], best: list[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """How often greedy answers part, of the same pairs: a whole answer is the likelier another one the longer it is, this is not.

    `diverged` of `answers` part somewhere; `tokens` were compared up to there, or to the end; `per_1000_tokens` is the rate.
    The benchmark keeps texts and counts of tokens: where a text parts, its characters say how many of its tokens came before.
    The winner's have `more_than_chance`: its rate is above that of all plain pairs together by more than two standard errors of
    the difference of two Poisson counts with one rate. None where no two concurrencies of plain decoding are there to hold it against.
    """
    found = {kind: {c: _parted(pair) for c, pair in pairs.items()} for kind, pairs in _pairs(folder, winner, plain, best).items()}
    rounding = [sum(one[key] for one in found["plain_and_plain"].values()) for key in ("diverged", "tokens")]
    for one in found["winner_and_plain"].values():
        one["more_than_chance"] = _more_than_chance((one["diverged"], one["tokens"]), tuple(rounding))
    return found


@dataclass(frozen=True)
class Answer:
    """What the benchmark keeps of one: its text, and the tokens the server counted in it."""

    text: str
    tokens: int


def _pairs(folder: Path, winner: str, plain: list[str], best: list[str]) -> dict[str, dict[str, list[tuple[Answer, Answer]]]]:
    """Answers to the same prompts by concurrency: plain and the winner's, and plain ones of the first and of another concurrency."""

    def answers(way: str, concurrency: str) -> list[Answer]:
        result = read_json(folder / f"{way}-{concurrency}.json")
        return [Answer(*one) for one in zip(result["generated_texts"], result["output_lens"], strict=True)]

    def pair(way: str, one: str, other: str) -> list[tuple[Answer, Answer]]:
        return list(zip(answers(NONE, one), answers(way, other), strict=True))

    return {
        "winner_and_plain": {c: pair(winner, c, c) for c in best if c in plain},
        "plain_and_plain": {c: pair(NONE, plain[0], c) for c in plain[1:]},
    }


def _parted(pair: list[tuple[Answer, Answer]]) -> dict[str, Any]:
    diverged, tokens = 0, 0.0
    for one, other in pair:
        compared = min(one.tokens, other.tokens)
        if one.text != other.text:
            diverged += 1
            alike = len(os.path.commonprefix((one.text, other.text)))
            compared = min(one.tokens * alike / max(len(one.text), 1) + 1, compared)  # the token that differs was compared, too
        tokens += compared
    return {
        "answers": len(pair),
        "diverged": diverged,
        "tokens": round(tokens, 1),
        "per_1000_tokens": 1000 * diverged / tokens if tokens else None,
    }


def _more_than_chance(winner: tuple[int, float], plain: tuple[int, float]) -> bool | None:
    """(diverged, tokens) of each; two standard errors of the difference, both with the rate they have together."""
    (parted, tokens), (rounded, others) = winner, plain
    if not tokens or not others:
        return None
    error = math.sqrt((parted + rounded) / (tokens + others) * (1 / tokens + 1 / others))
    return parted / tokens - rounded / others > 2 * error


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _free_this_process() -> None:
    """The server takes its share of every GPU; what replay and training held here is given back."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
