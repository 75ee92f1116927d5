"""The step for CUDA is ONE graph of static shape: no graph break, and no recompilation for another packing.

Traced by TorchDynamo with the `eager` backend, which needs neither a GPU nor a compiler: what is tested
is that the structure can be compiled, not its speed. The sums equal those of the eager CPU form.
"""

import pytest
import torch
from synthetic_states import TAPS, Language, draft_ids, make_store, small_config
from torch._dynamo.testing import CompileCounter

from jobs.draft.attention import Documents
from jobs.draft.data import cut_store, load
from jobs.draft.loss import TargetHead, Unroll
from jobs.draft.model import Eagle3Head
from jobs.draft.packing import Plan


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 50])
def test_one_graph_for_every_packing(tmp_path, monkeypatch, chunk):
    if chunk:
        monkeypatch.setattr("jobs.draft.loss._chunk_rows", lambda *_: chunk)
    language, config = Language.make(), small_config(kv_heads=4)
    store = make_store(tmp_path, [(4 + i % 5, 20 + 7 * (i % 6)) for i in range(14)], language=language)
    head = Eagle3Head.from_scratch(config, language.verifier, draft_ids(config), seed=2)
    targets = TargetHead(language.verifier.lm_head, draft_ids(config), torch.float32)
    plan = Plan(cut_store(store, store.ids(), config, 128), rows=128, accumulate=1, epochs=1, max_steps=None, seed=0)
    assert plan.steps >= 3
    counter = CompileCounter()
    torch._dynamo.reset()
    static = torch.compile(Unroll(head, targets, "forward_kl", every_row=True), backend=counter, fullgraph=True, dynamic=False)
    eager = Unroll(head, targets, "forward_kl")
    for step in range(3):
        row = load(store, plan.step_rows(step)[0], plan.rows, TAPS)
        documents = Documents(row.lengths, plan.rows, flex=True)
        compiled = static(row, documents, 3)
        plain = eager(row, Documents(row.lengths, plan.rows), 3)
        assert torch.equal(compiled.count, plain.count) and torch.equal(compiled.correct, plain.correct)
        torch.testing.assert_close(compiled.loss, plain.loss, rtol=1e-5, atol=1e-5)
        compiled.loss.sum().backward()
    assert counter.frame_count == 1, f"{counter.frame_count} graphs for three packings"
