"""Rows whose values follow from sample and position alone, so that a test knows what must come back."""

from pathlib import Path

import torch
from torch import Tensor

from jobs.storage.states import Response, ResponseLog, StateLayout, StateWriter

TAPS = (2, 5, 7)


def layout(dtype: str = "float32", hidden_size: int = 8) -> StateLayout:
    return StateLayout(
        taps=TAPS,
        hidden_size=hidden_size,
        dtype=dtype,
        verifier="tiny-kimi",
        verifier_revision="0123456789abcdef",
        tokenizer_sha256="fedcba9876543210",
    )


def rows(sample: int, first: int, count: int, hidden_size: int = 8, version: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """taps [count, 3, H], final [count, H], logprob [count]: multiples of 1/8 up to 16, exact in bf16.

    `version` makes a recomputed row differ from the first one. Row 0 has no log-probability, like a prompt's.
    """
    position = torch.arange(first, first + count).view(-1, 1, 1)  # [count, 1, 1]
    vector = torch.arange(4).view(1, -1, 1)  # [1, 4, 1]: three taps, then final
    column = torch.arange(hidden_size).view(1, 1, -1)  # [1, 1, H]
    mixed = (sample * 31 + position * 17 + vector * 7 + column * 3 + version * 11) % 251 - 125  # [count, 4, H]
    values = mixed.float() / 8
    logprob = -(position.view(-1) % 13).float() / 4  # [count]
    logprob[position.view(-1) == 0] = float("nan")
    return values[:, :3].contiguous(), values[:, 3].contiguous(), logprob


def response(sample: int, tokens: int) -> Response:
    prompt = min(3, tokens)
    return Response(
        id=f"prompt-{sample:03d}#0",
        prompt_token_ids=list(range(prompt)),
        response_token_ids=list(range(100, 100 + tokens - prompt)),
        finish_reason="stop",
        sampling={"temperature": 1.0, "top_p": 0.95, "seed": sample},
        source="made for the test",
        thinking=sample % 2 == 0,
    )


def write(writer: StateWriter, log: ResponseLog, sample: int, tokens: int, hidden_size: int = 8, chunk: int = 5) -> None:
    """Write and commit one whole sample."""
    answer = response(sample, tokens)
    for first in range(0, tokens - 1, chunk):
        writer.append(answer.id, first, *rows(sample, first, min(chunk, tokens - 1 - first), hidden_size))
    writer.finish(answer.id, tokens)
    writer.sync()
    log.append(answer)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN equal to NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9))


def write_golden(folder: Path, dtype: str) -> None:
    """The store that tests/storage/golden/<dtype> holds: never change this, only add others beside it.

    Two shards; an answer in one piece, one that straddles them, one with rows computed twice and a row
    too many, one that was begun, given up and partly overwritten, one cut short by a crash.
    """
    form = layout(dtype)
    with (
        StateWriter(folder, form, shard_bytes=4096 + form.row_bytes * 24, extent_rows=4) as writer,
        ResponseLog(folder) as log,
    ):
        writer.append("given-up#0", 0, *rows(90, 0, 6))
        write(writer, log, sample=1, tokens=9)
        writer.discard("given-up#0")
        recomputed = response(2, 8)
        writer.append(recomputed.id, 0, *rows(2, 0, 5, version=1))
        writer.append(recomputed.id, 2, *rows(2, 2, 6))  # position 7 is a row too many
        writer.append(recomputed.id, 0, *rows(2, 0, 2))
        writer.finish(recomputed.id, 8)
        writer.sync()
        log.append(recomputed)
        write(writer, log, sample=3, tokens=15, chunk=7)
        writer.append("cut-short#0", 0, *rows(91, 0, 4))


GOLDEN_TOKENS = {1: 9, 2: 8, 3: 15}  # sample -> tokens of the committed ones
