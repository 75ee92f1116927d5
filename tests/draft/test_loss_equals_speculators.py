"""Where the two recipes coincide, the loss, accuracies and gradients are those of speculators' own model.

They coincide on one document of a multiple of 128 rows with true tokens fed back
(`use_off_policy_tokens`) and the loss mask given by row. They differ, on purpose, in packing (there the
last rows of a document reach into the next one's targets) and in targets outside the draft vocabulary.
"""

import pytest
import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from synthetic_states import TAPS, Language, draft_ids, small_config
from transformers import LlamaConfig

from jobs.draft.attention import Documents
from jobs.draft.data import PackedRow
from jobs.draft.loss import TargetHead, Unroll
from jobs.draft.model import Eagle3Head

STEPS, ROWS, PROMPT = 3, 128, 40


def theirs(folder, config, verifier, ids):
    """speculators' model over a checkpoint folder with the same three verifier tensors."""
    llama = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=1, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads, head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps, rope_theta=config.rope_theta, max_position_embeddings=4096, pad_token_id=None,
    )  # fmt: skip
    llama.architectures = ["LlamaForCausalLM"]
    llama.save_pretrained(folder)
    tensors = {
        "model.embed_tokens.weight": verifier.embedding, "model.norm.weight": verifier.final_norm, "lm_head.weight": verifier.lm_head,
    }  # fmt: skip
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    llama._attn_implementation = "simple_flex_attention"
    speculator = SpeculatorsConfig(
        algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)], default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=str(folder), architectures=["LlamaForCausalLM"]),
    )  # fmt: skip
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=llama, draft_vocab_size=config.draft_vocab_size,
            norm_before_residual=config.norm_before_residual, eagle_aux_hidden_state_layer_ids=list(TAPS), speculators_config=speculator,
        ),
        t2d=t2d, d2t=ids - torch.arange(len(ids)),
    )  # fmt: skip


@pytest.mark.parametrize("norm_before_residual", [True, False])
def test_same_loss_accuracy_and_gradients(tmp_path, norm_before_residual):
    language, config = Language.make(), small_config(norm_before_residual=norm_before_residual)
    verifier, ids = language.verifier, draft_ids(config)
    head = Eagle3Head.from_scratch(config, verifier, ids, seed=6)
    peer = theirs(tmp_path, config, verifier, ids)
    own = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in head.state_dict().items()}
    missing, unexpected = peer.load_state_dict(own, strict=False)
    assert not unexpected and all(name.startswith("verifier_") for name in missing), (missing, unexpected)

    # A sequence of ROWS + 2 tokens has ROWS + 1 rows; the last one is only a target.
    g = torch.Generator().manual_seed(9)
    x = torch.tensor(language.write(ROWS + 2, g))
    taps, last, _ = language.states(x.tolist(), g)  # [ROWS+1, 3, H], [ROWS+1, H] before the final norm here
    final = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + config.rms_norm_eps) * verifier.final_norm.float()
    row = PackedRow(
        taps, final, x[1:], torch.arange(1, ROWS + 2) >= PROMPT, torch.arange(ROWS + 1, 0, -1), torch.arange(ROWS + 1),
        (ROWS + 1,), ("one",),
    )  # fmt: skip
    targets = TargetHead(verifier.lm_head, ids, torch.float32)
    ours = Unroll(head, targets, "forward_kl")(row, Documents.one(ROWS + 1), STEPS)
    (ours.loss / ours.count).sum().backward()

    covered = targets.drafted(final)
    mask = (row.predicted & covered)[1:]  # by target row t+1, as their rows are aligned
    _, loss, metrics = peer(
        hidden_states=taps[None, :-1].flatten(-2), input_ids=x[None, 1:-1], lengths=torch.tensor([ROWS]), loss_mask=mask[None],
        verifier_last_hidden_states=last[None, 1:], ttt_steps=STEPS, ttt_step_loss_decay=1.0, use_off_policy_tokens=True,
    )  # fmt: skip
    loss.backward()

    assert 50 < ours.count[0] < ROWS - PROMPT
    for k in range(STEPS):
        assert float((ours.loss[k] / ours.count[k]).detach()) == pytest.approx(float(metrics[f"loss_{k}"]), rel=1e-5), k
        # Theirs counts a row as right at step k if it was right at all steps before: our `chain`.
        assert float(ours.chain[k] / ours.count[k]) == pytest.approx(float(metrics[f"full_acc_{k}"]), rel=1e-4), k
    gradients = {name: p.grad for name, p in peer.named_parameters() if p.grad is not None}
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            scale = gradients[name].abs().max()
            assert (parameter.grad - gradients[name]).abs().max() <= 1e-4 * scale, name
