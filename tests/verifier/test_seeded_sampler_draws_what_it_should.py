"""The sampler of the engine: vLLM's nucleus, the right frequencies, and a draw that depends on seed and logits alone."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from jobs.verifier.seeded_sampler import (
    SEED_KEY,
    SeededSampler,
    draw,
    draw_compiled,
    exponential,
    halves,
    nucleus,
    nucleus_by_sorting,
    seeds_at,
)

by_search, by_sorting = functools.partial(draw, kept=nucleus), functools.partial(draw, kept=nucleus_by_sorting)


def seeded(count: int, seed: int = 0) -> torch.Tensor:
    """[count, 2] int32: the seeds of so many positions of one request."""
    return halves(seeds_at(np.full(count, seed, np.uint64), np.arange(count)))


def expected(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Probabilities after vLLM's own top-p."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    return apply_top_k_top_p(logits.clone(), None, torch.full((len(logits),), top_p)).softmax(-1)


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Standard deviations from what is expected, over the tokens that are expected at least 10 times."""
    wanted = probabilities * counts.sum()
    used = wanted >= 10
    statistic = ((counts - wanted).square() / wanted)[used].sum().item()
    return (statistic - used.sum().item()) / (2 * used.sum().item()) ** 0.5


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
@pytest.mark.parametrize("way", [by_search, by_sorting], ids=["search", "sorting"])
def test_tokens_come_as_often_as_vllm_says(way, top_p):
    torch.manual_seed(1)
    logits, rows = torch.randn(1, 40) * 2.5, 100_000
    counts = torch.bincount(way(logits.expand(rows, -1), seeded(rows), torch.full((rows,), top_p)), minlength=40).double()
    wanted = expected(logits, top_p)[0].double()
    assert counts[wanted == 0].sum() == 0
    assert abs(chi_square(counts, wanted)) < 5


@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
@pytest.mark.parametrize("found", [nucleus, nucleus_by_sorting])
def test_the_nucleus_is_vllms(found, spread):
    """Row by row, apart from tokens whose cumulative probability is the limit up to rounding."""
    torch.manual_seed(2)
    logits = torch.randn(64, 5000) * spread
    for top_p in (0.05, 0.6, 0.95, 0.999):
        kept = found(logits, torch.full((64,), top_p))
        wanted = expected(logits, top_p) > 0
        assert kept.any(-1).all()
        differ = (kept != wanted).sum(-1)
        assert differ.max() <= 1 and differ.sum() <= 3


def test_rows_do_not_depend_on_each_other_nor_on_the_batch():
    torch.manual_seed(3)
    logits, top_p = torch.randn(50, 300), torch.rand(50).clamp(min=0.1)
    together = by_search(logits, seeded(50), top_p)
    assert together.tolist() == [by_search(logits[i : i + 1], seeded(50)[i : i + 1], top_p[i : i + 1]).item() for i in range(50)]
    assert together.tolist() == by_sorting(logits, seeded(50), top_p).tolist()
    assert together.tolist() != by_search(logits, seeded(50, seed=1), top_p).tolist()


def test_a_rare_token_is_drawn_as_seldom_as_it_should():
    """1 in 2,000,000, which 24 random bits would hardly know."""
    rows, tokens = 4000, 5000
    e = torch.cat([exponential(seeded(rows, seed), tokens).flatten() for seed in range(10)])  # 2e8
    for below in (1e-7, 5e-7, 1e-5):
        seen, wanted = (e < below).sum().item(), below * e.numel()
        assert abs(seen - wanted) < 5 * wanted**0.5, (below, seen, wanted)
    assert abs(e.mean().item() - 1) < 1e-3 and not e.isinf().any() and e.min() > 0


def test_neighbouring_positions_and_seeds_have_nothing_in_common():
    u = exponential(seeded(2000), 200).neg().exp()  # uniform, [position, token]
    for one, other in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:]), (u, exponential(seeded(2000, seed=1), 200).neg().exp())):
        together = torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1].item()
        assert abs(together) < 5 / one.numel() ** 0.5


def test_one_token_that_is_certain_is_drawn_and_masked_ones_never():
    logits = torch.full((20_000, 30), -torch.inf)
    logits[:, 7] = 0.0
    assert (by_search(logits, seeded(20_000), torch.full((20_000,), 0.95)) == 7).all()
    assert (by_sorting(logits, seeded(20_000), torch.ones(20_000)) == 7).all()


def test_of_equal_logits_at_the_limit_all_are_kept():
    """bf16 logits: what vLLM's sort leaves out of a tie is the only difference."""
    torch.manual_seed(5)
    logits = (torch.randn(32, 4000) * 3).bfloat16().float()
    for top_p in (0.3, 0.95):
        given, theirs = torch.full((32,), top_p), expected(logits, top_p) > 0
        kept = nucleus(logits, given)
        assert torch.equal(kept, nucleus_by_sorting(logits, given))
        lowest = logits.where(theirs, torch.inf).amin(-1, keepdim=True)
        assert torch.equal(kept, logits >= lowest) and (kept >= theirs).all()


def test_it_is_compiled_once_for_any_number_of_rows():
    """As vLLM calls it: logits made in inference mode, top_p a view of a normal tensor."""
    compilations = CompileCounter()
    everywhere = torch.rand(300).clamp(min=0.2)
    torch.manual_seed(6)
    for rows in (256, 300, 7, 2, 1, 64):
        with torch.inference_mode():
            logits = torch.randn(rows, 500)
            drawn = draw_compiled(logits, seeded(rows), everywhere[:rows], compilations)
            assert drawn.tolist() == by_sorting(logits, seeded(rows), everywhere[:rows]).tolist()
    assert compilations.frame_count == 1
    torch._dynamo.reset()


class Runner:
    """What the sampler knows of vLLM's: two sampled answers and a greedy one between them; the last one drafted two tokens."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.sampler = SimpleNamespace(topk_topp_sampler=SimpleNamespace(forward=None))
        extra = {"a": {SEED_KEY: 11}, "b": None, "c": {SEED_KEY: 12}}
        self.requests = {name: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra[name])) for name in extra}
        self.input_batch = SimpleNamespace(
            num_reqs=3, req_ids=["a", "b", "c"], generators={}, sampling_metadata=SimpleNamespace(all_greedy=False)
        )
        self.seq_lens = SimpleNamespace(np=np.array([5, 9, 20, 0]))
        self.discard_request_mask = SimpleNamespace(np=np.array([False, False, False]))

    def _sample(self, logits, spec_decode_metadata):
        return self.sampler.topk_topp_sampler.forward(logits, {}, None, torch.full((3,), 0.9))[0]


def test_each_row_is_drawn_by_its_answers_seed_at_the_position_of_its_first_token():
    runner = Runner()
    SeededSampler(runner)
    torch.manual_seed(7)
    logits = torch.randn(3, 2000)
    seeds = seeds_at(np.array([11, 0, 12], np.uint64), np.array([5, 9, 18]))
    wanted = by_sorting(logits, halves(seeds), torch.full((3,), 0.9))
    assert torch.equal(runner._sample(logits, SimpleNamespace(num_draft_tokens=[0, 0, 2])), wanted)
    assert not torch.equal(runner._sample(logits, None), wanted), "without its drafts the last one is two tokens further"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_compiled_it_draws_the_same():
    torch.manual_seed(4)
    for rows in (256, 2, 1, 7, 300):
        logits, top_p = torch.randn(rows, 32_768) * 3, torch.full((rows,), 0.95)
        drawn = draw_compiled(logits.cuda(), seeded(rows).cuda(), top_p.cuda()).cpu()
        assert (drawn == by_sorting(logits, seeded(rows), top_p)).float().mean() > 0.99
