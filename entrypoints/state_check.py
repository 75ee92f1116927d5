"""`eagle3-job states verify RUN`: every checksum of a run's stores, and every log-probability computed once more.

A row costs one product with the verifier's output head: 2.3 GFLOP for Kimi-K2.5, ten minutes of one GPU for the
125 million rows of the real run (the disk takes longer), weeks of a CPU. So a GPU computes where there is one with
room for the head; without one, the time is measured and said before it is spent, and `--share` takes a seeded part
of every sample's rows. Rows exchanged between samples or shifted within one are wrong nearly everywhere, so that
few rows of each sample find them; a single wrong row is found by checking all. Checksums are always checked in full.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.context import Context
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix
from jobs.job_file import load
from jobs.reporting.display import Display
from jobs.reporting.figures import bytes_text, rate_text, seconds_text
from jobs.run import RunDirectory
from jobs.storage.reader import Sample, StateStore
from jobs.verifier.logprob_gate import PART, ROWS_AT_ONCE, logprobs

# Rows that the measurement of a CPU computes, and the time above which it names a way that takes less.
MEASURED_ROWS, LONG_SECONDS = 128, 600.0
# Beside the head: logits of one part with what their sum needs, and what CUDA and its libraries take for themselves.
ROOM_BESIDE_HEAD = 4 * ROWS_AT_ONCE * PART * 4 + (1 << 30)


class Check:
    """`logprob_of` for StateStore.verify: the chosen rows' log-probabilities computed again, counted in `rows`."""

    def __init__(self, head: Tensor, share: float, seed: int):
        self._head, self._share, self._seed = head, share, seed  # [V, H] on the device that computes
        self.rows = 0

    @torch.inference_mode()
    def __call__(self, sample: Sample) -> Tensor:
        """[n-1]: computed from `final` where the engine gave one and the row is chosen, elsewhere what is stored."""
        response, found = sample.response, sample.logprob.clone()
        tokens = torch.tensor(response.prompt_token_ids + response.response_token_ids)[1:]  # [n-1]
        for rows in self._chosen(response.id, ~torch.isnan(found)).split(ROWS_AT_ONCE):
            found[rows] = logprobs(sample.final[rows], self._head, tokens[rows])
            self.rows += len(rows)
        return found

    def _chosen(self, sample_id: str, known: Tensor) -> Tensor:
        """Rows [k] of `known` [n-1], in order: the same ones at every call."""
        rows = known.nonzero()[:, 0]
        if self._share == 1:
            return rows
        seed = int.from_bytes(hashlib.sha256(f"{self._seed}:states:{sample_id}".encode()).digest()[:8], "big") >> 1
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        return rows[order[: math.ceil(self._share * len(rows))].sort().values]


def verify_states(path: Path, share: float = 1.0) -> dict[str, Any]:
    """Every checksum and row of a run's stores, and of each sample this share of its log-probabilities; MustFix names what is wrong."""
    run = RunDirectory(path, read_only=True)
    folders = [folder for split in ("eval", "train") if (folder := run.path / "states" / split).is_dir()]
    if not folders:
        raise MustFix("The run holds no states yet", where=str(run.path / "states"), remedy="run its generate stages first")
    settings = load("smoke", base=run.ledger["settings"])
    stores = [StateStore(folder) for folder in folders]
    with Display.open() as display:
        head = _output_head(Context(settings, run, None).verifier_path, display.note)
        if head.device.type == "cpu":
            display.note(_time_on_a_cpu(head, sum(sum(store.lengths().values()) for store in stores), share))
        found = {store.folder.name: _verified(store, Check(head, share, settings.job.seed), display) for store in stores}
    return {"stores": found, "share": share, "device": str(head.device), "text": json.dumps(found, indent=2)}


def _verified(store: StateStore, check: Check, display: Display) -> dict[str, Any]:
    name, began = f"states/{store.folder.name}", time.monotonic()
    display.stage_started(name)

    def progress(done: int, total: int) -> None:
        display.progress(done, total, "samples", rows_a_second=round(check.rows / max(time.monotonic() - began, 1e-9)))

    report = store.verify(check, progress=progress)
    seconds = max(time.monotonic() - began, 1e-9)
    report.checked_logprobs = check.rows
    rates = f"{rate_text(check.rows / seconds, 'rows')} computed, {rate_text(report.bytes / seconds, 'bytes')} of checksums"
    display.stage_finished(name, "failed" if report.problems else "done", seconds)
    display.note(f"{name}: log-probabilities of {check.rows:,} of {report.rows:,} rows, {rates}")
    report.require(store.folder)
    return dataclasses.asdict(report) | {"seconds": round(seconds, 3)}


def _output_head(model: Path, note: Callable[[str], None]) -> Tensor:
    """[V, H]: as it is on the first GPU with room for it, else in fp32 on the CPU, so that no part of it is converted twice."""
    head, seen = VerifierWeights.read(model).lm_head, []
    needed = head.nbytes + ROOM_BESIDE_HEAD
    for number in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(number)
        if free >= needed:
            return head.to(f"cuda:{number}")
        seen.append(f"GPU {number} has {bytes_text(free)} free")
    if seen:
        note(f"computed on the CPU, as the output head needs {bytes_text(needed)} of a GPU: {', '.join(seen)}")
    return head.float()


def _time_on_a_cpu(head: Tensor, rows: int, share: float) -> str:
    """What the log-probabilities will take here, from some rows that are computed for it."""
    some, tokens = torch.randn(MEASURED_ROWS, head.shape[1]), torch.zeros(MEASURED_ROWS, dtype=torch.long)
    logprobs(some[:1], head, tokens[:1])
    began = time.monotonic()
    logprobs(some, head, tokens)
    rate = MEASURED_ROWS / max(time.monotonic() - began, 1e-9)
    seconds = rows * share / rate
    text = f"without a GPU, log-probabilities of up to {math.ceil(rows * share):,} rows take up to {seconds_text(seconds)} at {rate_text(rate, 'rows')} as measured"
    if share == 1 and seconds > LONG_SECONDS:
        text += f"; --share 0.01 computes one row in a hundred of every sample in {seconds_text(seconds / 100)}"
    return text
