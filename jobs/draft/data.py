"""Packed rows as tensors, read ahead from the state store.

The plan (`jobs.draft.packing`) says which pieces stand where; here their states are copied from the
memory-mapped shards into one buffer of static shape, on other threads than the one that trains, pinned
where there is a GPU, and from there on a stream of their own while the step before is computed. A rank
reads only its own packed rows, so every byte is read once a machine and epoch. FP8 states travel as
they are stored and are dequantized on the device.

Decision: no second cache in RAM. The shards are memory-mapped, so what fits into RAM stays there for
the epochs after the first, as the page cache, shared by all ranks and given back when it is needed.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from jobs.draft.attention import Documents
from jobs.draft.coverage import UNKNOWN, Coverage, Undecided
from jobs.draft.model import HeadConfig
from jobs.draft.packing import Cut, Piece, cut
from jobs.errors import MustFix
from jobs.storage.shards import dequantize
from jobs.storage.states import StateStore

READ_AHEAD = 4  # packed rows in flight: 4 x 4,096 rows x 57 kB is 0.9 GB for Kimi-K2.5
READERS = 4
MOST_TTT_STEPS = 7  # that settings allow


@dataclass(frozen=True)
class PackedRow:
    """R rows of documents one behind the other, then padding.

    Row t of a document: `tokens` is x[t+1] (what step 0 is fed), `taps` and `final` are the states
    of position t. Padding rows are zero, predict nothing and have nothing remaining.
    """

    taps: Tensor  # [R, 3, H] as stored, in the head's order
    final: Tensor  # [R, H] after the verifier's last norm, as stored
    tokens: Tensor  # [R] int64
    predicted: Tensor  # [R] bool: tokens[t] belongs to a response
    remaining: Tensor  # [R] int64: rows from here to the document's end, this one included
    positions: Tensor  # [R] int64: place in the sample
    lengths: tuple[int, ...]  # of the documents
    sample_ids: tuple[str, ...]
    covered: Tensor | None = None  # [R] bool: the verifier's argmax there can be drafted; None: nobody asked
    undecided: Undecided | None = None  # rows of which `covered` is not known yet
    taps_scale: Tensor | None = None  # [R, 3] fp32, of FP8 states
    final_scale: Tensor | None = None  # [R] fp32, likewise

    @property
    def used(self) -> int:
        """Rows that are no padding."""
        return sum(self.lengths)

    @property
    def bytes(self) -> int:
        """Of the states that were read for it."""
        return self.used * sum(x[0].nbytes for x in (self.taps, self.final, self.taps_scale, self.final_scale) if x is not None)

    def states(self) -> tuple[Tensor, Tensor]:
        """taps `[R, 3, H]` and final `[R, H]` as numbers to calculate with."""
        if self.taps_scale is None:
            return self.taps, self.final
        return dequantize(self.taps, self.taps_scale), dequantize(self.final, self.final_scale)

    def final_of(self, rows: Tensor) -> Tensor:
        """final of some rows: `[U]` -> `[U, H]`."""
        final = self.final.view(torch.uint8)[rows].view(self.final.dtype) if self.final_scale is not None else self.final[rows]
        return final if self.final_scale is None else dequantize(final, self.final_scale[rows])

    def to(self, device: torch.device) -> "PackedRow":
        """The same row on a device; copies from pinned memory do not wait."""
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors().items()})

    def tensors(self) -> dict[str, Tensor]:
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Tensor)}


def check_type(store: StateStore, wanted: str) -> None:
    """MustFix where the states are stored in another type than the settings say: `fp8`, or `verifier` for its own."""
    if store.layout.is_fp8 != (wanted == "fp8"):
        raise MustFix(
            f"the states are stored as {store.layout.dtype}, states.dtype is {wanted}",
            where="state store against the settings",
            remedy=f"set states.dtype to {'fp8' if store.layout.is_fp8 else 'verifier'}, or generate the states again with --redo generate.train",
        )


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


def load(
    store: StateStore, pieces: Sequence[Piece], rows: int, taps: tuple[int, ...], coverage: Coverage | None = None, pin: bool = False
) -> PackedRow:
    """Copies the pieces into one packed row of `rows` rows; no pieces give a row of padding."""
    used = sum(piece.rows for piece in pieces)

    def buffer(*shape: int, dtype: torch.dtype) -> Tensor:
        made = torch.empty(rows, *shape, dtype=dtype, pin_memory=pin)
        made[used:].view(torch.uint8).zero_()  # only what no piece fills
        return made

    layout = store.layout
    row_taps = buffer(len(taps), layout.hidden_size, dtype=layout.torch_dtype)  # [R, 3, H]
    final = buffer(layout.hidden_size, dtype=layout.torch_dtype)  # [R, H]
    taps_scale = buffer(len(taps), dtype=torch.float32) if layout.is_fp8 else None  # [R, 3]
    final_scale = buffer(dtype=torch.float32) if layout.is_fp8 else None  # [R]
    tokens, remaining, positions = (buffer(dtype=torch.int64) for _ in range(3))  # [R]
    predicted = buffer(dtype=torch.bool)  # [R]
    states = {"taps": row_taps, "final": final, "logprob": torch.empty(rows)}
    if layout.is_fp8:
        states |= {"taps_scale": taps_scale, "final_scale": final_scale}
    known, places = torch.zeros(rows, dtype=torch.uint8), torch.zeros(rows, dtype=torch.int64)  # [R]
    start = 0
    for piece in pieces:
        here = slice(start, start + piece.rows)
        store.copy(piece.sample_id, {name: tensor[here] for name, tensor in states.items()}, first=piece.first, taps=taps)
        response = store.response(piece.sample_id)
        ids = response.prompt_token_ids + response.response_token_ids
        tokens[here] = torch.tensor(ids[piece.first + 1 : piece.first + 1 + piece.rows])
        positions[here] = torch.arange(piece.first, piece.first + piece.rows)
        predicted[here] = positions[here] + 1 >= len(response.prompt_token_ids)
        remaining[here] = torch.arange(piece.rows, 0, -1)
        if coverage:
            known[here], places[here] = coverage.look(piece.sample_id, piece.first, tokens[here], states["logprob"][here])
        start += piece.rows
    covered = undecided = None
    if coverage:
        covered = buffer(dtype=torch.bool).copy_(known == 1)  # [R]
        asked = ((known == UNKNOWN) & predicted).nonzero().squeeze(-1)  # [U]
        undecided = Undecided(asked.pin_memory() if pin else asked, places[asked])
    return PackedRow(
        row_taps, final, tokens, predicted, remaining, positions, tuple(piece.rows for piece in pieces),
        tuple(p.sample_id for p in pieces), covered, undecided, taps_scale, final_scale,
    )  # fmt: skip


def context_of(row: PackedRow) -> tuple[int, ...] | None:
    """How many first rows of each document carry no loss at any TTT step: those that end more than the longest unroll
    before the answer. None where a row has no loss at all (padding for a rank that has nothing to do)."""
    found, start = [], 0
    for length in row.lengths:
        answer = int(row.predicted[start : start + length].to(torch.uint8).argmax())  # first row whose token is of the response
        found.append(max(0, answer - MOST_TTT_STEPS))
        start += length
    return tuple(found) or None


def _whole(future: Future) -> bool:
    return future.done() and future.exception() is None


class ReadAhead:
    """Packed rows in the plan's order, loaded on reader threads before they are asked for.

    device: where `next` gives them; on a GPU the copy of the row after goes on while one is trained.
    `waited` is the time in seconds that the caller has spent waiting for data, `bytes` of states were
    handed out. An error of a reader is raised where its row would have come. Use it as a context
    manager: leaving it stops the readers.
    """

    def __init__(
        self, store: StateStore, share: Iterator[tuple[Piece, ...]], rows: int, taps: tuple[int, ...],
        device: torch.device | str = "cpu", coverage: Coverage | None = None, flex: bool = False,
    ):  # fmt: skip
        self._store, self._share, self._rows, self._taps = store, share, rows, taps
        self._device, self._coverage, self._flex = torch.device(device), coverage, flex
        self._cuda = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._cuda else None
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="states")
        self._ahead: deque[Future[tuple[PackedRow, Documents]]] = deque()
        self._copied: tuple[PackedRow, Documents, torch.cuda.Event] | None = None
        self.waited, self.bytes = 0.0, 0

    def _load(self, pieces: tuple[Piece, ...]) -> tuple[PackedRow, Documents]:
        row = load(self._store, pieces, self._rows, self._taps, self._coverage, pin=self._cuda)
        documents = Documents(row.lengths, self._rows, self._flex, None if self._flex else context_of(row))
        return row, documents.pinned() if self._cuda else documents

    def __enter__(self) -> "ReadAhead":
        self._fill()
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _fill(self) -> None:
        while len(self._ahead) < READ_AHEAD and (pieces := next(self._share, None)) is not None:
            self._ahead.append(self._pool.submit(self._load, pieces))

    def next(self) -> tuple[PackedRow, Documents]:
        """The next packed row of this rank, on the device; StopIteration at the end of the plan."""
        self._fill()
        if not self._copied and not self._ahead:
            raise StopIteration
        if not self._cuda:
            row, documents = self._wait()
        else:
            row, documents, done = self._copied or self._copy()
            compute = torch.cuda.current_stream(self._device)
            compute.wait_event(done)
            for tensor in row.tensors().values():
                tensor.record_stream(compute)
            documents = documents.to(self._device)
            # The row after, if it is there: its copy must not make this step wait for the disk.
            self._copied = self._copy() if self._ahead and _whole(self._ahead[0]) else None
        self.bytes += row.bytes
        return row, documents

    def _wait(self) -> tuple[PackedRow, Documents]:
        began = time.perf_counter()
        ready = self._ahead.popleft().result()
        self.waited += time.perf_counter() - began
        self._fill()
        return ready

    def _copy(self) -> tuple[PackedRow, Documents, torch.cuda.Event]:
        row, documents = self._wait()
        with torch.cuda.stream(self._stream):
            row = row.to(self._device)
            done = torch.cuda.Event()
            done.record()
        return row, documents, done
