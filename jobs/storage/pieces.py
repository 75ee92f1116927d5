"""Which stream fetches which bytes of a file, so that what has arrived is nearly in order at every moment.

Decision: the sha256 goes in order, so what lies behind the first gap is hashed after the last byte came, and that time is
lost. Streams that share a link do not share it evenly: of 16 with equal pieces several needed the whole transfer for their
first one, and nearly all of the file was hashed at the end. Therefore a piece is as large as its stream fetches in PIECE_SECONDS,
so all take about equally long on any link; a stream that is free takes over from the first one where that is late all the
same; and towards the end pieces become smaller, then the rest of the slowest is shared.
"""

import bisect
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

LEAST_PIECE = 1 << 20  # bytes: a stream's first one, and what is worth a request
PIECE_SECONDS, _LATE_SECONDS = 0.5, 1.0
_LEAST_REST = 1 << 16  # bytes that are taken over: a stream that stands still would give away its last byte by byte
_SHARES = 2  # of them each stream is to get from what nobody has begun, so the last pieces are small
_WORTH = 0.1  # seconds that taking over has to save: both streams need a new request, one a new connection


@dataclass(eq=False)
class Piece:
    """Bytes [start, end) that one stream is fetching."""

    start: int
    end: int  # comes nearer where another stream takes the rest
    expected: float  # bytes a second: what its stream did before
    begun: float = field(default_factory=lambda: time.monotonic())

    def __post_init__(self) -> None:
        self.position = self.start  # all before it is written
        self.held = self.start  # all before it is in hand: nobody else takes it

    def rate(self, now: float) -> float:
        """Bytes a second; in its first moments it is believed to be what was expected."""
        return (self.position - self.start + self.expected * _WORTH) / (now - self.begun + _WORTH)


class Pieces:
    """The bytes of one file that are missing, handed out to `streams` threads."""

    def __init__(self, gaps: Iterable[tuple[int, int]], size: int, streams: int, largest: int):
        """`gaps` are the missing [start, end), in order."""
        self._gaps = list(gaps)[::-1]  # the next one last
        self._size, self._streams, self._largest = size, streams, largest
        self.missing = sum(end - start for start, end in self._gaps)
        self._unbegun = self.missing
        self._under_way: list[Piece] = []  # by their start
        self._changed, self._awaited = threading.Condition(), 0
        self.given_up = False

    def take(self, rate: float) -> Piece | None:
        """The next piece of a stream that did `rate` bytes a second so far; None where nothing is left for it."""
        with self._changed:
            if self.given_up:
                return None
            piece = self._rest_of_a_late_one(rate) or self._fresh(rate) or self._rest_of_the_last(rate)
            if piece:
                bisect.insort(self._under_way, piece, key=lambda piece: piece.start)
            return piece

    def hold(self, piece: Piece, size: int) -> int:
        """How many of the next `size` bytes are still this piece's; they stay so."""
        with self._changed:
            piece.held = min(piece.position + size, piece.end)
            return piece.held - piece.position

    def written(self, piece: Piece) -> None:
        """What was held stands in the file."""
        with self._changed:
            piece.position = piece.held
            if piece is self._under_way[0] and piece.position >= self._awaited:
                self._changed.notify_all()

    def end(self, piece: Piece) -> None:
        """All of it stands in the file, or there is no more of the object."""
        with self._changed:
            self._under_way.remove(piece)
            self._changed.notify_all()

    def give_up(self) -> None:
        with self._changed:
            self.given_up = True
            self._changed.notify_all()

    def wait_beyond(self, position: int) -> int:
        """How far the file is without a gap, once that is worth a look beyond `position`, or all there will be."""
        with self._changed:
            self._awaited = min(position + LEAST_PIECE, self._size)
            while (reached := self._reached()) < self._awaited and not self.given_up:
                self._changed.wait()
            return reached

    def _reached(self) -> int:
        under_way = next((piece.position for piece in self._under_way if piece.position < piece.end), self._size)
        return min(under_way, self._gaps[-1][0] if self._gaps else self._size)

    def _fresh(self, rate: float) -> Piece | None:
        if not self._gaps:
            return None
        start, end = self._gaps.pop()
        size = min(int(rate * PIECE_SECONDS), self._unbegun // (_SHARES * self._streams), self._largest)
        size = max(size, LEAST_PIECE)
        if end - start > size:
            self._gaps.append((start + size, end))
            end = start + size
        self._unbegun -= end - start
        return Piece(start, end, rate)

    def _rest_of_a_late_one(self, rate: float) -> Piece | None:
        """From the first piece under way: all behind it waits for it."""
        first = next(iter(self._under_way), None)
        now = time.monotonic()
        return self._rest_of(first, rate, now) if first and now - first.begun > _LATE_SECONDS else None

    def _rest_of_the_last(self, rate: float) -> Piece | None:
        """From the piece under way that would end last."""
        now = time.monotonic()
        last = max(self._under_way, key=lambda piece: (piece.end - piece.held) / max(piece.rate(now), 1.0), default=None)
        return self._rest_of(last, rate, now) if last else None

    def _rest_of(self, piece: Piece, rate: float, now: float) -> Piece | None:
        """So much of it that both streams end together, where that is worth it."""
        left, theirs = piece.end - piece.held, max(piece.rate(now), 1.0)
        taken = int(left * rate / (theirs + rate))
        if taken < _LEAST_REST or left / theirs - left / (theirs + rate) < _WORTH:
            return None
        end, piece.end = piece.end, piece.end - taken
        return Piece(piece.end, end, rate)
