"""Packing: under 3 % padding, one order for any number of ranks and any order of arrival, nothing lost silently."""

import random

import pytest
import torch
from synthetic_states import TAPS, Language, make_store, small_config

from jobs.draft.data import ReadAhead, check_fit, cut_store, load
from jobs.draft.packing import Cursor, Plan, cut
from jobs.errors import MustFix
from jobs.storage.shards import MappedShard
from jobs.storage.states import Response, ResponseLog, StateLayout, StateStore, StateWriter


def chat_lengths(samples: int, limit: int) -> list[tuple[str, int, int]]:
    """A mix as chats have it: log-normal prompts and answers, some capped at the limit."""
    chance = random.Random(1)
    lengths = []
    for number in range(samples):
        prompt = min(int(chance.lognormvariate(4.5, 1.0)) + 8, limit // 2)
        answer = min(int(chance.lognormvariate(6.0, 0.8)) + 1, limit - prompt)
        lengths.append((f"p{number:05d}#0", prompt, prompt + answer))
    return lengths


def plan(lengths, *, max_length=2048, rows=4096, accumulate=4, epochs=2.0, max_steps=None, seed=3) -> Plan:
    return Plan(cut(lengths, max_length), rows=rows, accumulate=accumulate, epochs=epochs, max_steps=max_steps, seed=seed)


def test_padding_under_three_percent():
    packing = plan(chat_lengths(1000, 2048), epochs=1)
    assert packing.padding_share < 0.03
    for packed in packing.epoch(0):
        assert 0 < sum(piece.rows for piece in packed) <= 4096


def test_an_epoch_holds_every_piece_once_and_the_next_another_order():
    packing = plan(chat_lengths(300, 2048))
    first, second = packing.epoch(0), packing.epoch(1)
    for epoch in (first, second):
        assert sorted(piece for packed in epoch for piece in packed) == sorted(packing.cut.pieces)
    assert first != second
    assert {frozenset(packed) for packed in first} != {frozenset(packed) for packed in second}, "neighbours change too"
    assert plan(chat_lengths(300, 2048), seed=4).epoch(0) != first


def test_order_of_arrival_does_not_matter():
    lengths = chat_lengths(200, 2048)
    shuffled = random.Random(5).sample(lengths, len(lengths))
    a, b = plan(lengths), plan(shuffled)
    assert [a.step_rows(step) for step in range(a.steps)] == [b.step_rows(step) for step in range(b.steps)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_global_batches_do_not_depend_on_the_ranks(world):
    packing = plan(chat_lengths(200, 2048))
    for step in range(packing.steps):
        shares = [packing.rank_rows(step, rank, world) for rank in range(world)]
        assert len({len(share) for share in shares}) == 1, "every rank exchanges gradients equally often"
        assert sorted(packed for share in shares for packed in share if packed) == sorted(packing.step_rows(step))


def test_cursor_and_length_of_a_plan():
    packing = plan(chat_lengths(200, 2048), accumulate=3, epochs=1.5)
    per_epoch = [len(packing.epoch(0)), round(0.5 * len(packing.epoch(1)))]
    assert packing.steps == -(-sum(per_epoch) // 3)
    stream = packing.epoch(0) + packing.epoch(1)[: per_epoch[1]]
    assert [row for step in range(packing.steps) for row in packing.step_rows(step)] == stream
    for step in range(packing.steps):
        cursor = packing.cursor(step)
        assert packing.epoch(cursor.epoch)[cursor.position] == packing.step_rows(step)[0]
    assert packing.cursor(0) == Cursor(0, 0)
    assert plan(chat_lengths(200, 2048), max_steps=5).steps == 5


def test_long_samples_are_cut_by_the_rule_and_counted():
    # 25 tokens: 24 rows, cut every 10. The prompt's first 12 tokens predict nothing: row 10 drafts x[12].
    made = cut([("long", 12, 25), ("prompt only", 30, 30), ("one row", 1, 2), ("short", 3, 6)], 10)
    assert [(p.sample_id, p.first, p.rows) for p in made.pieces] == [("long", 10, 10), ("long", 20, 4), ("short", 0, 5)]
    assert made.split_samples == 2  # "long" and "prompt only"
    assert (made.dropped_pieces, made.dropped_rows) == (1 + 3 + 1, 10 + 29 + 1)
    # Rows 10..18 and 20..22 of "long" have their target row in the piece; rows 1..3 of "short".
    assert made.loss_positions == 9 + 3 + 3


def test_cut_counts_what_the_loss_counts(tmp_path):
    """The plan's arithmetic of loss positions agrees with the masks of the packed rows."""
    store = make_store(tmp_path, [(12, 30), (3, 5), (40, 8), (2, 20)])
    packing = Plan(cut_store(store, store.ids(), small_config(), 16), rows=48, accumulate=1, epochs=1, max_steps=None, seed=0)
    positions = 0
    for step in range(packing.steps):
        row = load(store, packing.step_rows(step)[0], packing.rows, TAPS)
        inside = row.remaining[:-1] > 1
        positions += int((inside & row.predicted[1:]).sum())
    assert positions == packing.cut.loss_positions > 0


def test_packed_row_holds_the_states_of_its_pieces(tmp_path):
    store = make_store(tmp_path, [(5, 20), (4, 30)])
    packing = Plan(cut_store(store, store.ids(), small_config(), 12), rows=32, accumulate=1, epochs=1, max_steps=None, seed=0)
    seen = 0
    for packed in packing.epoch(0):
        row, start = load(store, packed, packing.rows, (7, 2, 5)), 0
        for piece in packed:
            sample = store.read(piece.sample_id)
            ids = sample.response.prompt_token_ids + sample.response.response_token_ids
            for offset in range(piece.rows):
                t, r = piece.first + offset, start + offset
                assert int(row.tokens[r]) == ids[t + 1] and int(row.positions[r]) == t
                assert bool(row.predicted[r]) == (t + 1 >= len(sample.response.prompt_token_ids))
                assert int(row.remaining[r]) == piece.rows - offset
                assert torch.equal(row.taps[r], sample.taps[t][[2, 0, 1]]) and torch.equal(row.final[r], sample.final[t])
                seen += 1
            start += piece.rows
        assert not row.taps[start:].any() and not row.predicted[start:].any() and not row.remaining[start:].any()
    assert seen == sum(piece.rows for piece in packing.cut.pieces)


def interleaved(folder, samples: int, tokens: int, run: int) -> StateStore:
    """Samples whose rows were written in turns, `run` of each at a time."""
    language, g, names = Language.make(), torch.Generator().manual_seed(1), [f"p{i}#0" for i in range(samples)]
    answers = {name: language.write(tokens, g) for name in names}
    states = {name: language.states(ids, g) for name, ids in answers.items()}
    layout = StateLayout(TAPS, small_config().hidden_size, "float32", "synthetic", "0" * 40, "0" * 64)
    with ResponseLog(folder) as log:
        writer = StateWriter(folder, layout, extent_rows=run)
        for first in range(0, tokens - 1, run):
            for name in names:
                writer.append(name, first, *(tensor[first : first + run] for tensor in states[name]))
        for name, ids in answers.items():
            writer.finish(name, tokens)
            writer.sync()
            log.append(Response(name, ids[:4], ids[4:], "length", {}, "synthetic", False))
        writer.close()
    return StateStore(folder)


def test_an_epoch_reads_each_row_once_however_a_sample_lies(tmp_path, monkeypatch):
    """Answers that were decoded side by side lie in many runs of rows, and a long one is trained in several pieces."""
    store = interleaved(tmp_path, samples=4, tokens=97, run=6)
    packing = Plan(cut_store(store, store.ids(), small_config(), 32), rows=64, accumulate=1, epochs=1, max_steps=None, seed=0)
    assert len(packing.cut.pieces) == 12
    read, rows = [], MappedShard.rows
    monkeypatch.setattr(MappedShard, "rows", lambda self, first, number: read.append(number) or rows(self, first, number))
    loaded = [load(store, packed, packing.rows, (5, 2, 7)) for packed in packing.epoch(0)]
    assert sum(read) == sum(row.used for row in loaded) == 4 * 96
    monkeypatch.undo()
    for row, packed in zip(loaded, packing.epoch(0), strict=True):
        start = 0
        for piece in packed:
            sample, there = store.read(piece.sample_id), slice(piece.first, piece.first + piece.rows)
            here = slice(start, start + piece.rows)
            assert torch.equal(row.taps[here], sample.taps[there][:, [1, 0, 2]]) and torch.equal(row.final[here], sample.final[there])
            start += piece.rows


def test_read_ahead_keeps_the_order_and_raises_in_its_place(tmp_path):
    store = make_store(tmp_path, [(4, 10 + i) for i in range(12)])
    pieces = cut_store(store, store.ids(), small_config(), 64).pieces
    share = [(piece,) for piece in pieces]
    with ReadAhead(store, iter(share), 32, TAPS) as ahead:
        assert [ahead.next()[0].sample_ids for _ in share] == [(piece.sample_id,) for piece in pieces]
        with pytest.raises(StopIteration):
            ahead.next()
    with ReadAhead(store, iter(share), 32, (2, 5, 99)) as ahead, pytest.raises(MustFix, match="99"):
        ahead.next()


def test_what_does_not_fit_is_refused(tmp_path):
    store = make_store(tmp_path, [(4, 60)])
    pieces = cut_store(store, store.ids(), small_config(), 1000)
    with pytest.raises(MustFix, match="63 rows does not fit into a packed row of 32.*train.max_length"):
        Plan(pieces, rows=32, accumulate=1, epochs=1, max_steps=None, seed=0)
    with pytest.raises(MustFix, match="holds no token to train on"):
        Plan(cut([("a", 5, 5)], 10), rows=32, accumulate=1, epochs=1, max_steps=None, seed=0)
    with pytest.raises(MustFix, match="width 32 cannot train a head of width 64"):
        check_fit(store, small_config(hidden_size=64))
    with pytest.raises(MustFix, match=r"reads taps \[2, 5, 8\], the store holds \[2, 5, 7\]"):
        check_fit(store, small_config(taps=(2, 5, 8)))
    with pytest.raises(MustFix, match="token id outside the vocabulary of 16"):
        cut_store(store, store.ids(), small_config(vocab_size=16, draft_vocab_size=16), 1000)
