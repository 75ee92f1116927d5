"""Reading a state store: memory-mapped, without a copy wherever a sample lies in one piece.

Decision: the index and the lengths of the answers are read at the start (about 100 bytes of index an
extent), token ids and states only when asked for. What is read is what is committed at the moment of
opening; a writer may go on meanwhile, because it never touches the rows of a committed sample.
Checksums are not computed by `read` (training would pay for them every epoch) but by `verify`.
"""

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from jobs.errors import MustFix
from jobs.storage.extents import INDEX, Extent, first_gap, pieces, read_index, resolve
from jobs.storage.responses import RESPONSES, Response, scan_responses
from jobs.storage.shards import MappedShard, Rows, ShardPlan, StateLayout, checksum, dequantize, raw, shard_name

# Largest difference between a stored log-probability and one recomputed from the stored `final`: the
# engine rounds its logits to its own type, and an FP8 store rounds `final` besides.
LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25, "float8_e4m3fn": 1.0}

PER_TAP = ("taps", "taps_scale")  # tensors [rows, T, ...], of which some columns may be asked for


@dataclass(frozen=True)
class Sample:
    """A committed sample of n tokens; row t belongs to position t (0 to n - 2)."""

    response: Response
    taps: Tensor  # [n-1, T, H] in the order asked for
    final: Tensor  # [n-1, H] after the verifier's last norm: target logits = final @ lm_head.T
    logprob: Tensor  # [n-1] fp32, raw, of token t+1 given 0..t; NaN where the engine did not compute it


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a store: what, of which sample, in which rows of which shard (None: no rows at all)."""

    sample: str
    what: str
    shard: str | None = None
    first_row: int | None = None
    rows: int | None = None

    def sentence(self) -> str:
        place = "" if self.shard is None else f", {self.shard} rows {self.first_row} to {self.first_row + self.rows - 1}"
        return f"{self.sample}{place}: {self.what}"


@dataclass
class VerifyReport:
    samples: int = 0
    rows: int = 0
    bytes: int = 0
    checked_logprobs: int = 0
    largest_logprob_error: float = 0.0
    problems: list[Problem] = field(default_factory=list)

    def require(self, folder: Path) -> None:
        """MustFix naming the first problem and their number, where there is one."""
        if self.problems:
            more = f" and {len(self.problems) - 1} more" if len(self.problems) > 1 else ""
            raise MustFix(
                f"The state store fails verification: {self.problems[0].sentence()}{more}",
                where=str(folder),
                remedy="restore the store from a copy, or generate the split again in an empty folder",
            )


class StateStore:
    """Reads the committed samples of a folder; any thread. Missing or damaged files are a MustFix."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.layout = StateLayout.load(self.folder)
        self._lock = threading.Lock()
        self._shards: dict[int, MappedShard] = {}
        self._lines: dict[str, tuple[int, int]] = {}  # sample -> (offset, bytes) of its response line
        self._rows: dict[str, int] = {}
        self._extents: dict[str, list[Extent]] = {}
        for offset, size, response in scan_responses(self.folder / RESPONSES):
            self._lines[response.id] = offset, size
            self._rows[response.id] = response.rows
            self._extents[response.id] = []
        for extent in read_index(self.folder / INDEX):
            if extent.sample in self._extents:
                self._extents[extent.sample].append(extent)
        self._ids = sorted(i for i, extents in self._extents.items() if first_gap(extents, self._rows[i]) is None)
        self._complete = frozenset(self._ids)

    def ids(self) -> list[str]:
        """Samples that are committed and complete, sorted; an incomplete one is a problem `verify` names."""
        return list(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def lengths(self, ids: Iterable[str] | None = None) -> dict[str, int]:
        """Rows (n - 1) of each sample, without touching the data."""
        return {sample_id: self._rows[self._known(sample_id)] for sample_id in (self._ids if ids is None else ids)}

    def response(self, sample_id: str) -> Response:
        offset, size = self._lines[self._known(sample_id)]
        path = self.folder / RESPONSES
        with open(path, "rb") as file:
            return Response.parse(os.pread(file.fileno(), size, offset), path=path)

    def read(self, sample_id: str, taps: Sequence[int] | None = None) -> Sample:
        """The sample's rows, as views of the file where they lie in one piece; do not write to them.

        `taps` selects and orders by EAGLE-3 id (None: all, as stored); an id that is not stored is a MustFix.
        An FP8 store gives bfloat16; `copy` gives what is stored.
        """
        rows = self._gather(self._known(sample_id), taps)
        if self.layout.is_fp8:
            rows["taps"] = dequantize(rows["taps"], rows.pop("taps_scale"))
            rows["final"] = dequantize(rows["final"], rows.pop("final_scale"))
        return Sample(self.response(sample_id), **rows)

    def copy(self, sample_id: str, into: Rows, *, first: int = 0, taps: Sequence[int] | None = None) -> None:
        """Copy positions first .. first + n - 1 as stored into tensors [n, ...] by name, `taps` selected as by `read`.

        Each row is read once and copied once, straight from the file, and none besides: a sample that was decoded beside others lies in
        many runs of rows, and a long one is trained in several pieces.
        """
        end, columns = first + len(into["logprob"]), self._columns(taps)
        for part in pieces(self._extents[self._known(sample_id)], self._rows[sample_id]):
            low, high = max(first, part.position), min(end, part.position + part.rows)
            if low >= high:
                continue
            stored = self._shard(part.shard).rows(part.row + low - part.position, high - low)
            for name, tensor in into.items():
                target, source = tensor[low - first : high - first], stored[name]
                if columns is None or name not in PER_TAP:
                    target.copy_(source)
                    continue
                for place, column in enumerate(columns):
                    target[:, place].copy_(source[:, column])

    def verify(
        self,
        logprob_of: Callable[[Sample], Tensor] | None = None,
        *,
        tolerance: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> VerifyReport:
        """Check every committed sample: every position covered, every extent's checksum, every value finite.

        `logprob_of(sample) -> [n-1]` recomputes log-probabilities (from `final` and the verifier's lm_head; taps are not read for it);
        stored ones that are not NaN must agree within `tolerance` (LOGPROB_TOLERANCE of the dtype).
        `progress(done, total)` counts samples.
        """
        report = VerifyReport()
        tolerance = LOGPROB_TOLERANCE[self.layout.dtype] if tolerance is None else tolerance
        for done, sample_id in enumerate(sorted(self._rows), 1):
            sound = self._verify_extents(sample_id, report)
            if sound and logprob_of is not None:
                self._verify_logprobs(self.read(sample_id, taps=()), logprob_of, tolerance, report)
            report.samples += 1
            if progress:
                progress(done, len(self._rows))
        return report

    # -- inside ----------------------------------------------------------------------------------------

    def _known(self, sample_id: str) -> str:
        if sample_id not in self._complete:
            state = "incomplete" if sample_id in self._rows else "not in the store"
            raise MustFix(f"Sample {sample_id} is {state}", where=str(self.folder), remedy="generate it first")
        return sample_id

    def _columns(self, taps: Sequence[int] | None) -> list[int] | None:
        """Columns of the asked taps, or None where they are all of the stored ones in their order."""
        if taps is None or tuple(taps) == self.layout.taps:
            return None
        missing = [tap for tap in taps if tap not in self.layout.taps]
        if missing:
            raise MustFix(
                f"The store has no tap {missing[0]}, only {list(self.layout.taps)}",
                where=str(self.folder),
                remedy="choose stored taps, or generate the states again with these in verifier.taps",
            )
        return [self.layout.taps.index(tap) for tap in taps]

    def _shard(self, number: int) -> MappedShard:
        with self._lock:
            if number not in self._shards:
                plan = ShardPlan.read(self.folder / shard_name(number), self.layout)
                self._shards[number] = MappedShard(plan, self.layout)
            return self._shards[number]

    def _gather(self, sample_id: str, taps: Sequence[int] | None) -> Rows:
        """Stored tensors [n-1, ...] of a sample: views of one piece, or a copy put together from several."""
        rows, columns = self._rows[sample_id], self._columns(taps)
        parts = pieces(self._extents[sample_id], rows)
        if len(parts) == 1:
            found = self._shard(parts[0].shard).rows(parts[0].row, rows)
            return found if columns is None else {name: x[:, columns] if name in PER_TAP else x for name, x in found.items()}
        whole = {}
        for name, (dtype, shape) in self.layout.tensors().items():
            chosen = shape if columns is None or name not in PER_TAP else (len(columns), *shape[1:])
            whole[name] = torch.empty(rows, *chosen, dtype=dtype)
        self.copy(sample_id, whole, taps=taps)
        return whole

    def _verify_extents(self, sample_id: str, report: VerifyReport) -> bool:
        extents, length = self._extents[sample_id], self._rows[sample_id]
        before = len(report.problems)
        gap = first_gap(extents, length)
        if gap is not None:
            report.problems.append(Problem(sample_id, f"no hidden state at position {gap} of {length}"))
        needed = {(extent.shard, extent.row, extent.position): extent for extent, _, _ in resolve(extents, length)}
        for extent in needed.values():
            what = self._wrong_with(extent)
            report.rows += extent.rows
            report.bytes += extent.rows * self.layout.row_bytes
            if what:
                report.problems.append(Problem(sample_id, what, shard_name(extent.shard), extent.row, extent.rows))
        return len(report.problems) == before

    def _wrong_with(self, extent: Extent) -> str | None:
        try:
            rows = self._shard(extent.shard).rows(extent.row, extent.rows)
        except MustFix as error:
            return error.sentence().rstrip(".")
        if len(rows["logprob"]) != extent.rows:
            return "the rows lie outside the shard"
        if checksum({name: [piece] for name, piece in raw(rows).items()}) != extent.xxh3:
            return "the checksum of the rows is wrong"
        names = ("taps_scale", "final_scale") if self.layout.is_fp8 else ("taps", "final")
        if not all(_finite(rows[name]) for name in names):
            return "a value is not finite"
        return None

    def _verify_logprobs(self, sample: Sample, logprob_of: Callable[[Sample], Tensor], tolerance: float, report: VerifyReport) -> None:
        stored = sample.logprob  # [n-1]
        known = ~torch.isnan(stored)  # [n-1]
        if not known.any():
            return
        error = (logprob_of(sample).float().cpu() - stored).abs()[known]  # [known]
        worst = float(error.max())
        report.checked_logprobs += int(known.sum())
        report.largest_logprob_error = max(report.largest_logprob_error, worst)
        if not worst <= tolerance:
            what = f"the stored log-probabilities differ by up to {worst:.3g} from those of the stored states"
            report.problems.append(Problem(sample.response.id, what))


def _finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite; both extremes carry a NaN on, and cost far less than isfinite of all."""
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values))
