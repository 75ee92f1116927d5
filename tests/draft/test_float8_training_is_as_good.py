"""Training with FP8 products: each product and gradient is right to a few per cent, what is learned is as good, evaluation
and everything that is published do not know of it, and it is still one graph. On a CPU, through the same function of
PyTorch that a GPU runs; its speed is not tested here."""

import sys
from pathlib import Path

import pytest
import torch
from synthetic_states import TAPS, Language, draft_ids, make_store, one_core, small_config  # noqa: F401 - a fixture
from test_train_refuses_and_skips import new_head, run

from jobs.draft import float8
from jobs.draft.attention import Documents
from jobs.draft.data import cut_store, load
from jobs.draft.loss import TargetHead, Unroll
from jobs.draft.model import Matrix
from jobs.draft.packing import Plan
from jobs.errors import MustFix
from jobs.job_file import load as load_settings

pytestmark = pytest.mark.usefixtures("one_core")


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradients_are_right_to_a_few_per_cent(dtype):
    g = torch.Generator().manual_seed(0)
    x, gradient = torch.randn(96, 64, generator=g, dtype=torch.float64), torch.randn(96, 48, generator=g, dtype=torch.float64)
    x[:, 5] *= 300  # a massive activation
    weight = torch.randn(48, 128, generator=g, dtype=torch.float64)
    exact = [value.detach().clone().requires_grad_() for value in (x, weight)]
    torch.nn.functional.linear(exact[0], exact[1][:, 64:]).backward(gradient)
    ours = [value.to(dtype).requires_grad_() for value in (x, weight)]
    made = float8.linear(ours[0], ours[1].chunk(2, dim=1)[1])
    made.backward(gradient.to(dtype))
    assert made.dtype == dtype and ours[0].grad.dtype == dtype and ours[1].grad.dtype == dtype
    assert error(made, x @ weight[:, 64:].T) < 0.05
    for found, wanted in zip(ours, exact, strict=True):
        assert 0.01 < error(found.grad, wanted.grad) < 0.08, "another product than in FP8"
    assert ours[1].grad[:, :64].abs().max() == 0


def test_nothing_becomes_infinite_or_nan():
    x, weight = torch.zeros(16, 32, requires_grad=True), torch.full((16, 32), 1e30, requires_grad=True)
    made = float8.linear(x, weight)
    made.sum().backward()
    assert torch.equal(made, torch.zeros(16, 16)) and weight.grad.isfinite().all() and x.grad.isfinite().all()


def test_evaluation_and_output_heads_are_exact():
    language = Language.make()
    head = new_head(language)
    head.train_in_fp8()
    assert sorted(name for name, m in head.named_modules() if isinstance(m, Matrix) and not m.fp8) == ["lm_head"]
    x, exact = torch.randn(32, 96), torch.nn.functional.linear
    assert not torch.equal(head.fc(x), exact(x, head.fc.weight))
    assert torch.equal(head.eval().fc(x), exact(x, head.fc.weight))


@pytest.mark.slow
def test_as_much_is_learned(tmp_path):
    language = Language.make()
    store = make_store(tmp_path / "states", [(5 + i % 9, 20 + i % 17) for i in range(60)], language=language)
    changes = dict(epochs=6, tokens_per_step=128, learning_rate=1e-2, warmup_share=0.05, log_every=10)
    last = {}
    for fp8 in (False, True):
        _, lines = run(tmp_path / str(fp8), store, new_head(language, draft_vocab_size=64), language, fp8=fp8, **changes)
        last[fp8] = [line for line in lines if "loss" in line][-1]
    assert last[True]["loss"] != last[False]["loss"]
    assert last[True]["acceptance_estimate"] == pytest.approx(last[False]["acceptance_estimate"], rel=0.05)
    assert last[True]["acceptance_estimate"] > 2.5


@pytest.mark.slow
def test_it_is_one_graph_with_its_gradients(tmp_path):
    """Traced with the forward and backward passes as for a GPU; the gradients are those of the eager form."""
    language = Language.make()
    config = small_config()
    store = make_store(tmp_path, [(4, 60), (3, 50)], language=language)
    plan = Plan(cut_store(store, store.ids(), config, 64), rows=128, accumulate=1, epochs=1, max_steps=None, seed=0)
    row = load(store, plan.step_rows(0)[0], plan.rows, TAPS)

    def gradients_of(compile_it: bool, autocast: bool) -> dict[str, torch.Tensor]:
        head = new_head(language)
        head.train_in_fp8()
        unroll = Unroll(head, TargetHead(language.verifier.lm_head, draft_ids(config), torch.float32), "forward_kl", every_row=True)
        step = torch.compile(unroll, fullgraph=True, dynamic=False, backend="aot_eager") if compile_it else unroll
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            step(row, Documents(row.lengths, plan.rows), 3).loss.sum().backward()
        return {name: p.grad for name, p in head.named_parameters() if p.requires_grad}

    assert all(gradient.isfinite().all() for gradient in gradients_of(True, autocast=True).values())
    # Held against each other in fp32 around the FP8 products: a bf16 that is rounded otherwise would be another number in FP8.
    compiled = gradients_of(True, autocast=False)
    for name, eager in gradients_of(False, autocast=False).items():
        assert error(compiled[name], eager.double()) < 1e-2, name


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compiled_gradients_on_a_gpu_are_those_of_the_eager_step(tmp_path):
    """A whole step: alone, the product was compiled rightly by the PyTorch that put NaN into every fourth row of some gradients."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from training_ours import Ours, config_of, documents_of

    from jobs.draft.ranks import Ranks

    shape = dict(vocab_size=49152, draft_vocab_size=16000, hidden_size=1024, intermediate_size=2048, heads=16, kv_heads=16, head_dim=64)

    def gradients_of(compile_it: bool) -> dict[str, torch.Tensor]:
        made = Ours(config_of(shape), 4096, Ranks(0, 1, torch.device("cuda", 0)), tmp_path, fp8=True, compile=compile_it)
        row, documents = made.feed(documents_of(4096, 512)).next()
        made.run._backward(row, documents, 3, torch.ones(3, device="cuda"))
        return {name: p.grad for name, p in made.run.trained.items() if p.ndim > 1}

    compiled = gradients_of(True)
    for name, eager in gradients_of(False).items():
        # Rounding in bf16 before FP8 makes 0.02 to 0.12 on an H200; what was wrong without becoming NaN had 0.42.
        assert error(compiled[name], eager.double()) < 0.2, name


def test_a_number_of_tokens_that_the_matrix_unit_cannot_take_is_refused():
    with pytest.raises(MustFix, match="train.fp8 needs train.tokens_per_step = 1000 to be a multiple of 16"):
        load_settings("smoke", overrides=["train.fp8=true", "train.tokens_per_step=1000"])


def test_finer_products_beside_it_are_refused():
    with pytest.raises(MustFix, match="train.fp8 and train.precision = 'tf32' contradict each other"):
        load_settings("smoke", overrides=["train.fp8=true", "train.precision=tf32"])
