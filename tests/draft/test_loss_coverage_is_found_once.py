"""Which rows can be targets is known without arithmetic where the store tells, is calculated once elsewhere,
and is in both cases what an argmax over the verifier's whole output head says."""

import torch
from synthetic_states import TAPS, Language, draft_ids, make_store, small_config

from jobs.draft.coverage import SURE, Coverage
from jobs.draft.data import cut_store, load
from jobs.draft.loss import TargetHead
from jobs.draft.model import Eagle3Head
from jobs.draft.packing import Plan


def test_known_and_calculated_rows_equal_the_argmax(tmp_path):
    language, config = Language.make(), small_config()
    store = make_store(tmp_path, [(6, 30 + i) for i in range(12)], language=language)
    head = Eagle3Head.from_scratch(config, language.verifier, draft_ids(config), seed=1)
    targets = TargetHead(language.verifier.lm_head, draft_ids(config), torch.float32)
    coverage = Coverage(store.lengths(), head.t2d)
    plan = Plan(cut_store(store, store.ids(), config, 64), rows=96, accumulate=1, epochs=2, max_steps=None, seed=0)
    asked, sure, checked = [0, 0], 0, 0
    for epoch in range(2):
        for pieces in plan.epoch(epoch):
            row = load(store, pieces, 96, TAPS, coverage)
            covered = coverage.decide(row.undecided, row.covered, row.final_of(row.undecided.rows), targets)
            best = (row.final @ language.verifier.lm_head.float().T).argmax(-1)
            wanted = torch.isin(best, draft_ids(config))
            assert torch.equal(covered[row.predicted], wanted[row.predicted])
            asked[epoch] += len(row.undecided)
            checked += int(row.predicted.sum())
    sure = sum(int((store.read(i).logprob[5:] > SURE).sum()) for i in store.ids())
    assert asked[0] == checked // 2 - sure > 0 and sure > 0, "only rows that the store leaves open are calculated"
    assert asked[1] == 0, "and only once"


def test_a_row_is_judged_alike_in_any_company():
    """Blocks of one size: what a resumed run finds does not depend on the rows that come with it."""
    g = torch.Generator().manual_seed(0)
    targets = TargetHead(torch.randn(400, 64, generator=g), torch.arange(0, 400, 3), torch.float32)
    final = torch.randn(700, 64, generator=g)
    whole = targets.drafted(final)
    assert 0 < whole.sum() < 700
    for rows in (torch.arange(0, 700, 7), torch.tensor([699]), torch.arange(699, -1, -1)):
        assert torch.equal(targets.drafted(final[rows]), whole[rows])
