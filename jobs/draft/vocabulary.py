"""The draft vocabulary: which target ids the head can draft, by frequency in the verifier's own answers.

Kimi-K2.5 has 163,840 ids; an output head over all of them would be 1.17 B more weights to read a
drafted token. 32,000 ids cover about 99 % of what is drafted; a position whose truth is outside is
simply a rejected draft, never a wrong output.

Two decisions:

* **Draft ids ascend in target id.** `speculators` slices the verifier's lm_head by the mask `t2d`,
  which yields rows in ascending target order; any other order would pair rows with wrong ids there.
  It also makes a tie of two logits fall on the same target id here and in vLLM, which scatters the
  draft logits into the target vocabulary before its argmax.
* **Special and template ids are forced in**, whatever their frequency: `<think>`, `</think>` and the
  stop ids are few in number and certain in place, so a head that cannot draft them loses a step at
  every turn (a K2-Instruct head has never seen `<think>`).

The file is safetensors: `d2t` int64 [D], OFFSETS (target id = i + d2t[i]; a missing or absolute map
sends every draft to a wrong id and acceptance collapses without an error), `t2d` bool [V], and the
coverage in the metadata.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from jobs.errors import MustFix
from jobs.storage.files import write_atomically

FORMAT_VERSION = 1


@dataclass(frozen=True)
class DraftVocabulary:
    """`d2t` int64 [D] offsets, `t2d` bool [V], `coverage` in 0..1: share of the counted tokens inside."""

    d2t: Tensor
    t2d: Tensor
    coverage: float

    @property
    def size(self) -> int:
        return self.d2t.numel()

    @property
    def vocab_size(self) -> int:
        return self.t2d.numel()

    @property
    def draft_ids(self) -> Tensor:
        """Target id of every draft id: int64 [D], ascending."""
        return draft_ids_of(self.d2t)

    @classmethod
    def from_ids(cls, draft_ids: Tensor, vocab_size: int, coverage: float = float("nan")) -> "DraftVocabulary":
        """The maps of ascending, distinct target ids [D]."""
        ids = torch.as_tensor(draft_ids, dtype=torch.int64).cpu()  # [D]
        if ids.numel() == 0 or ids.min() < 0 or ids.max() >= vocab_size or not bool((ids[1:] > ids[:-1]).all()):
            raise MustFix(
                f"A draft vocabulary must be distinct ascending ids in 0..{vocab_size - 1}",
                where="vocab.safetensors",
                remedy="build the draft vocabulary again",
            )
        t2d = torch.zeros(vocab_size, dtype=torch.bool)  # [V]
        t2d[ids] = True
        return cls(ids - torch.arange(ids.numel()), t2d, coverage)

    def coverage_of(self, counts: Mapping[int, int] | Tensor) -> float:
        """Share of the counted tokens that this vocabulary can draft."""
        dense = _dense(counts, self.vocab_size)  # [V]
        return _share(dense, self.t2d)

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        metadata = {"format": "pt", "version": str(FORMAT_VERSION), "coverage": json.dumps(self.coverage)}
        write_atomically(path, save({"d2t": self.d2t.contiguous(), "t2d": self.t2d.contiguous()}, metadata))

    @classmethod
    def load(cls, path: Path) -> "DraftVocabulary":
        """Read and check a saved vocabulary.

        Raises:
            MustFix: missing, unreadable, of an unknown version, or with maps that contradict each other.
        """
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file is no mapping
        except (OSError, SafetensorError) as error:
            raise MustFix(f"The draft vocabulary cannot be read: {error}", where=str(path), remedy="run the stage vocab again") from error
        if metadata.get("version") != str(FORMAT_VERSION) or set(tensors) != {"d2t", "t2d"}:
            raise MustFix(
                f"Not a draft vocabulary of version {FORMAT_VERSION}: version {metadata.get('version')}, tensors {sorted(tensors)}",
                where=str(path),
                remedy="run the stage vocab again",
            )
        check_maps(tensors["d2t"], tensors["t2d"], where=str(path))
        return cls(tensors["d2t"], tensors["t2d"], json.loads(metadata["coverage"]))


def draft_ids_of(d2t: Tensor) -> Tensor:
    """Offsets [D] -> target ids [D]."""
    return d2t.to(torch.int64) + torch.arange(d2t.numel(), device=d2t.device)


def check_maps(d2t: Tensor, t2d: Tensor, *, where: str) -> None:
    """Refuse maps that contradict each other: an absolute d2t and a mask of another vocabulary both load silently elsewhere.

    Published heads need not be in ascending order, so order is not asked for here.
    """
    ids = draft_ids_of(d2t)  # [D]
    vocab_size = t2d.numel()
    if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise MustFix(
            f"d2t leads to ids {int(ids.min()) if ids.numel() else 0}..{int(ids.max()) if ids.numel() else 0}, outside the verifier's {vocab_size}",
            where=where,
            remedy="d2t must hold offsets (target id = i + d2t[i]), not ids",
        )
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    if int(mask.sum()) != ids.numel() or not torch.equal(mask, t2d.to(torch.bool).cpu()):
        raise MustFix(
            f"d2t names {int(mask.sum())} distinct ids of {ids.numel()} and t2d marks {int(t2d.sum())}, and they are not the same ids",
            where=where,
            remedy="build the draft vocabulary again or take another checkpoint",
        )


def build(counts: Mapping[int, int] | Tensor, size: int | None, forced_ids: Iterable[int], vocab_size: int) -> DraftVocabulary:
    """The `size` most frequent ids, with `forced_ids` in at any frequency.

    Ties go to the lower id, so the result depends on the counts alone. Where fewer than `size` ids
    were ever seen, the lowest unseen ones fill up (the head's shape is the settings', not the data's).

    Args:
        counts: frequency by id; a mapping or int64 [V].
        size: ids of the draft vocabulary; None is the whole vocabulary.
        forced_ids: special and template ids.
        vocab_size: the verifier's V.

    Raises:
        MustFix: the size does not fit the vocabulary or the forced ids, an id lies outside, nothing was counted.
    """
    dense = _dense(counts, vocab_size)  # [V]
    forced = sorted({int(i) for i in forced_ids})
    size = vocab_size if size is None else size
    if not 0 < size <= vocab_size:
        raise MustFix(
            f"A draft vocabulary of {size} ids does not fit the verifier's {vocab_size}",
            where="vocab.size",
            remedy=f"take at most {vocab_size}",
        )
    if forced and not 0 <= forced[0] <= forced[-1] < vocab_size:
        raise MustFix(
            f"A special id of {forced[0]} to {forced[-1]} lies outside the verifier's vocabulary of {vocab_size}", where="vocab",
            remedy="restore the tokenizer that belongs to this verifier",
        )  # fmt: skip
    if len(forced) > size:
        raise MustFix(f"{len(forced)} special ids do not fit a draft vocabulary of {size}", where="vocab.size", remedy="make it larger")
    if not int(dense.sum()):
        raise MustFix(
            "There is no response token to build the draft vocabulary from",
            where="responses.jsonl of the train split",
            remedy="check that the train split holds finished answers",
        )
    order = torch.argsort(dense, descending=True, stable=True)  # [V], stable: a tie goes to the lower id
    taken = torch.zeros(vocab_size, dtype=torch.bool)  # [V]
    taken[forced] = True
    free = order[~taken[order]]  # [V - F] by frequency
    taken[free[: size - len(forced)]] = True
    return DraftVocabulary.from_ids(taken.nonzero().flatten(), vocab_size, _share(dense, taken))


def _dense(counts: Mapping[int, int] | Tensor, vocab_size: int) -> Tensor:
    """Counts in either form -> int64 [V]."""
    if isinstance(counts, Tensor):
        if counts.shape != (vocab_size,):
            raise MustFix(
                f"Counts of {tuple(counts.shape)} do not fit a vocabulary of {vocab_size}", where="vocab",
                remedy="count the responses of this verifier",
            )  # fmt: skip
        return counts.to(torch.int64).cpu()
    dense = torch.zeros(vocab_size, dtype=torch.int64)
    for token, count in counts.items():
        if not 0 <= int(token) < vocab_size:
            raise MustFix(
                f"A response holds id {token}, which lies outside the verifier's vocabulary of {vocab_size}", where="vocab",
                remedy="the responses come from another tokenizer; generate them with this verifier",
            )  # fmt: skip
        dense[int(token)] += int(count)
    return dense


def _share(dense: Tensor, taken: Tensor) -> float:
    total = int(dense.sum())
    return float(int(dense[taken].sum()) / total) if total else float("nan")
