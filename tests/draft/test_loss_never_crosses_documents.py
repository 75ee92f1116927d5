"""In a packed row nothing of one document reaches another: bit by bit, in loss and in gradients."""

from dataclasses import replace

import pytest
import torch
from synthetic_states import TAPS, Language, draft_ids, make_store, small_config

from jobs.draft import data
from jobs.draft.attention import Documents
from jobs.draft.data import load
from jobs.draft.loss import TargetHead, Unroll
from jobs.draft.model import Eagle3Head
from jobs.draft.packing import Piece

STEPS = 4


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    language = Language.make()
    store = make_store(tmp_path_factory.mktemp("states"), [(4, 30), (4, 30), (4, 20)], language=language)
    row = load(store, [Piece(i, 0, store.lengths()[i]) for i in store.ids()], 96, TAPS)
    assert row.lengths == (33, 33, 23)
    return language, row


def only(row, start, end):
    """The row with loss positions of rows start..end only (a target row is what `predicted` marks)."""
    inside = torch.zeros(len(row.tokens), dtype=torch.bool)
    inside[start:end] = True
    return replace(row, predicted=row.predicted & inside)


def run(language, row, every_row=False, context=None):
    """Loss sums, and the gradients with respect to the taps and to the trained weights."""
    config = small_config()
    head = Eagle3Head.from_scratch(config, language.verifier, draft_ids(config), seed=2)
    row = replace(row, taps=row.taps.clone().requires_grad_())
    unroll = Unroll(head, TargetHead(language.verifier.lm_head, draft_ids(config), torch.float32), "forward_kl", every_row)
    sums = unroll(row, Documents(row.lengths, len(row.tokens), context=context), STEPS)
    sums.loss.sum().backward()
    return sums, row.taps.grad, {n: p.grad for n, p in head.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("document", [0, 1, 2])
def test_other_documents_do_not_matter(packed, document):
    language, row = packed
    start = sum(row.lengths[:document])
    end = start + row.lengths[document]
    outside = torch.ones(len(row.tokens), dtype=torch.bool)
    outside[start:end] = False
    g = torch.Generator().manual_seed(document)
    other = replace(
        row,
        taps=torch.where(outside[:, None, None], 7 * torch.randn(row.taps.shape, generator=g), row.taps),
        final=torch.where(outside[:, None], 7 * torch.randn(row.final.shape, generator=g), row.final),
        tokens=torch.where(outside, torch.randint(64, row.tokens.shape, generator=g), row.tokens),
    )
    before, taps_before, weights_before = run(language, only(row, start, end))
    after, taps_after, weights_after = run(language, only(other, start, end))
    assert before.count[0] > 5
    for name, a, b in zip(before._fields, before, after, strict=True):
        assert torch.equal(a, b), f"{name} of document {document} depends on its neighbours"
    assert torch.equal(taps_before, taps_after), "a gradient crosses a document's end"
    assert not taps_before[outside].any(), "the loss of one document reaches another's states"
    assert taps_before[start:end].any()
    for name in weights_before:
        assert torch.equal(weights_before[name], weights_after[name]), name


def test_last_rows_of_every_document_carry_no_loss(packed):
    language, row = packed
    sums, *_ = run(language, replace(row, predicted=torch.ones_like(row.predicted)))
    config = small_config()
    target = TargetHead(language.verifier.lm_head, draft_ids(config), torch.float32)
    covered = target.drafted(row.final)
    wanted = []
    for k in range(STEPS):
        count, start = 0, 0
        for length in row.lengths:
            # Row t needs its target row t+1+k inside the document: the last k+1 rows have none.
            count += int(covered[start + 1 + k : start + length].sum())
            start += length
        wanted.append(count)
    assert sums.count.tolist() == wanted


def test_static_and_selected_rows_agree(packed):
    """The compiled form computes every row, the eager one only those with loss: same sums."""
    language, row = packed
    (a, taps_a, weights_a), (b, taps_b, weights_b) = run(language, row), run(language, row, every_row=True)
    assert torch.equal(a.count, b.count) and torch.equal(a.correct, b.correct) and torch.equal(a.chain, b.chain)
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(taps_a, taps_b, rtol=1e-4, atol=1e-6)
    for name in weights_a:
        torch.testing.assert_close(weights_a[name], weights_b[name], rtol=1e-4, atol=1e-5)


def test_rows_that_are_only_context_change_nothing(tmp_path, monkeypatch):
    """Of most rows of a prompt only keys and values are made: sums and gradients are those of computing everything."""
    language = Language.make()
    store = make_store(tmp_path, [(40, 20), (3, 30), (290, 30)], language=language)
    row = load(store, [Piece(i, 0, store.lengths()[i]) for i in store.ids()], 420, TAPS)
    monkeypatch.setattr(data, "MOST_TTT_STEPS", STEPS)
    context = data.context_of(row)
    assert context == (39 - STEPS, 0, 289 - STEPS)
    whole, asked = run(language, row), run(language, row, context=context)
    assert (
        torch.equal(whole[0].count, asked[0].count)
        and torch.equal(whole[0].correct, asked[0].correct)
        and torch.equal(whole[0].chain, asked[0].chain)
    )
    torch.testing.assert_close(whole[0].loss, asked[0].loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[1], asked[1], rtol=1e-3, atol=1e-5)
    for name in whole[2]:
        torch.testing.assert_close(whole[2][name], asked[2][name], rtol=1e-3, atol=1e-4)


def test_chunks_change_nothing(packed, monkeypatch):
    """Logits beyond the chunk size are recomputed piece by piece, with the same result."""
    language, row = packed
    whole = run(language, row)
    monkeypatch.setattr("jobs.draft.loss._chunk_rows", lambda *_: 7)
    parts = run(language, row)
    torch.testing.assert_close(whole[0].loss, parts[0].loss, rtol=1e-6, atol=1e-6)
    assert torch.equal(whole[0].correct, parts[0].correct)
    torch.testing.assert_close(whole[1], parts[1], rtol=1e-4, atol=1e-6)
