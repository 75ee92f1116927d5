"""`verify` finds every kind of damage and says where: sample, shard, rows."""

import os

import pytest
import torch
from stored_rows import layout, response, rows, write

from jobs.errors import MustFix
from jobs.storage.shards import ShardPlan
from jobs.storage.states import ResponseLog, StateStore, StateWriter


@pytest.fixture(params=["float32", "float8_e4m3fn"])
def folder(request, tmp_path):
    """Three samples of 9, 19 and 29 rows in extents of 4."""
    form = layout(request.param)
    with (
        StateWriter(tmp_path, form, shard_bytes=4096 + form.row_bytes * 64, extent_rows=4) as writer,
        ResponseLog(tmp_path) as log,
    ):
        for sample, tokens in ((1, 10), (2, 20), (3, 30)):
            write(writer, log, sample, tokens, chunk=4)
    return tmp_path


def flip(folder, tensor: str, row: int) -> None:
    """Change one bit of one row of one tensor."""
    form = StateStore(folder).layout
    plan = ShardPlan.read(folder / "shard-00000.safetensors", form)
    dtype, shape = form.tensors()[tensor]
    place = plan.data_start + plan.offsets[tensor] + row * dtype.itemsize * torch.Size(shape).numel()
    with open(plan.path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, place)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), place)


def test_an_undamaged_store_passes(folder):
    report = StateStore(folder).verify()
    assert (report.samples, report.rows, report.problems) == (3, 57, [])
    assert report.bytes == 57 * StateStore(folder).layout.row_bytes
    report.require(folder)


@pytest.mark.parametrize("tensor", ["logprob", "taps", "final", "taps_scale", "final_scale"])
def test_one_flipped_bit_is_found_and_named(folder, tensor):
    if tensor not in StateStore(folder).layout.tensors():
        assert tensor.endswith("_scale")  # a float32 store has no scales to damage
        return
    flip(folder, tensor, row=14)  # rows 9 to 27 are sample 2's, its second extent begins at 13
    report = StateStore(folder).verify()
    problem = report.problems[0]
    assert len(report.problems) == 1
    assert (problem.sample, problem.shard) == ("prompt-002#0", "shard-00000.safetensors")
    assert (problem.first_row, problem.rows) == (13, 4)
    with pytest.raises(MustFix, match="prompt-002#0, shard-00000.safetensors rows 13 to 16: the checksum of the rows"):
        report.require(folder)


def test_damage_to_rows_nobody_uses_does_not_matter(folder):
    flip(folder, "taps", row=60)
    assert StateStore(folder).verify().problems == []


def test_a_missing_index_line_is_an_incomplete_sample(folder):
    lines = (folder / "index.jsonl").read_bytes().splitlines(keepends=True)
    gone = [line for line in lines if not (b"prompt-002" in line and b'"position":8,' in line)]
    assert len(gone) == len(lines) - 1
    (folder / "index.jsonl").write_bytes(b"".join(gone))
    store = StateStore(folder)
    assert store.ids() == ["prompt-001#0", "prompt-003#0"]
    assert [problem.what for problem in store.verify().problems] == ["no hidden state at position 8 of 19"]
    with pytest.raises(MustFix, match="prompt-002#0 is incomplete"):
        store.read("prompt-002#0")
    with pytest.raises(MustFix, match="committed, but has no hidden state at position 8 of 19"):
        StateWriter(folder, store.layout)


def test_a_missing_or_cut_shard_is_named(folder):
    shard = folder / "shard-00000.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    report = StateStore(folder).verify()
    assert len(report.problems) == 16  # every extent of the three samples: 3 + 5 + 8
    assert "length does not fit its header" in report.problems[0].what
    shard.unlink()
    with pytest.raises(MustFix, match="A shard of the state store is missing"):
        StateStore(folder).read("prompt-001#0")


def test_a_value_that_is_not_finite_is_found(tmp_path):
    form = layout()
    taps, final, logprob = rows(1, 0, 4)
    final[2, 3] = float("inf")
    with StateWriter(tmp_path, form) as writer, ResponseLog(tmp_path) as log:
        writer.append("prompt-001#0", 0, taps, final, logprob)
        write(writer, log, 2, 5)
        writer.finish("prompt-001#0", 5)
        writer.sync()
        log.append(response(1, 5))
    problems = StateStore(tmp_path).verify().problems
    assert [(problem.sample, problem.what) for problem in problems] == [("prompt-001#0", "a value is not finite")]


def test_log_probabilities_are_compared_with_the_stored_states(folder):
    """Rows without one (NaN) are left out; a wrong one is a problem of that sample."""
    store = StateStore(folder)
    good = store.verify(lambda sample: -(torch.arange(len(sample.logprob)) % 13).float() / 4)
    assert (good.checked_logprobs, good.largest_logprob_error, good.problems) == (54, 0.0, [])
    wrong = store.verify(lambda sample: -(torch.arange(len(sample.logprob)) % 13).float() / 4 - 2.0)
    assert len(wrong.problems) == 3 and wrong.largest_logprob_error == 2.0
    assert "differ by up to 2" in wrong.problems[0].what
