"""With bf16 products, softmax, KL and norms are fp32 all the same, and weights and optimizer state are fp32 whatever the head was.

Each is held against float64 on the very same bf16 numbers: what is left is the rounding of fp32, or one rounding to bf16 where
the result is bf16 again.
"""

import pytest
import torch
from safetensors.torch import load_file
from short_training import new_head, train_shortly, twelve_samples
from synthetic_states import TAPS, Language, draft_ids, make_store, one_core, small_config  # noqa: F401 - a fixture

from jobs.draft.attention import Documents, attend
from jobs.draft.data import cut_store, load
from jobs.draft.loss import TargetHead, Unroll
from jobs.draft.model import Eagle3Head, RMSNorm
from jobs.draft.packing import Plan

pytestmark = pytest.mark.usefixtures("one_core")
STEPS = 3
ONE_ROUNDING = 2.0**-8 * 1.001  # of a number to bf16, relative


class Watched(Unroll):
    """Keeps what goes into the loss: the draft's logits, the verifier's, and the wanted draft ids of each TTT step."""

    def _rows_loss(self, feature, target_logits, wanted):
        self.seen.append((self.head.logits(feature).detach(), target_logits, wanted))
        return super()._rows_loss(feature, target_logits, wanted)


@pytest.mark.parametrize("kind", ["forward_kl", "cross_entropy"])
def test_the_loss_of_bf16_logits_is_fp32(tmp_path, kind):
    language, config = Language.make(), small_config()
    store = make_store(tmp_path, [(4, 30), (4, 40)], dtype="bfloat16", language=language)
    plan = Plan(cut_store(store, store.ids(), config, 96), rows=96, accumulate=1, epochs=1, max_steps=None, seed=0)
    row = load(store, plan.step_rows(0)[0], 96, TAPS)
    head = Eagle3Head.from_scratch(config, language.verifier, draft_ids(config), seed=2)
    unroll = Watched(head, TargetHead(language.verifier.lm_head, draft_ids(config), torch.bfloat16), kind)
    unroll.seen = []
    with torch.autocast("cpu", torch.bfloat16):
        got = unroll(row, Documents(row.lengths, 96), STEPS)
    assert len(unroll.seen) == STEPS and got.loss.dtype == torch.float32
    for k, (logits, target_logits, wanted) in enumerate(unroll.seen):
        assert logits.dtype == torch.bfloat16 and len(logits) == got.count[k]
        log_draft = logits.double().log_softmax(-1)
        if kind == "forward_kl":
            assert target_logits.dtype == torch.bfloat16
            log_target = target_logits.double().log_softmax(-1)
            should_be = (log_target.exp() * (log_target - log_draft)).sum()
        else:
            should_be = -log_draft.gather(-1, wanted[:, None]).sum()
        assert got.loss[k].item() == pytest.approx(should_be.item(), rel=1e-5), f"TTT step {k}"


def test_the_norm_of_bf16_numbers_is_rounded_once():
    g = torch.Generator().manual_seed(0)
    norm, x = RMSNorm(512, 1e-5), torch.randn(64, 512, generator=g).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * torch.randn(512, generator=g))
        with torch.autocast("cpu", torch.bfloat16):
            got = norm(x)
    wide = x.double()
    should_be = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.detach().double()
    assert got.dtype == torch.bfloat16
    assert ((got.double() - should_be).abs() <= ONE_ROUNDING * should_be.abs()).all()


def test_attention_over_bf16_keys_adds_up_in_fp32():
    """A row sees up to 400 keys of step 0 and one of its own: a sum of exponentials rounded to bf16 alone is off by a hundredth."""
    g = torch.Generator().manual_seed(1)
    query, key, value, own_key, own_value = (torch.randn(2, 400, 16, generator=g).bfloat16() for _ in range(5))
    value = value + 1  # means that are not nearly zero
    got = attend(query, key, value, [(own_key, own_value)], Documents.one(400))
    # The products themselves are bf16 in the plain form, so they are the same numbers here.
    scores = (query @ key.transpose(1, 2)).double() * 16**-0.5  # [h, R, R]
    scores = scores.masked_fill(torch.ones(400, 400, dtype=torch.bool).triu(1), float("-inf"))
    own = (query.double() * own_key.double()).sum(-1, keepdim=True) * 16**-0.5  # [h, R, 1]
    weights = torch.cat((scores, own), -1).softmax(-1)  # [h, R, R + 1]
    should_be = weights[..., :-1] @ value.double() + weights[..., -1:] * own_value.double()
    error = (got.double() - should_be).norm() / should_be.norm()
    assert error < 0.005, error


def test_a_bf16_head_is_trained_in_fp32(tmp_path):
    store, language = twelve_samples(tmp_path / "states")
    head = new_head(language).bfloat16()
    before = {n: p.detach().float().clone() for n, p in head.named_parameters() if p.requires_grad}
    train_shortly(head, tmp_path / "checkpoints", store, language, report=lambda line: None, learning_rate=1e-5, checkpoint_every=6)
    checkpoints = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 2
    for folder in checkpoints:
        weights, moments = (load_file(folder / f"{part}.safetensors") for part in ("weights", "optimizer"))
        assert set(weights) == {*before, "d2t", "t2d"} and len(moments) == 3 * len(before)
        assert {t.dtype for n, t in weights.items() if n in before} == {t.dtype for t in moments.values()} == {torch.float32}
    for name, weight in before.items():  # in bf16 hardly a weight would have moved
        moved = weights[name] != weight
        assert moved.float().mean() > 0.9 and (weights[name] != weights[name].bfloat16().float()).float().mean() > 0.9, name
    assert {p.dtype for n, p in head.named_parameters() if n in before} == {torch.float32}
