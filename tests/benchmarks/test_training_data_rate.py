"""Packed rows a second from the state store, against speculators' dataset with one `.pt` a sample.

Rows as wide as Kimi-K2.5's (57 kB a token), samples of 503 tokens as in the run to beat, both from the
page cache, both with as many readers: what is compared is the way from the file to a batch in one buffer.
"""

import time
from pathlib import Path

import pytest
import torch
from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
from torch.utils.data import DataLoader

from jobs.draft.data import ReadAhead
from jobs.draft.packing import Piece
from jobs.storage.states import Response, ResponseLog, StateLayout, StateStore, StateWriter

HIDDEN, TAPS, TOKENS, SAMPLES, ROWS, READERS, RUN = 7168, (2, 30, 58), 503, 8, 4096, 2, 64


def write_both(folder: Path) -> StateStore:
    """The same samples in both forms; in the store as decoding side by side leaves them, `RUN` rows of each in turn."""
    g = torch.Generator().manual_seed(0)
    (folder / "pt").mkdir()
    names = [f"s{number:03d}#0" for number in range(SAMPLES)]
    ids = {name: torch.randint(1000, (TOKENS,), generator=g) for name in names}
    states = {name: torch.randn(1, 4, HIDDEN, generator=g).bfloat16().repeat(TOKENS, 1, 1) for name in names}  # [n, 4, H]
    with ResponseLog(folder / "store") as log:
        layout = StateLayout(TAPS, HIDDEN, "bfloat16", "synthetic", "0" * 40, "0" * 64)
        writer = StateWriter(folder / "store", layout, extent_rows=RUN)
        for first in range(0, TOKENS - 1, RUN):
            for name, rows in states.items():
                part = rows[first : min(first + RUN, TOKENS - 1)]
                writer.append(name, first, part[:, :3], part[:, 3], torch.full((len(part),), -1.0))
        for number, name in enumerate(names):
            writer.finish(name, TOKENS)
            writer.sync()
            log.append(Response(name, ids[name][:20].tolist(), ids[name][20:].tolist(), "length", {}, "synthetic", False))
            layers = [states[name][:, i].contiguous() for i in range(4)]
            torch.save(
                {"input_ids": ids[name], "loss_mask": torch.ones(TOKENS, dtype=torch.long), "hidden_states": layers},
                folder / "pt" / f"data_{number}.pt",
            )
        writer.close()
    return StateStore(folder / "store")


def ours(store: StateStore) -> int:
    """Rows handed out in one pass."""
    per_row = ROWS // (TOKENS - 1)
    pieces = [Piece(sample_id, 0, TOKENS - 1) for sample_id in store.ids()]
    share = [tuple(pieces[i : i + per_row]) for i in range(0, len(pieces), per_row)]
    used = 0
    with ReadAhead(store, iter(share), ROWS, TAPS) as ahead:
        for _ in share:
            used += ahead.next()[0].used
    return used


def theirs(folder: Path) -> int:
    data = Eagle3SampleFileDataset(max_len=ROWS, datapath=str(folder / "pt"), hidden_states_dtype=torch.bfloat16)
    used = 0
    for batch in DataLoader(data, batch_size=ROWS // TOKENS, num_workers=READERS, collate_fn=create_collate_fn(ROWS)):
        used += int(batch["lengths"].sum())
    return used


@pytest.mark.slow
def test_the_store_is_read_faster_than_one_file_a_sample(tmp_path, monkeypatch):
    monkeypatch.setattr("jobs.draft.data.READERS", READERS)
    store = write_both(tmp_path)
    best = {}
    for _ in range(2):
        for name, read in (("ours", lambda: ours(store)), ("speculators", lambda: theirs(tmp_path))):
            began = time.perf_counter()
            rows = read()
            best[name] = max(best.get(name, 0.0), rows / (time.perf_counter() - began))
    bytes_a_row = 4 * HIDDEN * 2
    print(
        {name: f"{rate:.0f} rows/s, {rate * bytes_a_row / 1e9:.2f} GB/s" for name, rate in best.items()},
        f"ratio {best['ours'] / best['speculators']:.2f}",
    )
    assert best["ours"] > best["speculators"], best
