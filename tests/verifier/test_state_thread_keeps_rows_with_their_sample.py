"""The writer thread: rows of many steps end in the store under the right sample and position, whatever their mix.

Steps as the worker hands them over, made up: chunks of prompts, decoding, drafts of which some are rejected, a request
that is preempted and computes its positions again, rows that come after the end. Every row carries its sample and
position as numbers, so a misplaced one is seen.
"""

import dataclasses
import random
import time

import pytest
import torch
from safetensors.torch import save_file

from jobs.storage.extents import INDEX, read_index
from jobs.storage.shards import encode
from jobs.storage.states import Response, ResponseLog, StateLayout, StateStore, StateWriter
from jobs.verifier import state_thread
from jobs.verifier.state_thread import Ended, Span, Spans, Step, StoreThread

TAPS, HIDDEN = (2, 5, 7), 4
ROWS = 4096  # of a long prefill
LAYOUT = StateLayout(TAPS, HIDDEN, "float32", "made up", "0" * 40, "0" * 64)


def value(sample: int, position: int) -> float:
    return sample * 1000.0 + position


def step_of(pieces: list[tuple[int, int, int, int, int]]) -> Step:
    """pieces: (sample, position, rows, drafts, accepted drafts); a row's values name its sample and position."""
    spans, rows, width = [], [], 1 + max(drafts for *_, drafts, _ in pieces)
    ids, logprobs = torch.full((len(pieces), width), -1), torch.zeros(len(pieces), width)
    for index, (sample, position, count, drafts, accepted) in enumerate(pieces):
        spans.append(Span(f"s{sample}#0", len(rows), count, position, index, drafts, True, -1))
        rows += [value(sample, position + j) for j in range(count)]
        ids[index, : accepted + 1] = 5
        logprobs[index] = torch.tensor([-value(sample, position + count - 1 - drafts + j) for j in range(width)])
    flat = torch.tensor(rows)
    taps, final = flat[:, None, None].expand(-1, len(TAPS), HIDDEN), flat[:, None].expand(-1, HIDDEN)
    return Step(Spans.of(spans), encode(LAYOUT, taps, final, torch.full((len(rows),), float("nan"))), logprobs, ids if width > 1 else None)


def steps_of(rng: random.Random, lengths: list[int], speculate: bool) -> list[list[tuple[int, int, int, int, int]]]:
    """What a scheduler might do with samples of these lengths; position 0 to length - 2 of each, and more."""
    at, steps = dict.fromkeys(range(len(lengths)), 0), []
    while at:
        pieces = []
        for sample in rng.sample(list(at), rng.randint(1, len(at))):
            position, end = at[sample], lengths[sample] - 1
            if position == 0:
                pieces.append((sample, 0, min(end, rng.randint(1, 9)), 0, 0))
                at[sample] = pieces[-1][2]
            elif rng.random() < 0.03:
                at[sample] = 0  # preempted
                continue
            else:
                drafts = rng.randint(0, 3) if speculate else 0
                accepted = rng.randint(0, drafts)
                pieces.append((sample, position, 1 + drafts, drafts, accepted))
                at[sample] += 1 + accepted
            if at[sample] >= end:
                del at[sample]
        if pieces:
            steps.append(pieces)
    return steps


def written(folder, steps, lengths, joined_rows=1 << 20, **options) -> StateStore:
    thread = StoreThread(
        StateWriter(folder, LAYOUT, shard_bytes=1 << 16, extent_rows=8, **options), join_bytes=joined_rows * LAYOUT.row_bytes
    )
    for step in steps:
        thread.put(step_of(step))
    names = {f"s{i}#0": length for i, length in enumerate(lengths)}
    assert thread.finish([Ended(*item) for item in names.items()], wait=True) == dict.fromkeys(names)
    thread.put(step_of([(0, lengths[0] - 1, 1, 0, 0)]))  # asynchronous scheduling: a step that was in flight
    thread.close()
    assert thread.failure is None
    return committed(folder, lengths)


def committed(folder, lengths: list[int]) -> StateStore:
    with ResponseLog(folder) as log:
        for sample, length in enumerate(lengths):
            log.append(Response(f"s{sample}#0", [1], [2] * (length - 1), "stop", {}, "test", False))
    return StateStore(folder)


def assert_right(store: StateStore, lengths: list[int]) -> None:
    for sample, length in enumerate(lengths):
        read = store.read(f"s{sample}#0")
        want = torch.tensor([value(sample, position) for position in range(length - 1)])
        assert torch.equal(read.final, want[:, None].expand(-1, HIDDEN)) and torch.equal(read.taps[:, 2], read.final)
        known = ~read.logprob.isnan()  # the last row of a prompt's chunk, and every decoded one
        assert torch.equal(read.logprob[known], -want[known]) and known[-1]


@pytest.fixture(autouse=True)
def joined_by_bytes_alone(monkeypatch):
    """And not by the clock, which on a busy machine joins less."""
    monkeypatch.setattr(state_thread, "JOINED_SECONDS", float("inf"))


def test_decoding_with_and_without_drafts(tmp_path):
    rng = random.Random(3)
    for number, speculate in enumerate([False, True] * 4):
        lengths = [rng.choice([2, 3, 12, 70, 150]) for _ in range(9)]
        # Each step by itself, a few together, and all.
        for joined_rows in (1, 40, 1 << 20):
            assert_right(written(tmp_path / f"{number}-{joined_rows}", steps_of(rng, lengths, speculate), lengths, joined_rows), lengths)


def test_little_memory_costs_shorter_extents_and_no_row(tmp_path):
    """16 rows in memory for 12 samples: what is written early, what is waited for and what is written twice are still each sample's own."""
    rng = random.Random(5)
    for number, speculate in enumerate([False, True] * 2):
        lengths = [rng.choice([2, 3, 12, 40, 70]) for _ in range(12)]
        for joined_rows in (1, 40):
            assert_right(
                written(tmp_path / f"{number}-{joined_rows}", steps_of(rng, lengths, speculate), lengths, joined_rows, memory_bytes=1),
                lengths,
            )


def test_one_step_of_prefills_in_another_order(tmp_path):
    lengths = [ROWS, 5, ROWS + 9]
    pieces = [(2, 0, lengths[2] - 1, 0, 0), (0, 0, lengths[0] - 1, 0, 0), (1, 0, lengths[1] - 1, 0, 0)]
    assert_right(written(tmp_path, [pieces], lengths), lengths)


def test_a_slow_disk_slows_the_steps_down_and_fills_no_memory(tmp_path):
    """Each write takes a while: what lies in memory stays below what is allowed, and `put` waits."""
    writer = StateWriter(tmp_path / "store", LAYOUT, shard_bytes=1 << 16, extent_rows=8, memory_bytes=64 * LAYOUT.row_bytes)
    thread, most, write = StoreThread(writer, join_bytes=1), 0, writer._write_extent

    def slow(*given) -> None:
        time.sleep(0.002)
        write(*given)

    writer._write_extent = slow
    for position in range(30):
        thread.put(step_of([(sample, position, 1, 0, 0) for sample in range(20)]))
        most = max(most, writer._pages.used * writer._pages.page_rows)
    names = [f"s{sample}#0" for sample in range(20)]
    assert thread.finish([Ended(name, 31) for name in names], wait=True) == dict.fromkeys(names)
    thread.close()
    assert most <= 64 and thread.waited > 0.1
    assert_right(committed(tmp_path / "store", [31] * 20), [31] * 20)


def test_extents_are_on_the_disk_while_the_answer_is_still_decoded(tmp_path):
    """Nothing is finished and nothing synced: memory holds no more than an extent of a running answer, however long it gets."""
    thread = StoreThread(StateWriter(tmp_path, LAYOUT, shard_bytes=1 << 16, extent_rows=8), join_bytes=1)
    for position in range(30):
        thread.put(step_of([(0, position, 1, 0, 0)]))
    deadline = time.monotonic() + 30
    while len(extents := list(read_index(tmp_path / INDEX))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [(extent.position, extent.rows) for extent in extents] == [(0, 8), (8, 8), (16, 8)]
    assert thread.finish([Ended("s0#0", 31)], wait=True) == {"s0#0": None}
    thread.close()
    assert [*read_index(tmp_path / INDEX)][:3] == extents, "they were written again"
    assert_right(committed(tmp_path, [31]), [31])


def test_an_answer_ends_in_the_midst_of_joined_steps(tmp_path):
    """Its rows up to the end are kept, a row of a step that was in flight is not, and the others' rows go on."""
    thread = StoreThread(StateWriter(tmp_path, LAYOUT, shard_bytes=1 << 16, extent_rows=8), join_bytes=1 << 30)
    for position in range(12):
        thread.put(step_of([(sample, position, 1, 0, 0) for sample in range(2) if sample or position < 8]))
        if position == 6:
            assert thread.finish([Ended("s0#0", 8)], wait=False) == {}
    assert thread.finish([Ended("s1#0", 13)], wait=True) == {"s0#0": None, "s1#0": None}
    thread.close()
    store = committed(tmp_path, [8, 13])
    assert_right(store, [8, 13])
    assert not store.verify().problems


def test_a_run_that_is_written_from_where_it_lies_is_joined_with_nothing(tmp_path):
    """Else the disk would hold the memory of every step that came with it."""
    thread, given = StoreThread(StateWriter(tmp_path, LAYOUT, shard_bytes=1 << 16, extent_rows=8), join_bytes=1 << 30), []
    write = thread.writer.append_stored
    thread.writer.append_stored = lambda rows, steps: (given.append([int(runs.rows.max()) for runs in steps]), write(rows, steps))
    for pieces in ([(0, 0, 3, 0, 0)], [(0, 3, 1, 0, 0)], [(1, 0, 8, 0, 0)], [(0, 4, 1, 0, 0)], [(0, 5, 1, 0, 0)]):
        thread.put(step_of(pieces))
    assert thread.finish([Ended("s0#0", 7), Ended("s1#0", 9)], wait=True) == {"s0#0": None, "s1#0": None}
    thread.close()
    assert given == [[3, 1], [8], [1, 1]]


def test_closing_lets_go_of_the_store_when_the_last_steps_cannot_leave_the_device(tmp_path, monkeypatch):
    def full(several):
        raise torch.OutOfMemoryError("no room to join them")

    thread = StoreThread(StateWriter(tmp_path, LAYOUT, shard_bytes=1 << 16, extent_rows=8))
    for position in range(2):
        thread.put(step_of([(0, position, 1, 0, 0)]))
    monkeypatch.setattr(state_thread, "concatenated", full)
    with pytest.raises(torch.OutOfMemoryError):
        thread.close()
    assert not thread._thread.is_alive()
    StateWriter(tmp_path, LAYOUT, shard_bytes=1 << 16, extent_rows=8).close()


def test_checked_rows_are_answered_for_in_every_type(tmp_path):
    """A true row passes, one whose state is another's is named; in FP8 as in the verifier's own type, read back from the file."""
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(40000, HIDDEN, generator=generator)  # more than one part of the vocabulary
    save_file({"lm_head.weight": head}, tmp_path / "model.safetensors")
    final = torch.randn(30, HIDDEN, generator=generator)
    tokens = torch.randint(0, 40000, (30,), generator=generator)
    logprob = (final @ head.T).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 0.25), ("float8_e4m3fn", 1.0)):
        layout = dataclasses.replace(LAYOUT, dtype=dtype)
        thread = StoreThread(StateWriter(tmp_path / dtype, layout, shard_bytes=1 << 16, extent_rows=8))
        thread.check_with(tmp_path, "lm_head.weight", tolerance)
        store_as = torch.float32 if dtype == "float32" else torch.bfloat16
        for sample, states in (("true#0", final), ("false#0", final.roll(1, 0))):
            spans = Spans.of([Span(sample, 0, 30, 0, 0, 0, False, -1)])
            rows = encode(layout, states[:, None].repeat(1, 3, 1).to(store_as), states.to(store_as), logprob.clone())
            thread.put(Step(spans, rows, None, None))
        checks = [(place, int(tokens[place])) for place in (0, 13, 29)]
        done = thread.finish([Ended("true#0", 31, checks), Ended("false#0", 31, checks)], wait=True)
        thread.close()
        assert thread.failure is None and done["true#0"] is None
        assert "false#0" in done["false#0"] and "position 0" in done["false#0"] and "log-probability" in done["false#0"]
