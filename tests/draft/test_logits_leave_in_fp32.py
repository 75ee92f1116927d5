"""`train.fp32_logits`: bf16 factors, fp32 logits, bf16 gradients; one graph; what is served does not know of it. On a CPU."""

import pytest
import torch
from synthetic_states import TAPS, Language, draft_ids, make_store, one_core, small_config  # noqa: F401 - a fixture
from test_float8_training_is_as_good import error
from test_train_refuses_and_skips import new_head, run

from jobs.draft import wide_product
from jobs.draft.attention import Documents
from jobs.draft.data import cut_store, load
from jobs.draft.loss import TargetHead, Unroll
from jobs.draft.packing import Plan

pytestmark = pytest.mark.usefixtures("one_core")


def test_only_the_factors_are_rounded():
    g = torch.Generator().manual_seed(0)
    x, weight, gradient = (torch.randn(*shape, generator=g) for shape in ((64, 96), (128, 96), (64, 128)))
    given = [value.clone().requires_grad_() for value in (x, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        made = wide_product.linear(*given)
    made.backward(gradient)
    narrow = [value.bfloat16().double() for value in (x, weight, gradient)]
    assert made.dtype == torch.float32 and error(made, narrow[0] @ narrow[1].T) < 1e-6
    for found, wanted in zip(given, (narrow[2] @ narrow[1], narrow[2].T @ narrow[0]), strict=True):
        assert found.grad.dtype == torch.float32 and error(found.grad, wanted) < 4e-3
    with torch.autocast("cpu", torch.bfloat16):
        assert error(torch.nn.functional.linear(x, weight), narrow[0] @ narrow[1].T) > 1e-3, "rounded logits are further off"


@pytest.fixture
def packed(tmp_path):
    language, config = Language.make(), small_config()
    store = make_store(tmp_path, [(4, 60), (3, 50)], language=language)
    plan = Plan(cut_store(store, store.ids(), config, 64), rows=128, accumulate=1, epochs=1, max_steps=None, seed=0)
    return language, config, plan, load(store, plan.step_rows(0)[0], plan.rows, TAPS)


def step(packed, wide: bool, *, compiled: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    language, config, plan, row = packed
    head = new_head(language)
    head.lm_head.wide = wide
    unroll = Unroll(head, TargetHead(language.verifier.lm_head, draft_ids(config), torch.bfloat16, wide), "forward_kl", every_row=True)
    if compiled:
        unroll = torch.compile(unroll, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        loss = unroll(row, Documents(row.lengths, plan.rows), 3).loss
    loss.sum().backward()
    return loss.detach(), {name: p.grad for name, p in head.named_parameters() if p.requires_grad}


def test_a_step_is_one_graph_with_the_gradients_of_the_eager_form(packed):
    (loss, gradients), (compiled_loss, compiled_gradients) = step(packed, True), step(packed, True, compiled=True)
    assert torch.allclose(loss, compiled_loss, rtol=1e-3)
    assert not torch.equal(loss, step(packed, False)[0])
    for name, eager in gradients.items():
        assert error(compiled_gradients[name], eager) < 0.03, name  # a bf16 step


def test_training_takes_it_and_what_is_judged_does_not(tmp_path):
    language = Language.make()
    store = make_store(tmp_path / "states", [(5, 20)] * 12, language=language)
    plain, wide = (new_head(language) for _ in range(2))
    for head, on in ((plain, False), (wide, True)):
        run(tmp_path / str(on), store, head, language, tokens_per_step=64, epochs=1, fp32_logits=on)
    assert wide.lm_head.wide and not plain.lm_head.wide
    # A CPU trains in fp32, where nothing would be rounded: the same head.
    for (name, one), other in zip(plain.named_parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
    x = torch.randn(4, wide.config.hidden_size)
    assert torch.equal(wide.eval().lm_head(x), torch.nn.functional.linear(x, wide.lm_head.weight))
