"""`train` from its first step to its last is the recipe written out in float64: loss, weights of the TTT steps, mean over the
packed rows of an optimizer step, warm-up and cosine, clipping, AdamW.

The loss is that of `test_loss_equals_plain_float64`, the update that of `test_update_is_adamw`; here it is seen that the
trainer gives them what the settings say. Only which samples make up a step is taken from the plan.
"""

import pytest
import torch
from short_training import new_head, train_shortly
from synthetic_states import Language, draft_ids, make_store, one_core  # noqa: F401 - a fixture
from test_loss_equals_plain_float64 import reference_sums
from test_update_is_adamw import Reference

from jobs.draft.data import cut_store
from jobs.draft.packing import Plan
from jobs.settings import TrainSettings

pytestmark = pytest.mark.usefixtures("one_core")
STEPS, DECAY, PEAK, FINAL = 3, 0.8, 5e-3, 0.1
RECIPE = dict(
    tokens_per_step=12, max_length=12, accumulate=2, epochs=2, max_steps=4, ttt_steps=STEPS, ttt_decay=DECAY, weight_decay=0.3, clip=13.0,
    learning_rate=PEAK, warmup_share=0.4, final_share=FINAL, betas=(0.9, 0.95),
)  # fmt: skip
# Two steps up to the peak, which the first step of the cosine has too; in the middle of it the mean of peak and end.
RATES = [PEAK / 2, PEAK, PEAK, PEAK * (1 + FINAL) / 2]


def test_weights_and_figures_are_those_of_the_recipe(tmp_path):
    language = Language.make(vocabulary=40, hidden=16)
    store = make_store(tmp_path / "states", [(2, 6), (3, 4), (2, 9), (4, 5), (2, 10)], language=language)
    shape = dict(vocab_size=40, hidden_size=16, intermediate_size=20, head_dim=4, draft_vocab_size=30)
    head = new_head(language, **shape)
    config, settings = head.config, TrainSettings(**RECIPE, device="cpu", log_every=1)
    weights = {n: p.detach().double().clone().requires_grad_(p.requires_grad) for n, p in head.named_parameters()}
    before = {n: w.detach().clone() for n, w in weights.items()}
    plan = Plan(cut_store(store, store.ids(), config, 12), rows=12, accumulate=2, epochs=2, max_steps=4, seed=0)
    assert all(len(plan.step_rows(step)) == 2 for step in range(len(RATES)))

    adamw = Reference({n: w.detach().numpy() for n, w in weights.items() if w.requires_grad}, settings)
    wanted = []
    for step, rate in enumerate(RATES):
        loss, count = 0.0, 0.0
        for piece in (piece for packed in plan.step_rows(step) for piece in packed):
            sample = store.read(piece.sample_id, config.taps)
            prompt = sample.response.prompt_token_ids
            document = prompt + sample.response.response_token_ids, len(prompt), sample.taps.double(), sample.final.double()
            lm_head = language.verifier.lm_head.double()
            sums = reference_sums(weights, config, lm_head, draft_ids(config), document, "forward_kl", STEPS)
            loss = loss + sum(DECAY**k * of_step for k, of_step in enumerate(sums[0]))
            count = count + sum(DECAY**k * of_step for k, of_step in enumerate(sums[1]))
        mean = loss / count
        trained = [n for n, w in weights.items() if w.requires_grad]
        gradients = torch.autograd.grad(mean, [weights[n] for n in trained])
        norm = adamw.update({n: g.numpy() for n, g in zip(trained, gradients, strict=True)}, rate)
        wanted.append((step + 1, rate, mean.item(), norm))
    norms = [norm for *_, norm in wanted]
    assert min(norms) < settings.clip < max(norms), f"some steps are clipped and some are not: {norms}"

    lines = []
    train_shortly(head, tmp_path / "checkpoints", store, language, report=lines.append, **RECIPE)
    found = [(line["step"], line["learning_rate"], line["loss"], line["grad_norm"]) for line in lines if "learning_rate" in line]
    assert [step for step, *_ in found] == [1, 2, 3, 4]
    for got, should_be in zip(found, wanted, strict=True):
        assert got == pytest.approx(should_be, rel=2e-5)
    for name, parameter in head.named_parameters():
        moved = (weights[name] - before[name]).norm()
        assert (moved > 0) == parameter.requires_grad, name
        # AdamW divides by its own gradient's size: where that is nearly nothing, rounding decides the direction of an element.
        error = (parameter.double() - weights[name]).norm()
        assert error <= 1e-3 * moved, f"{name} is off by {error / moved:.1e} of the way it went"
