"""`index.jsonl`: which rows of which shard hold which positions of which sample.

Decision: the index is append-only and every line carries its own checksum. An extent is a run of rows
contiguous in one shard. Later extents replace the positions of earlier ones (a preempted request
computes positions again), so what a sample consists of follows from the order of the lines and its
length alone; no line is ever taken back. After a crash the extents of uncommitted samples are
garbage simply because nothing asks for them, and rows that no committed sample needs are free.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from jobs.errors import MustFix
from jobs.storage.files import whole_lines

INDEX = "index.jsonl"
_SUM = b',"sum":"'


@dataclass(frozen=True)
class Extent:
    sample: str
    shard: int
    row: int  # first row in the shard
    position: int  # position of that row in the sample
    rows: int
    xxh3: str  # of the rows' bytes over all tensors

    @property
    def end(self) -> int:
        return self.position + self.rows

    def line(self) -> bytes:
        """The index line, without its newline: JSON whose last key is the xxh3 of all before it."""
        fields = dict(sample=self.sample, shard=self.shard, row=self.row, position=self.position, rows=self.rows, xxh3=self.xxh3)
        body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()[:-1]
        return body + _SUM + xxhash.xxh3_64_hexdigest(body).encode() + b'"}'

    @classmethod
    def parse(cls, line: bytes) -> "Extent":
        """Inverse of `line`; ValueError where the checksum or the form is wrong."""
        body, separator, tail = line.rpartition(_SUM)
        if not separator or tail != xxhash.xxh3_64_hexdigest(body).encode() + b'"}':
            raise ValueError("its checksum is wrong")
        return cls(**json.loads(body + b"}"))


@dataclass(frozen=True)
class Piece:
    """Rows of a sample that lie together: positions [position, position + rows) at [row, row + rows) of a shard."""

    shard: int
    row: int
    position: int
    rows: int


def read_index(path: Path) -> Iterator[Extent]:
    """Every extent in order; a line that is not whole is skipped at the end, a damaged one is a MustFix."""
    for number, _, line in whole_lines(path):
        try:
            yield Extent.parse(line)
        except (ValueError, TypeError) as error:
            raise MustFix(f"Line {number} of {path.name} is damaged: {error}", where=str(path), remedy="restore the file") from None


def first_gap(extents: Iterable[Extent], length: int) -> int | None:
    """The first position of 0 to length - 1 that no extent covers, or None."""
    covered = 0
    for position, end in sorted((extent.position, extent.end) for extent in extents):
        if position > covered:
            break
        covered = max(covered, end)
    return covered if covered < length else None


def resolve(extents: list[Extent], length: int) -> list[tuple[Extent, int, int]]:
    """What stands at each position once later extents replaced earlier ones.

    Returns (extent, first position, end position) in order of position, clipped to [0, length): rows
    past the sample's last state (asynchronous scheduling adds one after a stop) are not there.
    """
    in_order = all(a.end == b.position for a, b in zip(extents, extents[1:], strict=False))
    if in_order:  # the usual case: nothing was computed twice
        return [(e, e.position, min(e.end, length)) for e in extents if e.position < length]
    free = [(0, length)]  # intervals no later extent has taken
    taken: list[tuple[Extent, int, int]] = []
    for extent in reversed(extents):
        left: list[tuple[int, int]] = []
        for start, end in free:
            low, high = max(start, extent.position), min(end, extent.end)
            if low >= high:
                left.append((start, end))
                continue
            taken.append((extent, low, high))
            left += [(a, b) for a, b in ((start, low), (high, end)) if a < b]
        free = left
    return sorted(taken, key=lambda item: item[1])


def pieces(extents: list[Extent], length: int) -> list[Piece]:
    """`resolve`, with rows that follow each other in a shard joined: one piece is read without a copy."""
    joined: list[Piece] = []
    for extent, start, end in resolve(extents, length):
        row = extent.row + start - extent.position
        last = joined[-1] if joined else None
        if last and last.shard == extent.shard and last.row + last.rows == row and last.position + last.rows == start:
            joined[-1] = Piece(last.shard, last.row, last.position, last.rows + end - start)
        else:
            joined.append(Piece(extent.shard, row, start, end - start))
    return joined
