"""Generate: the verifier answers every prompt, turn by turn, and its hidden states are kept as they are computed.

A conversation is answered in the context of the verifier's own earlier answers; every turn is a
sequence of its own, `<prompt id>#<turn>`. A sample is committed by its line in `responses.jsonl`,
written once its states are durable, so a kill at any moment loses only what is in flight and a new
run repeats nothing. With `generate.responses` nothing is generated: existing answers are fed
through the verifier and only their states are made, and what overlaps with a standard prompt is not
trained on. With `generate.endpoints` other machines' servers answer, and each answer is fed through
the verifier here as it arrives.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.context import Context
from jobs.stages import initial, speculation
from jobs.stages.answering import Answering, Existing
from jobs.stages.existing import existing_responses
from jobs.storage.responses import RESPONSES, ResponseLog
from jobs.storage.states import StateLayout
from jobs.verifier import fit, loading
from jobs.verifier.chat import Chat
from jobs.verifier.engine import VerifierEngine
from jobs.verifier.facts import VerifierFacts

SETTINGS = (
    "generate.backend", "generate.responses", "generate.max_new_tokens", "generate.thinking", "generate.instant", "generate.stop_on_repetition",
    "verifier.model", "verifier.revision", "verifier.dtype", "verifier.taps", "verifier.max_model_len", "job.seed",
)  # fmt: skip


@dataclass(frozen=True)
class GenerateStage:
    """One split of the stage, with the attributes every stage module has."""

    split: str

    @property
    def NAME(self) -> str:  # noqa: N802  the name every stage has it under
        return f"generate.{self.split}"

    @property
    def SETTINGS(self) -> tuple[str, ...]:  # noqa: N802
        return (*SETTINGS, "generate.train_token_budget", "states.dtype") if self.split == "train" else SETTINGS

    def inputs(self, context: Context) -> list[Path]:
        existing = context.settings.generate.responses
        prompts, given = context.path / "prompts.jsonl", Path(existing).absolute() / self.split / RESPONSES if existing else None
        if given is None:
            return [context.path / "fetched.json", prompts]
        # Of the prompts only the standard sets matter then: no answer that overlaps with one is trained on.
        overlap = [prompts] if self.split == "train" and context.settings.prompts.standard else []
        return [context.path / "fetched.json", given, *overlap]

    def outputs(self, context: Context) -> list[Path]:
        return [context.states(self.split)]

    def run(self, context: Context) -> dict[str, Any]:
        return run_split(context, self.split)


def stage(split: str) -> GenerateStage:
    """The stage `generate.eval` or `generate.train`."""
    return GenerateStage(split)


def read_ahead(context: Context) -> None:
    """The verifier's files are here: they are read while prompts, imports and the engine's set-up run, if it is to be loaded at all."""
    if any(context.run.stage(f"generate.{split}")["state"] != "done" for split in ("eval", "train")):
        context.reading = loading.read_ahead(context.verifier_path, context.settings.verifier)


def start_engine(context: Context) -> Any:
    """The engine for every split of a run: it puts out the taps under both readings, the stores select."""
    settings = context.settings
    if settings.generate.backend == "speculators":
        from jobs.verifier import speculators_backend  # reference only, needs compat's speculators shims

        return speculators_backend.start(context)
    if settings.generate.endpoints:
        from jobs.verifier import remote

        return remote.start(settings, lambda: _local_engine(context), context.note)
    return _local_engine(context)


def _local_engine(context: Context) -> VerifierEngine:
    settings = context.settings
    taps = VerifierFacts.read(context.verifier_path).both_readings(settings.verifier.taps)
    drafter = speculation.drafter(context)
    if drafter is not None:
        context.note(
            f"generate.speculate = {settings.generate.speculate}: {drafter.name} drafts"
            + (f", taps {list(drafter.taps)}" if drafter.taps else "")
        )
    engine = VerifierEngine(context.verifier_path, settings.verifier, seed=settings.job.seed, capture_taps=taps, drafter=drafter)
    if settings.verifier.tensor_parallel_size > 1:
        context.note(f"verifier.parallel = {settings.verifier.parallel} is {engine.parallel.name}: {engine.parallel.why}")
        if settings.verifier.parallel == "auto" and (more := fit.of_data_parallel_attention(context.verifier_path, settings.verifier)):
            context.note(f"verifier.parallel: {more}")
    return engine


def run_split(context: Context, split: str, *, share: float = 1.0) -> dict[str, Any]:
    """Answer (or prefill) one split into `context.states(split)` and return the counts for the ledger.

    share: only so much of it, from the front of its seeded order; a later call with more continues.
    """
    facts, chat = VerifierFacts.read(context.verifier_path), Chat.load(context.verifier_path)
    layout = layout_of(context, split, facts, chat)
    work = Existing if context.settings.generate.responses else Answering
    if context.settings.generate.backend == "speculators":
        from jobs.verifier import speculators_backend

        responses, left_out = existing_responses(context, split, facts, chat, layout)
        return speculators_backend.extract(context, split, layout, responses) | left_out
    with ResponseLog(context.states(split)) as log:
        return work(context, split, facts, chat, layout, log, share).run()


def layout_of(context: Context, split: str, facts: VerifierFacts, chat: Chat) -> StateLayout:
    """Eval keeps both readings of the taps, never in FP8; train the three that training will read."""
    settings = context.settings
    taps, dtype = facts.both_readings(settings.verifier.taps), settings.verifier.dtype
    if split == "train":
        start = initial.chosen(context) if (context.path / "baseline.json").exists() else None
        taps = tuple(sorted(start.taps)) if start else facts.checked_taps(settings.verifier.taps)
        dtype = "float8_e4m3fn" if settings.states.dtype == "fp8" else dtype
    return StateLayout(
        taps=taps, hidden_size=facts.hidden_size, dtype=dtype, verifier=settings.verifier.model,
        verifier_revision=facts.revision, tokenizer_sha256=chat.tokenizer_sha256,
    )  # fmt: skip
