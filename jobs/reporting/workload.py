"""How much a job has to do: tokens, bytes, parameters, FLOP. What a machine makes of it is in machines.py.

All of it follows from the settings and the verifier's shape, so these numbers are exact where the
sample lengths are known and a range where they are not. Verified against published sizes: a head of
Kimi-K2.5's shape (FFN 18,432, 64 heads of 128, 32,000 draft ids) has 1.19 B trained parameters beside
1.17 B frozen embedding, 4.7 GB in bf16, and costs about 20 GFLOP a token in training with 3 TTT steps.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import MustFix
from jobs.reporting.public_cards import SETS
from jobs.settings import Settings

WIDTH = {"bfloat16": 2, "float32": 4}
SCALE_WIDTH = 4  # FP8 states keep one fp32 scale a row and state
LOGPROB_WIDTH = 4


@dataclass(frozen=True)
class Range:
    """Low and high of an estimate; `middle` is their geometric mean, because rates err by factors."""

    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> "Range":
        return cls(value, value)

    @property
    def middle(self) -> float:
        return math.sqrt(self.low * self.high)

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.high + other.high)

    def times(self, low: float, high: float | None = None) -> "Range":
        return Range(self.low * low, self.high * (low if high is None else high))

    def over(self, rate: "Range") -> "Range":
        """Work over a rate: the least work at the highest rate, the most at the lowest."""
        return Range(self.low / rate.high, self.high / rate.low)

    def as_dict(self) -> dict[str, float]:
        return {"low": self.low, "high": self.high}


@dataclass(frozen=True)
class VerifierSize:
    """The verifier as the plan sees it; the fields of the engine's VerifierFacts plus what it weighs."""

    name: str
    layers: int
    hidden_size: int
    heads: int
    vocab_size: int
    intermediate_size: int
    bytes: int  # of the checkpoint as it is downloaded and loaded
    active_parameters: float  # that one token passes through

    @classmethod
    def read(cls, folder: Path, name: str | None = None) -> "VerifierSize":
        """From a checkpoint folder: config.json and the sizes of its safetensors files.

        Active parameters are taken as all of them (bytes / 2), an upper bound for a mixture of experts.
        """
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise MustFix(
                f"The verifier's config.json cannot be read: {error}",
                where=str(folder),
                remedy="name the folder of a checkpoint in verifier.model",
            ) from None
        text = config.get("text_config") or config
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        try:
            return cls(
                name=name or folder.name,
                layers=text["num_hidden_layers"],
                hidden_size=text["hidden_size"],
                heads=text["num_attention_heads"],
                vocab_size=text["vocab_size"],
                intermediate_size=text["intermediate_size"],
                bytes=size,
                active_parameters=max(size / 2, 1.0),
            )
        except KeyError as error:
            raise MustFix(
                f"The verifier's config.json has no {error}",
                where=str(folder / "config.json"),
                remedy="restore that file, or name another checkpoint",
            ) from None


KIMI_K25 = VerifierSize(
    name="Kimi-K2.5",
    layers=61,
    hidden_size=7168,
    heads=64,
    vocab_size=163_840,
    intermediate_size=18_432,
    bytes=540_000_000_000,
    # From its configuration: attention 6.2e9 + 60 layers of (8 + 1) experts 23.8e9 + dense FFN, embedding, head.
    active_parameters=32e9,
)
# The shipped miniature, about; its own config.json is read where it is at hand (VerifierSize.read).
TINY = VerifierSize("tiny", 10, 128, 4, 1024, 384, 6_386_888, 3e6)
# Hub models whose config.json is not on this machine when `plan` runs.
KNOWN_VERIFIERS = {"moonshotai/Kimi-K2.5": KIMI_K25, "tiny": TINY}


@dataclass(frozen=True)
class HeadSize:
    """The draft head: trained parameters and the frozen embedding it carries in its file."""

    trained: float
    fused: float  # of them in `fc`, passed once a token and not once a TTT step
    embedding: float

    @property
    def file_bytes(self) -> int:
        return int(2 * (self.trained + self.embedding))  # published in bf16

    @property
    def checkpoint_bytes(self) -> int:
        return int(self.trained * (4 + 4 + 4))  # fp32 weights and both moments of AdamW

    def train_flop(self, ttt_steps: float) -> float:
        """FLOP a token, forward and backward (6 a parameter); attention is left out, it is under 5 %."""
        return 6 * (self.fused + ttt_steps * (self.trained - self.fused))


# The published K2 and K2.5 heads that are worth a warm start (AQ-MedAI) all have this shape.
WARM_HEADS, WARM_HEAD_DIM = 64, 128
REFERENCE_FLOP = 19.6e9  # HeadSize.train_flop(3) of that shape: what the measured anchors were made with
# Time of a token's products on a GPU against bf16's: an H200's at 8,192 tokens a step (training_rate.py), fp32 by its data sheet.
PRODUCTS = {"bf16": 1.0, "fp8": 0.76, "tf32": 2.2, "fp32": 10.0}


def training_flop(settings: Settings, head: HeadSize) -> float:
    """FLOP a token, forward and backward, counted as so many in bf16 as take the same time."""
    train = settings.train
    products = "bf16" if train.device == "cpu" else "fp8" if train.fp8 else train.precision
    return head.train_flop(mean_ttt_steps(settings)) * PRODUCTS[products]


def mean_ttt_steps(settings: Settings) -> float:
    """TTT steps averaged over training, which may begin with one step only."""
    train = settings.train
    return train.single_step_share + (1 - train.single_step_share) * train.ttt_steps


def head_size(settings: Settings, verifier: VerifierSize) -> HeadSize:
    train = settings.train
    hidden = verifier.hidden_size
    warm = settings.heads.warm_start != "none" and bool(settings.heads.candidates)
    heads = train.heads or (WARM_HEADS if warm else verifier.heads)
    dim = train.head_dim or (WARM_HEAD_DIM if warm else hidden // heads)
    kv_heads = train.kv_heads or heads
    ffn = train.intermediate_size or verifier.intermediate_size
    draft_vocab = min(settings.vocab.size or verifier.vocab_size, verifier.vocab_size)
    fused = 3 * hidden * hidden
    attention = 2 * hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden  # q, k, v read [embedding, feature]
    trained = fused + attention + 3 * hidden * ffn + draft_vocab * hidden
    return HeadSize(trained=trained, fused=fused, embedding=verifier.vocab_size * hidden)


def hidden_bytes_per_token(hidden_size: int, taps: int, dtype: str) -> int:
    """Bytes of the taps and the final state of one row: (taps + 1) x hidden x 2 in bf16 (57,344 for Kimi-K2.5)."""
    if dtype == "fp8":
        return (taps + 1) * (hidden_size + SCALE_WIDTH)
    return (taps + 1) * hidden_size * WIDTH[dtype]


@dataclass(frozen=True)
class Workload:
    """What the stages have to move and compute. Tokens are prompt + response; a range where lengths are guessed."""

    eval_tokens: Range
    train_tokens: Range
    eval_response_tokens: Range
    train_response_tokens: Range
    eval_bytes_per_token: int
    train_bytes_per_token: int
    head: HeadSize
    steps: Range
    heads_judged: int
    trial_tokens: Range  # of the train split, answered and trained on for the gate before the rest of it; none without a trial
    assumptions: tuple[str, ...]

    @property
    def eval_bytes(self) -> Range:
        return self.eval_tokens.times(self.eval_bytes_per_token)

    @property
    def train_bytes(self) -> Range:
        return self.train_tokens.times(self.train_bytes_per_token)


def standard_samples(settings: Settings) -> int:
    """Standard prompts answered beside the eval split; a set of one's own without a number counts as none."""
    return sum(min(each.samples or SETS.get(each.name, 0), SETS.get(each.name, each.samples or 0)) for each in settings.prompts.standard)


def workload(
    settings: Settings,
    verifier: VerifierSize,
    *,
    tokens_per_sample: float | None = None,
    response_share: float | None = None,
) -> Workload:
    """The work of a job. Sample length and the response's share of it come from a finished run where there is one."""
    assumptions: list[str] = []
    length = _sample_length(settings, tokens_per_sample, assumptions)
    share = Range.exactly(response_share) if response_share else Range(0.6, 0.95)
    if response_share is None:
        assumptions.append("60 to 95 % of a sample's tokens are the response (no run to take it from)")
    train = length.times(settings.prompts.train_samples)
    trial = train.times(settings.gate.trial_fraction if _has_trial(settings) else 0.0)
    budget = settings.generate.train_token_budget
    if budget is not None:
        # An estimate under the budget stays: a budget limits, it does not create answers.
        train, trial = (Range(min(tokens.low, budget), min(tokens.high, budget)) for tokens in (train, trial))
        assumptions.append(f"train split limited to {budget:,} tokens by generate.train_token_budget")
    evaluation = length.times(settings.prompts.eval_samples + standard_samples(settings))
    taps = len(settings.verifier.taps or (0, 0, 0))
    # Both readings of every tap id (i and i+1) are kept for the eval split; the tap sets do not overlap.
    dtype = settings.verifier.dtype
    stored = "fp8" if settings.states.dtype == "fp8" else dtype
    eval_row = hidden_bytes_per_token(verifier.hidden_size, 2 * taps, dtype) + LOGPROB_WIDTH
    train_row = hidden_bytes_per_token(verifier.hidden_size, taps, stored) + LOGPROB_WIDTH
    per_step = settings.train.tokens_per_step * settings.train.accumulate
    steps = train.times(settings.train.epochs / per_step)
    if settings.train.max_steps is not None:
        steps = Range(min(steps.low, settings.train.max_steps), min(steps.high, settings.train.max_steps))
    candidates = len(settings.heads.candidates)
    return Workload(
        eval_tokens=evaluation,
        train_tokens=train,
        eval_response_tokens=Range(evaluation.low * share.low, evaluation.high * share.high),
        train_response_tokens=Range(train.low * share.low, train.high * share.high),
        eval_bytes_per_token=eval_row,
        train_bytes_per_token=train_row,
        head=head_size(settings, verifier),
        steps=steps,
        heads_judged=2 * candidates + int(settings.heads.untrained),
        trial_tokens=trial,
        assumptions=tuple(assumptions),
    )


def _has_trial(settings: Settings) -> bool:
    """Whether the gate asks for one, which needs something to compare with."""
    return settings.gate.min_gain is not None and bool(settings.heads.candidates or settings.heads.ngram)


def _sample_length(settings: Settings, measured: float | None, assumptions: list[str]) -> Range:
    if measured:
        assumptions.append(f"{measured:,.0f} tokens a sample, prompt and response (measured)")
        return Range.exactly(measured)
    longest = min(settings.verifier.max_model_len, settings.generate.max_new_tokens + settings.prompts.max_prompt_tokens)
    length = Range(0.15 * longest, 0.5 * longest)
    assumptions.append(
        f"{length.low:,.0f} to {length.high:,.0f} tokens a sample: 15 to 50 % of the longest allowed ({longest:,}); a guess until a run is given"
    )
    return length
