"""The step for CUDA is ONE graph of static shape: no graph break, and no recompilation for another packing.

Traced by TorchDynamo with the `eager` backend, which needs neither a GPU nor a compiler: what is tested
is that the structure can be compiled, not its speed. The sums equal those of the eager CPU form.
"""

from dataclasses import replace

import pytest
import torch
from synthetic_states import TAPS, Language, draft_ids, make_store, small_config
from torch._dynamo.testing import CompileCounter

from jobs.draft.arithmetic import products
from jobs.draft.attention import Documents
from jobs.draft.coverage import Coverage
from jobs.draft.data import cut_store, load
from jobs.draft.drafting import draft_chains
from jobs.draft.loss import TargetHead, Unroll
from jobs.draft.model import Eagle3Head
from jobs.draft.packing import Plan


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 50])
def test_one_graph_for_every_packing(tmp_path, monkeypatch, chunk):
    """Nor for a second epoch, whose rows are all decided, a row of padding for an idle rank, or after an evaluation."""
    if chunk:
        monkeypatch.setattr("jobs.draft.loss._chunk_rows", lambda *_: chunk)
    language, config = Language.make(), small_config(kv_heads=4)
    store = make_store(tmp_path, [(4 + i % 5, 20 + 7 * (i % 6)) for i in range(14)], language=language)
    head = Eagle3Head.from_scratch(config, language.verifier, draft_ids(config), seed=2)
    targets = TargetHead(language.verifier.lm_head, draft_ids(config), torch.float32)
    plan = Plan(cut_store(store, store.ids(), config, 128), rows=128, accumulate=1, epochs=2, max_steps=None, seed=0)
    of_an_epoch = len(plan.epoch(0))
    assert of_an_epoch >= 3
    coverage = Coverage(store.lengths(), head.t2d)
    counter = CompileCounter()
    torch._dynamo.reset()
    static = torch.compile(Unroll(head, targets, "forward_kl", every_row=True), backend=counter, fullgraph=True, dynamic=False)
    eager = Unroll(head, targets, "forward_kl")

    def evaluate():
        sample = store.read(store.ids()[0], TAPS)
        with torch.no_grad(), products("fp32"):
            draft_chains(head.eval(), sample.response.prompt_token_ids + sample.response.response_token_ids, sample.taps, 3)
        head.train()

    def train_on(pieces):
        row = load(store, pieces, plan.rows, TAPS, coverage)
        undecided, covered = row.undecided, row.covered
        if len(undecided):  # as the trainer does it, outside the compiled step
            covered = coverage.decide(undecided, covered, row.final_of(undecided.rows), targets)
        row = replace(row, covered=covered, undecided=None)
        compiled = static(row, Documents(row.lengths, plan.rows, flex=True), 3)
        plain = eager(row, Documents(row.lengths, plan.rows), 3)
        assert torch.equal(compiled.count, plain.count) and torch.equal(compiled.correct, plain.correct)
        torch.testing.assert_close(compiled.loss, plain.loss, rtol=1e-5, atol=1e-5)
        compiled.loss.sum().backward()
        return len(undecided), float(compiled.count.sum())

    head.train()
    first = [train_on(plan.step_rows(step)[0]) for step in range(3)]
    evaluate()
    assert train_on(()) == (0, 0.0), "a row of padding has nothing to predict"
    for pieces in plan.epoch(0)[3:]:
        first.append(train_on(pieces))
    evaluate()
    second = [train_on(pieces) for pieces in plan.epoch(1)[:3]]
    assert sum(undecided for undecided, _ in first) > 0 and not sum(undecided for undecided, _ in second)
    assert counter.frame_count == 1, f"{counter.frame_count} graphs"
