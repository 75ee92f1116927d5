"""What the cards of the public Kimi-K2 heads say about themselves, and what differs from a figure of this project.

Acceptance length with 3 drafted tokens, top-1, the bonus token included. A card's figure comes from a serving
engine's counters; its prompts' wording, sampling and answer lengths are not all stated.
"""

from dataclasses import dataclass

from jobs.settings import Settings

DRAFT_TOKENS = 3
SETS = {"mt-bench": 80, "humaneval": 164, "gsm8k": 1319, "math500": 500}  # prompts of each


@dataclass(frozen=True)
class PublicCard:
    """A public head: its hub id, acceptance length by standard set, and a remark."""

    model: str
    lengths: dict[str, float]
    remark: str = ""


CARDS = (
    PublicCard("AQ-MedAI/Kimi-K2-Instruct-eagle3", {"humaneval": 3.372, "gsm8k": 3.165, "math500": 3.490}, "made for Kimi-K2"),
    PublicCard("AQ-MedAI/Kimi-K25-eagle3", {"gsm8k": 3.07}, "about, from an acceptance rate"),
    PublicCard("lightseekorg/kimi-k2.5-eagle3", {"mt-bench": 2.687, "humaneval": 3.285, "gsm8k": 3.201, "math500": 3.342}),
    PublicCard("lightseekorg/kimi-k2.5-eagle3-mla", {"mt-bench": 2.940, "humaneval": 2.969, "gsm8k": 3.017, "math500": 3.051}, "MLA draft"),
)


def cards_for(settings: Settings) -> tuple[PublicCard, ...]:
    """The cards that a head of this verifier may stand beside: none for another verifier or another number of drafts."""
    return CARDS if "kimi-k2" in settings.verifier.model.lower() and settings.evaluate.draft_tokens == DRAFT_TOKENS else ()


def differences(settings: Settings) -> list[str]:
    """What differs between the figures of this run and those of the cards, one sentence each."""
    generate, share = settings.generate, settings.prompts.thinking_share
    limited = [f"{each.name} {each.samples}" for each in settings.prompts.standard if each.samples]
    modes = {
        f"in thinking mode at temperature {generate.thinking.temperature:g}": share,
        f"in instant mode at {generate.instant.temperature:g}": 1 - share,
    }
    told = " and ".join(f"{part:.0%} of the answers {mode}" for mode, part in modes.items() if part > 0)
    found = [
        "here by exact replay over stored answers, on the cards from an engine's counters; the two agree where the answers are the same",
        f"here {told}, at most {generate.max_new_tokens:,} tokens each; the cards do not state theirs in full",
        "the wording around a question need not be the cards'",
    ]
    return found + ([f"not every prompt of a set: {', '.join(limited)} at most"] if limited else [])
