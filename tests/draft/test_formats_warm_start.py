"""A warm start exchanges the rarest ids for the special ones the head lacks, and keeps the rows of the rest bit for bit."""

import pytest
import torch
from small_heads import H, V, random_sequence, small_head, small_verifier

from jobs.draft.drafting import draft_chains
from jobs.draft.formats import warm_start
from jobs.draft.vocabulary import DraftVocabulary
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix


def counted(head, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 100, (V,), generator=torch.Generator().manual_seed(seed))


def test_missing_special_ids_take_the_places_of_the_rarest(monkeypatch):
    head, verifier = small_head(1), small_verifier()
    old, rows, counts = head.draft_ids.clone(), head.lm_head.weight.detach().clone(), counted(1)
    outside = [i for i in range(V) if i not in old.tolist()]
    forced = [old[3].item(), outside[0], outside[5]]
    counts[forced[0]] = 0  # the rarest of all, but forced: it stays
    report = warm_start(head, verifier, counts, forced)

    free = sorted((i for i in old.tolist() if i != forced[0]), key=lambda i: (counts[i].item(), -i))
    assert report.missing_forced == (outside[0], outside[5])
    assert report.replaced == ((free[0], outside[0]), (free[1], outside[5]))
    gone = dict(report.replaced)
    assert head.draft_ids.tolist() == sorted(gone.get(i, i) for i in old.tolist())
    assert torch.equal(DraftVocabulary.from_ids(head.draft_ids, V).t2d, head.t2d)
    scale = rows.norm(dim=1).mean()
    for before, its_row in zip(old.tolist(), rows, strict=True):
        row = head.lm_head.weight[head.draft_ids.tolist().index(gone.get(before, before))]
        if before in gone:
            expected = verifier.lm_head[gone[before]]
            assert torch.allclose(row, expected * scale / expected.norm(), rtol=1e-5)
        else:
            assert torch.equal(row, its_row)
    inside = lambda ids: counts[ids].sum().item() / counts.sum().item()  # noqa: E731
    assert report.coverage_before == pytest.approx(inside(old)) and report.coverage_after == pytest.approx(inside(head.draft_ids))


def test_the_new_id_can_be_drafted():
    head, verifier = small_head(1), small_verifier()
    new = next(i for i in range(V) if not head.t2d[i])
    report = warm_start(head, verifier, counted(2), [new])
    place = head.draft_ids.tolist().index(new)
    with torch.no_grad():
        head.lm_head.weight.zero_()
        head.lm_head.weight[place] = 1.0
        head.norm.weight.copy_(head.norm.weight.abs())
    tokens, taps = random_sequence(30)
    assert (draft_chains(head, tokens, taps, 2) == new).any() and report.replaced[0][1] == new


def test_nothing_missing_changes_nothing_but_a_different_embedding():
    verifier = small_verifier()
    head = small_head(1, verifier)
    before = {n: t.clone() for n, t in head.state_dict().items()}
    report = warm_start(head, verifier, counted(3), head.draft_ids[:4].tolist())
    assert report.replaced == () and report.embedding_differed == 0 and report.coverage_before == report.coverage_after
    assert all(torch.equal(t, before[n]) for n, t in head.state_dict().items())

    newer = VerifierWeights(verifier.embedding.clone(), verifier.final_norm, verifier.lm_head)
    newer.embedding[[4, 9]] += 1.0
    assert warm_start(head, newer, counted(3), []).embedding_differed == 2
    assert torch.equal(head.embed_tokens.weight, newer.embedding) and not head.embed_tokens.weight.requires_grad
    assert all(torch.equal(t, before[n]) for n, t in head.state_dict().items() if n != "embed_tokens.weight")


def test_a_published_map_in_another_order_is_put_in_order():
    """Training takes ascending ids only: the vocabulary's file, the other processes and cross-entropy's search rest on it."""
    head, published = small_head(1), small_head(1)
    order = torch.randperm(len(head.draft_ids), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        published.lm_head.weight.copy_(head.lm_head.weight[order])
    published.d2t.copy_(head.draft_ids[order] - torch.arange(len(order)))
    tokens, taps = random_sequence(30)
    drafted = draft_chains(published, tokens, taps, 2)
    assert warm_start(published, small_verifier(), counted(3), []).replaced == ()
    assert all(
        torch.equal(tensor, other) for tensor, other in zip(published.state_dict().values(), head.state_dict().values(), strict=True)
    )
    assert (draft_chains(published, tokens, taps, 2) == drafted).all()


def test_a_full_vocabulary_lacks_nothing():
    head = small_head(1, draft_vocab_size=V)
    assert warm_start(head, small_verifier(), counted(4), range(V)).replaced == ()


def test_counts_as_a_mapping_and_what_does_not_fit():
    one, two = small_head(1), small_head(1)
    counts = counted(5)
    forced = [i for i in range(V) if not one.t2d[i]][:3]
    assert warm_start(one, small_verifier(), counts, forced) == warm_start(two, small_verifier(), dict(enumerate(counts.tolist())), forced)
    with pytest.raises(MustFix, match="41 special ids do not fit a draft vocabulary of 40"):
        warm_start(one, small_verifier(), counts, range(41))
    narrow = VerifierWeights(torch.zeros(V, H - 1), torch.zeros(H - 1), torch.zeros(V, H - 1))
    with pytest.raises(MustFix, match="shape"):
        warm_start(one, narrow, counts, [])
