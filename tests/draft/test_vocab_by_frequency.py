"""The draft vocabulary holds the most frequent ids and every forced one, the same for the same counts."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.draft.vocabulary import DraftVocabulary, build, check_maps
from jobs.errors import MustFix

VOCAB = 30


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.integers(0, VOCAB - 1), st.integers(1, 4), min_size=1),
    st.sets(st.integers(0, VOCAB - 1), max_size=5),
    st.integers(5, VOCAB),
)
def test_it_is_what_sorting_by_hand_gives(counts, forced, size):
    rest = sorted((i for i in range(VOCAB) if i not in forced), key=lambda i: (-counts.get(i, 0), i))
    expected = sorted([*forced, *rest[: size - len(forced)]])
    vocabulary = build(counts, size, forced, VOCAB)
    assert vocabulary.draft_ids.tolist() == expected
    assert [i + vocabulary.d2t[i].item() for i in range(size)] == expected  # offsets, not ids
    assert vocabulary.t2d.nonzero().flatten().tolist() == expected
    assert vocabulary.coverage == pytest.approx(sum(n for i, n in counts.items() if i in expected) / sum(counts.values()))


def test_a_tie_goes_to_the_lower_id_whatever_the_order_of_counting():
    forward, backward = dict.fromkeys(range(VOCAB), 2), dict.fromkeys(reversed(range(VOCAB)), 2)
    assert build(forward, 7, [29], VOCAB).draft_ids.tolist() == build(backward, 7, [29], VOCAB).draft_ids.tolist() == [0, 1, 2, 3, 4, 5, 29]


def test_none_is_the_whole_vocabulary():
    whole = build(Counter([3, 3, 5, 5, 29, 3]), None, [], VOCAB)
    assert whole.size == VOCAB and not whole.d2t.any() and whole.t2d.all() and whole.coverage == 1.0


def test_saved_and_loaded_it_is_the_same_and_speculators_slices_the_same_rows(tmp_path):
    vocabulary = build({7: 3, 2: 5, 28: 1}, 6, [11], VOCAB)
    vocabulary.save(tmp_path / "vocab.safetensors")
    loaded = DraftVocabulary.load(tmp_path / "vocab.safetensors")
    assert torch.equal(loaded.d2t, vocabulary.d2t) and torch.equal(loaded.t2d, vocabulary.t2d)
    assert loaded.d2t.dtype == torch.int64 and loaded.t2d.dtype == torch.bool and loaded.coverage == vocabulary.coverage
    assert [p.name for p in tmp_path.iterdir()] == ["vocab.safetensors"]
    rows = torch.arange(VOCAB)  # speculators takes lm_head[t2d]; row i must be the one d2t names
    assert torch.equal(rows[loaded.t2d], loaded.draft_ids)


@pytest.mark.parametrize(
    ("counts", "size", "forced", "words"),
    [
        ({1: 1}, VOCAB + 1, [], "31 ids does not fit"),
        ({1: 1}, 2, [3, 4, 5], "3 special ids do not fit"),
        ({1: 1}, 4, [VOCAB], "lies outside"),
        ({VOCAB: 1}, 4, [], "lies outside"),
        ({}, 4, [], "no response token"),
    ],
)
def test_what_does_not_fit_is_refused(counts, size, forced, words):
    with pytest.raises(MustFix, match=words):
        build(counts, size, forced, VOCAB)


def test_bad_files_are_refused(tmp_path):
    path = tmp_path / "vocab.safetensors"
    with pytest.raises(MustFix, match="cannot be read"):
        DraftVocabulary.load(path)
    path.write_bytes(b"\x10\0\0\0")
    with pytest.raises(MustFix, match="cannot be read"):
        DraftVocabulary.load(path)
    absolute = torch.tensor([2, 7, 28])  # ids where offsets belong
    mask = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, absolute, True)
    with pytest.raises(MustFix, match="offsets"):
        check_maps(absolute, mask, where="a file")
    with pytest.raises(MustFix, match="not the same ids"):
        check_maps(torch.zeros(3, dtype=torch.int64), mask, where="a file")
