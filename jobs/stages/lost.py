"""Samples that will not be there, counted against what the run will use."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jobs.errors import MustFix


@dataclass(frozen=True)
class Lost:
    """`samples` turns of one conversation; `order` is its place in the seeded order, `detail` a sentence."""

    reason: str
    samples: int
    detail: str
    order: int = 0


def by_reason(lost: Iterable[Lost]) -> Counter[str]:
    """Samples lost for each reason."""
    counted = Counter[str]()
    for each in lost:
        counted[each.reason] += each.samples
    return counted


def refuse_too_many(lost: Sequence[Lost], used: int, share: float, split: str) -> None:
    """MustFix if `lost` are more than `share` of `used`, the samples of `split` that were asked for and will be used.

    What lies beyond a token budget belongs to neither: measured against it a faulty disk would pass for a good one.
    """
    dropped = by_reason(lost)
    if dropped.total() > share * used:
        raise MustFix(
            f"{dropped.total()} of {used} samples of the {split} split were dropped ({dict(dropped)}), "
            f"the last one because: {lost[-1].detail.rstrip('.')}",
            where=f"generate.max_dropped_share = {share}",
            remedy="mend the cause, or allow more; finished answers are kept",
        )
