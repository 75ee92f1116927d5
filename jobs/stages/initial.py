"""The head that training starts with: from scratch, or from the head the baseline chose."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from jobs.context import Context
from jobs.draft.formats import load_head
from jobs.draft.model import Eagle3Head, HeadConfig
from jobs.draft.warm_start import warm_start
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix
from jobs.settings import Settings
from jobs.storage.files import read_json
from jobs.verifier.chat import Chat
from jobs.verifier.facts import VerifierFacts


@dataclass(frozen=True)
class Start:
    """An existing head: its folder, and the reading of its tap ids under which it scored better."""

    name: str
    folder: Path
    taps: tuple[int, int, int]


def chosen(context: Context) -> Start | None:
    """The head to start from, None for scratch. MustFix if the one asked for could not be judged."""
    wanted = context.settings.heads.warm_start
    judged = read_json(context.path / "baseline.json")["heads"]
    candidates = {c.name: judged[c.name] for c in context.settings.heads.candidates if c.name in judged}
    if wanted == "none" or (wanted == "best" and not candidates):
        return None
    if wanted == "best":
        wanted = max(candidates, key=lambda name: candidates[name]["acceptance_length"]["mean"])
    if wanted not in candidates:
        raise MustFix(
            f"The head {wanted!r} could not be judged, so training cannot start from it", where="heads.warm_start",
            remedy="see the baseline's notes, or choose `best` or `none`",
        )  # fmt: skip
    return Start(wanted, Path(context.locations()["heads"][wanted]), tuple(candidates[wanted]["taps"]))


def warm(context: Context, start: Start, verifier: VerifierWeights, counts: Mapping[int, int] | Tensor) -> Eagle3Head:
    """The existing head, adapted: ids it cannot draft but must take the places of its rarest ones.

    counts: frequency of the response ids; the same counts give the same head, so `vocab` and
    `train` agree without handing weights over.
    """
    head = load_head(start.folder, verifier=verifier, taps=start.taps)
    found = warm_start(head, verifier, counts, Chat.load(context.verifier_path).special_token_ids)
    context.note(
        f"warm start from {start.name}, taps read as {list(start.taps)}: it drafts {found.coverage_before:.2%} of the response tokens; "
        f"special ids it could not draft: {list(found.missing_forced)}; embedding rows that were not the verifier's: {found.embedding_differed}"
    )
    return head


def scratch(context: Context, verifier: VerifierWeights, draft_ids: Tensor) -> Eagle3Head:
    facts = VerifierFacts.read(context.verifier_path)
    return Eagle3Head.from_scratch(scratch_config(context.settings, facts, len(draft_ids)), verifier, draft_ids, context.settings.job.seed)


def scratch_config(settings: Settings, facts: VerifierFacts, draft_vocab_size: int) -> HeadConfig:
    """Shape of a new head: the settings' values, and the verifier's where they leave one open."""
    train = settings.train
    heads = train.heads or facts.heads
    return HeadConfig(
        vocab_size=facts.vocab_size, draft_vocab_size=draft_vocab_size, hidden_size=facts.hidden_size,
        intermediate_size=train.intermediate_size or facts.intermediate_size, heads=heads, kv_heads=train.kv_heads or heads,
        head_dim=train.head_dim or facts.hidden_size // heads, rms_norm_eps=facts.rms_norm_eps, rope_theta=train.rope_theta, rope_scaling=None,
        taps=facts.checked_taps(settings.verifier.taps), norm_before_residual=train.norm_before_residual,
    )  # fmt: skip
