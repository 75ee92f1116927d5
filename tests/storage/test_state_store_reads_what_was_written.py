"""What the writer takes the reader gives: any chunks, recomputed rows, selected taps, many threads."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from stored_rows import layout, response, rows, same, write

from jobs.errors import JobError, MustFix
from jobs.storage.row_pages import RowPages
from jobs.storage.states import ResponseLog, StateGap, StateLayout, StateStore, StateWriter


@pytest.fixture
def store(tmp_path):
    """A writer and a log over one folder; shards of 32 rows, extents of 4."""
    form = layout()
    with (
        StateWriter(tmp_path, form, shard_bytes=4096 + form.row_bytes * 32, extent_rows=4) as writer,
        ResponseLog(tmp_path) as log,
    ):
        yield writer, log


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 50])
def test_any_chunking_reads_the_same(tmp_path, store, chunk):
    writer, log = store
    for sample, tokens in ((1, 40), (2, 2), (3, 6)):
        write(writer, log, sample, tokens, chunk=chunk)
    reader = StateStore(tmp_path)
    assert reader.ids() == ["prompt-001#0", "prompt-002#0", "prompt-003#0"]
    assert reader.lengths() == {"prompt-001#0": 39, "prompt-002#0": 1, "prompt-003#0": 5}
    for sample, tokens in ((1, 40), (2, 2), (3, 6)):
        read = reader.read(response(sample, tokens).id)
        for got, written in zip((read.taps, read.final, read.logprob), rows(sample, 0, tokens - 1), strict=True):
            assert same(got, written)


def test_interleaved_requests_do_not_mix(tmp_path, store):
    writer, log = store
    for position in range(20):
        for sample in range(5):
            writer.append(response(sample, 21).id, position, *rows(sample, position, 1))
    for sample in range(5):
        writer.finish(response(sample, 21).id, 21)
    writer.sync()
    for sample in range(5):
        log.append(response(sample, 21))
    reader = StateStore(tmp_path)
    for sample in range(5):
        assert same(reader.read(response(sample, 21).id).taps, rows(sample, 0, 20)[0])
    assert reader.verify().problems == []


def test_recomputed_rows_replace_and_rows_behind_the_end_are_dropped(tmp_path, store):
    writer, log = store
    answer = response(1, 12)
    writer.append(answer.id, 0, *rows(1, 0, 9, version=1))
    writer.append(answer.id, 0, *rows(1, 0, 3))  # preempted: begins again
    writer.append(answer.id, 3, *rows(1, 3, 9))  # position 11 is the last token's: no row of the sample
    writer.finish(answer.id, 12)
    writer.append(answer.id, 11, *rows(1, 11, 1))  # asynchronous scheduling, after the end
    writer.sync()
    log.append(answer)
    read = StateStore(tmp_path).read(answer.id)
    assert same(read.taps, rows(1, 0, 11)[0]) and same(read.final, rows(1, 0, 11)[1])


def test_the_callers_memory_may_be_used_again_after_append(tmp_path, store):
    writer, log = store
    answer = response(1, 4)
    buffers = rows(1, 0, 3)
    writer.append(answer.id, 0, *buffers)
    for buffer in buffers:
        buffer.fill_(77.0)
    writer.finish(answer.id, 4)
    writer.sync()
    log.append(answer)
    assert same(StateStore(tmp_path).read(answer.id).final, rows(1, 0, 3)[1])


def test_a_gap_is_an_error_that_names_sample_and_position(store):
    writer, _ = store
    writer.append("p#0", 0, *rows(1, 0, 3))
    writer.append("p#0", 4, *rows(1, 4, 3))
    with pytest.raises(StateGap, match="Sample p#0 has no hidden state at position 3 of 7"):
        writer.finish("p#0", 8)
    with pytest.raises(StateGap, match="position 0 of 4"):
        writer.finish("never-seen#0", 5)


def test_rows_of_the_wrong_shape_are_refused(store):
    writer, _ = store
    taps, final, logprob = rows(1, 0, 3)
    with pytest.raises(JobError, match="do not fit 3 taps of width 8"):
        writer.append("p#0", 0, taps[:, :2], final, logprob)


def test_selected_taps_come_in_the_order_asked_for(tmp_path, store):
    writer, log = store
    write(writer, log, 1, 10)
    reader = StateStore(tmp_path)
    assert same(reader.read("prompt-001#0", taps=[7, 2]).taps, rows(1, 0, 9)[0][:, [2, 0]])
    with pytest.raises(MustFix, match=r"no tap 3, only \[2, 5, 7\]"):
        reader.read("prompt-001#0", taps=[2, 3])
    with pytest.raises(MustFix, match="nowhere#0 is not in the store"):
        reader.read("nowhere#0")


def test_a_sample_in_one_piece_is_not_copied(tmp_path, store):
    writer, log = store
    write(writer, log, 1, 20, chunk=4)
    write(writer, log, 2, 30, chunk=4)  # straddles the shard of 32 rows
    reader = StateStore(tmp_path)
    one = reader.read("prompt-001#0")
    assert one.taps.data_ptr() == reader.read("prompt-001#0").taps.data_ptr()
    split = reader.read("prompt-002#0")
    assert split.taps.data_ptr() != reader.read("prompt-002#0").taps.data_ptr()
    assert same(split.taps, rows(2, 0, 29)[0])


def test_writing_to_a_read_tensor_does_not_reach_the_file(tmp_path, store):
    writer, log = store
    write(writer, log, 1, 10)
    StateStore(tmp_path).read("prompt-001#0").taps.fill_(1.0)
    assert same(StateStore(tmp_path).read("prompt-001#0").taps, rows(1, 0, 9)[0])


def test_many_threads_read_at_once(tmp_path, store):
    writer, log = store
    for sample in range(12):
        write(writer, log, sample, 9 + sample)
    reader = StateStore(tmp_path)

    def right(sample: int) -> bool:
        return same(reader.read(f"prompt-{sample:03d}#0").taps, rows(sample, 0, 8 + sample)[0])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, list(range(12)) * 20))


def test_only_committed_samples_are_there(tmp_path, store):
    writer, log = store
    write(writer, log, 1, 10)
    writer.append("begun#0", 0, *rows(9, 0, 8))
    writer.append("finished#0", 0, *rows(8, 0, 8))
    writer.finish("finished#0", 9)
    writer.sync()
    assert StateStore(tmp_path).ids() == ["prompt-001#0"]
    assert log.ids() == {"prompt-001#0"} and [answer.id for answer in log] == ["prompt-001#0"]


def test_given_up_rows_are_used_again(tmp_path, store):
    writer, log = store
    for turn in range(10):
        writer.append(f"given-up#{turn}", 0, *rows(9, 0, 24))
        writer.discard(f"given-up#{turn}")
    write(writer, log, 1, 30)
    assert len(list(tmp_path.glob("shard-*"))) == 1
    assert same(StateStore(tmp_path).read("prompt-001#0").taps, rows(1, 0, 29)[0])
    assert StateStore(tmp_path).verify().problems == []


def test_an_answer_is_never_committed_twice(tmp_path, store):
    writer, log = store
    write(writer, log, 1, 10)
    with pytest.raises(JobError, match="already committed"):
        log.append(response(1, 10))
    writer.close()
    with StateWriter(tmp_path, layout()) as again, pytest.raises(JobError, match="prompt-001#0 is already committed"):
        again.append("prompt-001#0", 0, *rows(1, 0, 1))


def test_one_process_writes_and_one_commits(tmp_path, store, monkeypatch):
    monkeypatch.setattr("jobs.storage.files.LOCK_WAIT_SECONDS", 0.3)
    with pytest.raises(MustFix, match="Another process is using this state store"):
        StateWriter(tmp_path, layout())
    with pytest.raises(MustFix, match="Another process is using these responses"):
        ResponseLog(tmp_path)


def test_another_layout_is_refused_with_what_differs(tmp_path, store):
    writer, log = store
    write(writer, log, 1, 10)
    writer.close()
    with pytest.raises(MustFix, match=r"written with taps \(2, 5, 7\) instead of \(3, 5, 7\)"):
        StateWriter(tmp_path, StateLayout((3, 5, 7), 8, "float32", "tiny-kimi", "0123456789abcdef", "fedcba9876543210"))


@pytest.mark.parametrize("taps", [(), (5, 2), (2, 2)])
def test_a_layout_with_unordered_taps_is_refused(taps):
    with pytest.raises(MustFix, match="not ascending"):
        StateLayout(taps, 8, "float32", "v", "r", "t")


def test_a_folder_without_a_store_is_refused(tmp_path):
    with pytest.raises(MustFix, match="store.json does not exist"):
        StateStore(tmp_path)


def test_fp8_halves_the_rows_within_its_rounding(tmp_path):
    """e4m3 has 3 stored bits of mantissa: at most 2^-4 relative for each normal value, about 2.6 % in the
    mean square.

    The bound is that of the format (OCP 8-bit floating point, section 5); values below 2^-6 * amax/448
    are subnormal and rounded absolutely, which is the second term.
    """
    torch.manual_seed(0)
    width = 512
    form = layout("float8_e4m3fn", width)
    assert form.row_bytes < 0.51 * layout("bfloat16", width).row_bytes
    taps, final, logprob = torch.randn(64, 3, width) * 3, torch.randn(64, width), torch.zeros(64)
    taps[:, :, 0] *= 100  # a massive activation, as real residual streams have
    with StateWriter(tmp_path, form) as writer, ResponseLog(tmp_path) as log:
        writer.append("prompt-001#0", 0, taps, final, logprob)
        writer.finish("prompt-001#0", 65)
        writer.sync()
        log.append(response(1, 65))
    read = StateStore(tmp_path).read("prompt-001#0")
    for name, exact, stored in (("taps", taps, read.taps.float()), ("final", final, read.final.float())):
        error = (stored - exact).abs()
        scale = exact.abs().amax(-1, keepdim=True) / 448
        assert (error <= exact.abs() * (2**-4 + 2**-8) + scale * 2**-10 * 1.01).all(), name
        usual = slice(1, None)  # without the massive activation, which is exact and would hide the rest
        relative = float(error[..., usual].square().sum().sqrt() / exact[..., usual].square().sum().sqrt())
        print(f"FP8 {name}: relative error {relative:.4f} in the mean square")
        assert 0.02 < relative < 0.03


def test_an_extent_longer_than_a_shard_is_cut_to_it(tmp_path):
    form = layout()
    with StateWriter(tmp_path, form, shard_bytes=4096 + form.row_bytes * 6, extent_rows=64) as writer, ResponseLog(tmp_path) as log:
        write(writer, log, 1, 41)
        write(writer, log, 2, 41, chunk=40)
    for sample in (1, 2):
        read = StateStore(tmp_path).read(response(sample, 41).id)
        assert same(read.taps, rows(sample, 0, 40)[0]) and same(read.final, rows(sample, 0, 40)[1])


class Spied(np.ndarray):
    """Notes what rows are asked for by."""

    asked: list = []

    def __getitem__(self, key):
        self.asked.append(key)
        return super().__getitem__(key)


def test_rows_noted_out_of_their_order_are_copied_in_one_piece():
    """Those that follow into a page are noted first, then those that begin one: asked for one by one, all would be copied twice."""
    pages, source = RowPages({"x": 4}, extent_rows=8, limit_bytes=1 << 12), np.arange(24, dtype=np.uint8).reshape(6, 4)
    with pages.copying({"x": source.view(Spied)}):
        pages.copy_rows_later(np.array([0, 1, 3, 5]), np.array([4, 12, 20, 28]))
        pages.copy_later([5], 0, 2, 1)
        pages.copy_later([6], 0, 4, 1)
    assert Spied.asked == [slice(0, 6)]
    for row, place in enumerate([4, 12, 5 * pages.page_rows, 20, 6 * pages.page_rows, 28]):
        assert pages._area["x"][place].tolist() == source[row].tolist()
