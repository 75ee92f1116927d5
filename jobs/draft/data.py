"""Packed rows as tensors, read ahead from the state store.

The plan (`jobs.draft.packing`) says which pieces stand where; here their states are copied from the
memory-mapped shards into one buffer of static shape, on other threads than the one that trains, and
into pinned memory where there is a GPU. A rank reads only its own packed rows.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from jobs.draft.model import HeadConfig
from jobs.draft.packing import Cut, Piece, cut
from jobs.errors import MustFix
from jobs.storage.states import StateStore

READ_AHEAD = 4  # packed rows in flight: 4 x 4,096 rows x 57 kB is 0.9 GB for Kimi-K2.5
READERS = 2


@dataclass(frozen=True)
class PackedRow:
    """R rows of documents one behind the other, then padding.

    Row t of a document: `tokens` is x[t+1] (what step 0 is fed), `taps` and `final` are the states
    of position t. Padding rows are zero, predict nothing and have nothing remaining.
    """

    taps: Tensor  # [R, 3, H] in the store's dtype, in the head's order
    final: Tensor  # [R, H] after the verifier's last norm
    tokens: Tensor  # [R] int64
    predicted: Tensor  # [R] bool: tokens[t] belongs to a response
    remaining: Tensor  # [R] int64: rows from here to the document's end, this one included
    positions: Tensor  # [R] int64: place in the sample
    lengths: tuple[int, ...]  # of the documents
    sample_ids: tuple[str, ...]
    covered: Tensor | None = None  # [R] bool: the verifier's argmax there can be drafted; None: not known yet

    @property
    def used(self) -> int:
        """Rows that are no padding."""
        return sum(self.lengths)

    def to(self, device: torch.device) -> "PackedRow":
        """The same row on a device; copies from pinned memory do not wait."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})

    def pinned(self) -> "PackedRow":
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.pin_memory() for name, tensor in tensors.items()})


def check_fit(store: StateStore, config: HeadConfig) -> None:
    """MustFix where the store cannot be what this head is trained on: width or taps."""
    layout = store.layout
    missing = [tap for tap in config.taps if tap not in layout.taps]
    if layout.hidden_size != config.hidden_size:
        raise MustFix(
            f"states of width {layout.hidden_size} cannot train a head of width {config.hidden_size}",
            where="state store against the draft head",
            remedy="generate the states again with this verifier, or take a head made for it",
        )
    if missing:
        raise MustFix(
            f"the head reads taps {list(config.taps)}, the store holds {list(layout.taps)}",
            where="state store against the draft head",
            remedy="set verifier.taps to the head's and generate the states again",
        )


def cut_store(store: StateStore, sample_ids: Sequence[str], config: HeadConfig, max_length: int) -> Cut:
    """The pieces of these samples; MustFix for a token id outside the vocabulary."""
    lengths = []
    for sample_id in sorted(set(sample_ids)):
        response = store.response(sample_id)
        prompt, answer = response.prompt_token_ids, response.response_token_ids
        if max(max(prompt, default=0), max(answer, default=0)) >= config.vocab_size:
            raise MustFix(
                f"sample {sample_id} holds a token id outside the vocabulary of {config.vocab_size}",
                where="state store against the draft head",
                remedy="take the head and the store of one and the same verifier",
            )
        lengths.append((sample_id, len(prompt), len(prompt) + len(answer)))
    return cut(lengths, max_length)


def load(store: StateStore, pieces: Sequence[Piece], rows: int, taps: tuple[int, ...]) -> PackedRow:
    """Copies the pieces into one packed row of `rows` rows; no pieces give a row of padding."""
    layout = store.layout
    dtype = torch.float32 if layout.dtype == "float32" else torch.bfloat16
    row_taps = torch.zeros(rows, len(taps), layout.hidden_size, dtype=dtype)  # [R, 3, H]
    final = torch.zeros(rows, layout.hidden_size, dtype=dtype)  # [R, H]
    tokens = torch.zeros(rows, dtype=torch.int64)  # [R]
    predicted = torch.zeros(rows, dtype=torch.bool)  # [R]
    remaining = torch.zeros(rows, dtype=torch.int64)  # [R]
    positions = torch.zeros(rows, dtype=torch.int64)  # [R]
    start = 0
    for piece in pieces:
        sample = store.read(piece.sample_id, taps)
        here, there = slice(start, start + piece.rows), slice(piece.first, piece.first + piece.rows)
        row_taps[here] = sample.taps[there]
        final[here] = sample.final[there]
        ids = sample.response.prompt_token_ids + sample.response.response_token_ids
        tokens[here] = torch.tensor(ids[piece.first + 1 : piece.first + 1 + piece.rows])
        positions[here] = torch.arange(there.start, there.stop)
        predicted[here] = positions[here] + 1 >= len(sample.response.prompt_token_ids)
        remaining[here] = torch.arange(piece.rows, 0, -1)
        start += piece.rows
    lengths = tuple(piece.rows for piece in pieces)
    return PackedRow(row_taps, final, tokens, predicted, remaining, positions, lengths, tuple(p.sample_id for p in pieces))


class ReadAhead:
    """Packed rows in the plan's order, loaded on reader threads before they are asked for.

    `waited` is the time in seconds that the caller has spent waiting for data. An error of a reader
    is raised where its row would have come. Use it as a context manager: leaving it stops the readers.
    """

    def __init__(self, store: StateStore, share: Iterator[tuple[Piece, ...]], rows: int, taps: tuple[int, ...], pin: bool):
        self._arguments = (store, rows, taps, pin)
        self._share = share
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="states")
        self._ahead: deque[Future[PackedRow]] = deque()
        self.waited = 0.0

    def _load(self, pieces: tuple[Piece, ...]) -> PackedRow:
        store, rows, taps, pin = self._arguments
        row = load(store, pieces, rows, taps)
        return row.pinned() if pin else row

    def __enter__(self) -> "ReadAhead":
        self._fill()
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fill(self) -> None:
        while len(self._ahead) < READ_AHEAD and (pieces := next(self._share, None)) is not None:
            self._ahead.append(self._pool.submit(self._load, pieces))

    def next(self) -> PackedRow:
        """The next packed row of this rank; StopIteration at the end of the plan."""
        self._fill()
        if not self._ahead:
            raise StopIteration
        began = time.perf_counter()
        row = self._ahead.popleft().result()
        self.waited += time.perf_counter() - began
        self._fill()
        return row
