"""Start from a published head: keep what it can draft, exchange what it lacks for what it never uses.

A K2-Instruct head never saw `<think>`: it cannot draft it, and no training teaches it an id that is not
in its map. So the ids this verifier's answers need replace the head's rarest ids, one row of the output
head each. A new row is the verifier's own lm_head row for that id, scaled to the mean norm of the old
rows, so that it enters the softmax at the scale the head was trained at. Rows of ids that stay are kept
bit for bit. All rows are then put into ascending order of their target ids, which the draft vocabulary
asks for (`vocabulary.py` says why) and which neither a new id nor every published head's map is in.

The embedding becomes the verifier's own: vLLM keeps a second copy of one that differs in a single bit,
and a head made for another release of the verifier has slightly different rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jobs.draft.model import Eagle3Head
from jobs.draft.vocabulary import DraftVocabulary
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix


@dataclass(frozen=True)
class WarmStart:
    """What a warm start found and changed.

    missing_forced: special ids the head could not draft; replaced: (old id, new id), the rarest old id first;
    coverage: share of the counted response tokens the head could draft, before and after;
    embedding_differed: rows of the head's embedding that were not the verifier's.
    """

    missing_forced: tuple[int, ...]
    replaced: tuple[tuple[int, int], ...]
    coverage_before: float
    coverage_after: float
    embedding_differed: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "missing_forced": list(self.missing_forced),
            "replaced": [list(pair) for pair in self.replaced],
            "coverage_before": self.coverage_before,
            "coverage_after": self.coverage_after,
            "embedding_differed": self.embedding_differed,
        }


@torch.no_grad()
def warm_start(head: Eagle3Head, verifier: VerifierWeights, counts: Mapping[int, int] | Tensor, forced_ids: Iterable[int]) -> WarmStart:
    """Adapt a loaded head to this verifier, in place.

    Args:
        head: from `jobs.draft.formats.load_head`.
        verifier: gives the rows of new ids and the embedding.
        counts: frequency of response ids, [V] or a mapping from id.
        forced_ids: special and template ids that must be draftable.

    Raises:
        MustFix: the verifier does not fit the head, or more forced ids than draft ids.
    """
    config = head.config
    verifier.check(config.vocab_size, config.hidden_size)
    forced = sorted({int(i) for i in forced_ids})
    if len(forced) > config.draft_vocab_size or (forced and not 0 <= forced[0] <= forced[-1] < config.vocab_size):
        raise MustFix(
            f"{len(forced)} special ids do not fit a draft vocabulary of {config.draft_vocab_size} of {config.vocab_size}", where="heads.warm_start",
            remedy="take a head with a larger one",
        )  # fmt: skip
    ids = head.draft_ids.cpu().clone()  # [Vd]
    before = DraftVocabulary(head.d2t.cpu(), head.t2d.cpu(), float("nan"))
    coverage_before = before.coverage_of(counts)
    missing = [i for i in forced if not before.t2d[i]]
    places = _rarest(ids, counts, set(forced), len(missing), config.vocab_size)  # draft indices that give way
    replaced = tuple((int(ids[place]), new) for place, new in zip(places, missing, strict=True))
    rows = head.lm_head.weight  # [Vd, H]
    scale = rows.float().norm(dim=1).mean()
    for place, new in zip(places, missing, strict=True):
        fresh = verifier.lm_head[new].to(device=rows.device, dtype=torch.float32)  # [H]
        rows[place] = (fresh * (scale / fresh.norm().clamp_min(1e-12))).to(rows.dtype)
        ids[place] = new
    ids, order = ids.sort()
    rows.copy_(rows[order.to(rows.device)])
    head.set_vocabulary(ids)
    own = head.embed_tokens.weight.cpu()
    differed = int((own != verifier.embedding).any(dim=1).sum()) if own.dtype == verifier.embedding.dtype else own.shape[0]
    if differed:
        device = head.fc.weight.device
        head.set_embedding(verifier.embedding.to(device))
    after = DraftVocabulary(head.d2t.cpu(), head.t2d.cpu(), float("nan"))
    return WarmStart(tuple(missing), replaced, coverage_before, after.coverage_of(counts), differed)


def _rarest(ids: Tensor, counts: Mapping[int, int] | Tensor, keep: set[int], number: int, vocab_size: int) -> list[int]:
    """Draft indices of the `number` rarest ids outside `keep`; a tie gives up the higher id."""
    get = (lambda i: int(counts[i])) if isinstance(counts, Tensor) else (lambda i: int(counts.get(i, 0)))
    order = sorted(
        (place for place, i in enumerate(ids.tolist()) if i not in keep), key=lambda place: (get(int(ids[place])), -int(ids[place]))
    )
    return order[:number]
