"""Which rows of which sample stand in which packed row: decided from lengths and the seed alone.

Decisions:
* One order for every machine. The plan is a function of (seed, epoch, sorted sample ids, lengths);
  neither the order in which samples arrived nor the number of ranks enters it. Random numbers are
  hashes of names, not a generator's stream: they cannot change with a library's version.
* Best fit over a whole epoch, longest first. Lengths are jittered by up to a fifth before sorting,
  so that documents meet different neighbours in each epoch, and packed rows are then shuffled.
* A sample longer than `max_length` rows is CUT every `max_length` rows and each piece becomes a
  document of its own: positions go on counting, the context before the cut is not seen, and of each
  piece the last k+1 rows carry no loss at TTT step k. A piece without a single loss position (all
  prompt, or too short a rest) is left out. Both are counted, nothing disappears silently.
"""

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from jobs.errors import MustFix
from jobs.wording import counted


def _uniform(*names) -> float:
    """A number in [0, 1) that depends on the names only."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass(frozen=True, order=True)
class Piece:
    """Rows `first` to `first + rows - 1` of a sample, one document of a packed row."""

    sample_id: str
    first: int
    rows: int


@dataclass(frozen=True)
class Cut:
    """The pieces of a set of samples and what became of the rest."""

    pieces: tuple[Piece, ...]
    split_samples: int  # longer than max_length
    dropped_pieces: int  # without a loss position
    dropped_rows: int
    loss_positions: int  # of TTT step 0


def cut(lengths: Sequence[tuple[str, int, int]], max_length: int) -> Cut:
    """Pieces of samples `(id, prompt tokens, all tokens)`.

    A sample of n tokens has n-1 rows; row t drafts x[t+2] at step 0, so it carries loss where that
    is a response token: t >= prompt - 2, and its target row t+1 is still in the piece.
    """
    pieces, split, dropped, dropped_rows, positions = [], 0, 0, 0, 0
    for sample_id, prompt, tokens in sorted(lengths):
        rows = tokens - 1
        split += rows > max_length
        for first in range(0, rows, max_length):
            end = min(first + max_length, rows)
            loss = end - 1 - max(first, prompt - 2, 0)
            if loss > 0:
                pieces.append(Piece(sample_id, first, end - first))
                positions += loss
            else:
                dropped, dropped_rows = dropped + 1, dropped_rows + end - first
    return Cut(tuple(pieces), split, dropped, dropped_rows, positions)


@dataclass(frozen=True)
class Cursor:
    """Where in the data an optimizer step begins: packed row `position` of `epoch`."""

    epoch: int
    position: int


class Plan:
    """Packed rows of all epochs, grouped into optimizer steps of `accumulate` rows.

    rows: size of a packed row (static). `steps` is the number of optimizer steps; the last one may
    hold fewer packed rows. MustFix: no loss position at all, max_length larger than a packed row.
    """

    def __init__(self, pieces: Cut, *, rows: int, accumulate: int, epochs: float, max_steps: int | None, seed: int):
        if not pieces.pieces:
            raise MustFix(
                "the store holds no token to train on",
                where=f"{pieces.dropped_pieces} pieces without a response token to predict",
                remedy="generate responses first, or raise generate.max_new_tokens",
            )
        longest = max(piece.rows for piece in pieces.pieces)
        if longest > rows:
            raise MustFix(
                f"a sample of {longest} rows does not fit into a packed row of {rows}",
                where="train.max_length against train.tokens_per_step",
                remedy=f"set train.max_length to {rows} or less, or train.tokens_per_step to {longest} or more",
            )
        self.cut = pieces
        self.rows = rows
        self.accumulate = accumulate
        self.seed = seed
        self._packed: dict[int, list[tuple[Piece, ...]]] = {}
        whole, rest = int(epochs), epochs - int(epochs)
        counts = [len(self.epoch(number)) for number in range(whole)]
        if rest:
            counts.append(max(1, round(rest * len(self.epoch(whole)))))
        self._starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
        steps = -(-self._starts[-1] // accumulate)
        self.steps = min(steps, max_steps) if max_steps else steps

    def epoch(self, number: int) -> list[tuple[Piece, ...]]:
        """The packed rows of an epoch, each the documents it holds, in training order."""
        if number not in self._packed:
            if len(self._packed) > 2:
                self._packed.clear()
            self._packed[number] = pack(self.cut.pieces, self.rows, self.seed, number)
        return self._packed[number]

    def cursor(self, step: int) -> Cursor:
        """The first packed row of an optimizer step (from 0)."""
        index = min(step * self.accumulate, self._starts[-1])
        epoch = min(bisect.bisect_right(self._starts, index) - 1, len(self._starts) - 2)
        return Cursor(epoch, index - self._starts[epoch])

    def step_rows(self, step: int) -> list[tuple[Piece, ...]]:
        """The packed rows of one optimizer step over all ranks: `accumulate`, fewer in the last step."""
        packed = []
        for index in range(step * self.accumulate, min((step + 1) * self.accumulate, self._starts[-1])):
            epoch = bisect.bisect_right(self._starts, index) - 1
            packed.append(self.epoch(epoch)[index - self._starts[epoch]])
        return packed

    def rank_rows(self, step: int, rank: int, world: int) -> list[tuple[Piece, ...]]:
        """The share of one rank, round-robin; empty tuples stand in, so that all ranks have equally many."""
        packed = self.step_rows(step)
        share = packed[rank::world]
        return share + [()] * (-(-self.accumulate // world) - len(share))

    def share(self, first_step: int, rank: int, world: int) -> Iterator[tuple[Piece, ...]]:
        """All packed rows of a rank from an optimizer step to the end, in order."""
        for step in range(first_step, self.steps):
            yield from self.rank_rows(step, rank, world)

    def refuse_idle(self, world: int) -> None:
        """MustFix where there are fewer packed rows in all than ranks."""
        if world > self._starts[-1]:
            raise MustFix(
                f"{world} ranks cannot share {counted(self._starts[-1], 'packed rows')}, all that there is",
                where="train.processes",
                remedy=f"start {self._starts[-1]} or fewer, lower train.tokens_per_step, or generate more samples",
            )

    @cached_property
    def padding_share(self) -> float:
        """Padding of the first epoch as a share of its rows."""
        packed = self.epoch(0)
        return 1 - sum(piece.rows for bin_ in packed for piece in bin_) / (len(packed) * self.rows)


def pack(pieces: Sequence[Piece], rows: int, seed: int, epoch: int) -> list[tuple[Piece, ...]]:
    """Best fit, (nearly) longest first: each piece goes where the least room is left after it."""

    def jittered(piece: Piece) -> float:
        return piece.rows * (1 - 0.2 * _uniform(seed, epoch, piece.sample_id, piece.first))

    bins: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # (rows left, number of the bin), ascending
    for piece in sorted(pieces, key=lambda piece: (-jittered(piece), piece)):
        place = bisect.bisect_left(room, (piece.rows, -1))
        left, number = room.pop(place) if place < len(room) else (rows, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(piece)
        if left > piece.rows:
            bisect.insort(room, (left - piece.rows, number))
    # A row's documents and the rows themselves in random order: length must not tell the time.
    for number, bin_ in enumerate(bins):
        bin_.sort(key=lambda piece: _uniform(seed, epoch, "inside", piece.sample_id, piece.first))
        bins[number] = tuple(bin_)
    return sorted(bins, key=lambda bin_: _uniform(seed, epoch, "order", bin_[0].sample_id, bin_[0].first))
