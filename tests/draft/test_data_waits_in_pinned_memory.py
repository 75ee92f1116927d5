"""What is copied to a GPU waits for it in pinned memory, all of it: a copy from any other memory makes the step wait."""

import pytest
import torch
from synthetic_states import TAPS, Language, draft_ids, make_store, small_config

from jobs.draft import data
from jobs.draft.coverage import Coverage
from jobs.draft.packing import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_every_tensor_of_a_packed_row_is_pinned_and_holds_the_same(tmp_path, monkeypatch, dtype):
    config = small_config()
    store = make_store(tmp_path, [(4, 60), (3, 50), (5, 30)], language=Language.make(), dtype=dtype)
    plan = Plan(data.cut_store(store, store.ids(), config, 64), rows=128, accumulate=1, epochs=1, max_steps=None, seed=0)
    drafted = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, draft_ids(config), True)
    coverage = Coverage(store.lengths(store.ids()), drafted)
    packed = plan.step_rows(0)[0]
    row = data.load(store, packed, plan.rows, TAPS, coverage, pin=True)
    plain = data.load(store, packed, plan.rows, TAPS, coverage).tensors()
    tensors = row.tensors()
    assert {"taps", "final", "tokens", "predicted", "remaining", "positions", "covered"} <= tensors.keys() == plain.keys()
    assert ("taps_scale" in tensors) is ("final_scale" in tensors) is (dtype == "float8_e4m3fn")
    for name, tensor in tensors.items():
        assert tensor.is_pinned(), name
        assert torch.equal(tensor.view(torch.uint8), plain[name].view(torch.uint8)), name
    assert row.undecided.rows.is_pinned()

    loaded, load = [], data.load
    monkeypatch.setattr(data, "load", lambda *given, **named: loaded.append(load(*given, **named)) or loaded[-1])
    with data.ReadAhead(store, plan.share(0, 0, 1), plan.rows, TAPS, "cuda", coverage) as ahead:
        row, _ = ahead.next()
    assert all(tensor.is_cuda for tensor in row.tensors().values())
    assert loaded and all(tensor.is_pinned() for each in loaded for tensor in each.tensors().values())
