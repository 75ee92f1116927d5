"""A step that leaves its compiled graph ends its part of the training benchmark: no figure is of recompilation or of eager steps.

On a CPU, with TorchDynamo's `eager` backend in the compiler's place: what is asked is whether a graph is used again.
"""

import argparse
from dataclasses import replace

import pytest
import torch
import training_disk
import training_rate
from training_ours import Feed, Ours, documents_of, packed_row

from jobs.draft.loss import Unroll

pytestmark = pytest.mark.slow
ROWS = 128


class Compiled(Ours):
    """As on a GPU. `odd`: (head of the benchmark's part, its call) whose states come in another dtype, both counted from 0."""

    odd: tuple[int, int] | None = None
    made: list["Compiled"]

    def __init__(self, *arguments, **changes):
        super().__init__(*arguments, **changes)
        unroll = Unroll(self.run.head, self.run.targets, "forward_kl", every_row=True)
        self.graph = torch.compile(unroll, backend="eager", fullgraph=True, dynamic=False)
        self.number, self.calls = len(self.made), 0
        self.run.compiled, self.run.unroll = True, self._unroll
        self.made.append(self)

    def _unroll(self, row, documents, steps):
        if (self.number, self.calls) == self.odd:
            row = replace(row, taps=row.states()[0].double(), final=row.states()[1].double(), taps_scale=None, final_scale=None)
        self.calls += 1
        return self.graph(row, documents, steps)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(Compiled, "made", [], raising=False)
    monkeypatch.setattr(training_rate, "Ours", Compiled)
    monkeypatch.setattr(training_disk, "TOKENS", ROWS)
    torch._dynamo.reset()
    bench = training_rate.Bench(argparse.Namespace(device="cpu", size="tiny", seconds=600.0, measure=0.0, rows=[ROWS], samples=2, out=None))
    bench.folder = tmp_path
    yield bench
    bench.clean()


PARTS = {
    "rate": lambda bench: training_rate.ours(bench, ROWS, False),
    "disk": training_rate.from_disk,
    "ddp": training_rate.several,
}


@pytest.mark.parametrize(
    ("part", "head", "call"),
    # Of the disk's part only in the second epoch of its second store, whose FP8 states are another graph that is allowed: after three
    # first steps, then one and two epochs of two rows for each store. The head of several GPUs is made twice, with six first steps.
    [("rate", 0, 2), ("disk", 0, 3 + 5 + 1 + 2), ("ddp", 0, 8), ("ddp", 1, 8)],
)
def test_another_dtype_ends_a_part(bench, monkeypatch, part, head, call):
    monkeypatch.setattr(Compiled, "odd", (head, call))
    with pytest.raises(RuntimeError, match="recompile"):
        PARTS[part](bench)
    assert Compiled.made[-1].calls == call + 1


def test_another_shape_ends_the_measurement_and_another_packing_does_not(bench):
    made = Compiled(bench.config, ROWS, training_rate.Ranks(0, 1, bench.device), bench.folder)
    assert len(made.first_steps(made.feed(documents_of(ROWS, 100)))) == 1
    made.steps(made.feed((ROWS,)), 2)
    longer = packed_row(bench.config, ROWS + 128, (ROWS + 128,), 0, bench.device, flex=True)
    with pytest.raises(RuntimeError, match="recompile"):
        made.steps(Feed([longer]), 1)
    assert len(made.first_steps(Feed([longer]), 2)) == 2, "unless first steps are asked for"
