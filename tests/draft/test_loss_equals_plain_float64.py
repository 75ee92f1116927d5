"""Loss and gradients of one packed step equal a plain fp64 implementation of EAGLE-3's recurrence.

The reference below knows nothing of packing, masks, caches or log-sum-exp: for every document, every
row t and every TTT step k it writes down the one query, the keys it may see and the softmax over
them, as the paper does (arXiv 2503.01840, section 3; the conventions: token x[t+1+k], feature g[t] or
the draft's own output, RoPE position t+k, step-0 keys up to t plus the row's own keys of steps 1..k,
target the verifier's row t+1+k, loss if x[t+2+k] is a response token and the target's argmax is in
the draft vocabulary).
"""

import math

import pytest
import torch
from synthetic_states import TAPS, Language, draft_ids, make_store, small_config

from jobs.draft import data
from jobs.draft.attention import Documents
from jobs.draft.data import context_of, cut_store, load
from jobs.draft.loss import TargetHead, Unroll
from jobs.draft.model import Eagle3Head
from jobs.draft.packing import Plan


def norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rope(x, position, theta):
    """Llama's rotation of one vector, pair by pair."""
    half = len(x) // 2
    out = [None] * len(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        c, s = math.cos(angle), math.sin(angle)
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return torch.stack(out)


class Reference:
    """The draft head for one document, row by row, in fp64."""

    def __init__(self, weights, config):
        self.w, self.c = weights, config

    def qkv(self, token, feature, position):
        w, c = self.w, self.c
        embedded = norm(w["embed_tokens.weight"][token], w["layers.0.input_layernorm.weight"], c.rms_norm_eps)
        normed = norm(feature, w["layers.0.hidden_norm.weight"], c.rms_norm_eps)
        x = torch.cat((embedded, normed))
        q, k, v = ((w[f"layers.0.self_attn.{n}_proj.weight"] @ x).view(-1, c.head_dim) for n in ("q", "k", "v"))
        q = torch.stack([rope(head, position, c.rope_theta) for head in q])
        k = torch.stack([rope(head, position, c.rope_theta) for head in k])
        return q, k, v, normed if c.norm_before_residual else feature

    def rest(self, q, keys, values, residual):
        w, c = self.w, self.c
        group = c.heads // c.kv_heads
        out = []
        for h in range(c.heads):
            scores = torch.stack([q[h] @ key[h // group] for key in keys]) / math.sqrt(c.head_dim)
            p = scores.softmax(0)
            out.append(sum(p[i] * values[i][h // group] for i in range(len(values))))
        hidden = residual + w["layers.0.self_attn.o_proj.weight"] @ torch.cat(out)
        x = norm(hidden, w["layers.0.post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = w["layers.0.mlp.gate_proj.weight"] @ x, w["layers.0.mlp.up_proj.weight"] @ x
        return hidden + w["layers.0.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def logits(self, feature):
        return self.w["lm_head.weight"] @ norm(feature, self.w["norm.weight"], self.c.rms_norm_eps)


def reference_sums(weights, config, verifier_head, ids_of_draft, document, kind, steps):
    """(loss sum, count, correct) of each TTT step over one document (x, prompt tokens, taps, final)."""
    x, prompt, taps, final = document
    reference, rows = Reference(weights, config), len(x) - 1
    features = [weights["fc.weight"] @ taps[t].reshape(-1) for t in range(rows)]
    keys, values = [[] for _ in range(rows)], [[] for _ in range(rows)]  # own keys, step by step
    loss = [torch.zeros((), dtype=torch.float64) for _ in range(steps)]
    count, correct = [0] * steps, [0] * steps
    drafted = {int(target): i for i, target in enumerate(ids_of_draft)}
    for k in range(steps):
        usable = [t for t in range(rows) if t + 1 + k < len(x)]  # the token fed exists
        made = {t: reference.qkv(x[t + 1 + k], features[t], t + k) for t in usable}
        for t in usable:
            keys[t].append(made[t][1])
            values[t].append(made[t][2])
        for t in usable:
            own = [keys[t][j] for j in range(1, k + 1)], [values[t][j] for j in range(1, k + 1)]
            seen = [keys[s][0] for s in range(t + 1)] + own[0], [values[s][0] for s in range(t + 1)] + own[1]
            features[t] = reference.rest(made[t][0], *seen, made[t][3])
            if t + 1 + k >= rows or t + 2 + k < prompt:
                continue  # no target row, or a prompt token
            target = verifier_head @ final[t + 1 + k]
            wanted = int(target.argmax()) if kind == "forward_kl" else x[t + 2 + k]
            if wanted not in drafted:
                continue
            log_q = reference.logits(features[t]).log_softmax(0)
            if kind == "forward_kl":
                log_p = target[ids_of_draft].log_softmax(0)
                loss[k] = loss[k] + (log_p.exp() * (log_p - log_q)).sum()
            else:
                loss[k] = loss[k] - log_q[drafted[wanted]]
            count[k] += 1
            correct[k] += int(log_q.argmax()) == drafted[wanted]
    return loss, count, correct


@pytest.mark.parametrize(
    ("kind", "changes", "every_row", "steps"),
    [
        ("forward_kl", {"norm_before_residual": True}, False, 4),
        ("forward_kl", {"norm_before_residual": False, "kv_heads": 4}, True, 7),
        ("cross_entropy", {"norm_before_residual": True}, False, 4),
        ("forward_kl", {"norm_before_residual": True}, True, 1),
    ],
)
def test_packed_step_equals_reference(tmp_path, monkeypatch, kind, changes, every_row, steps):
    language = Language.make(vocabulary=40, hidden=16)
    config = small_config(vocab_size=40, hidden_size=16, intermediate_size=20, head_dim=4, draft_vocab_size=30, **changes)
    store = make_store(tmp_path, [(3, 9), (6, 2), (2, 14), (9, 7)], language=language)
    ids_of_draft = draft_ids(config)
    head = Eagle3Head.from_scratch(config, language.verifier, ids_of_draft, seed=5)

    plan = Plan(cut_store(store, store.ids(), config, 64), rows=64, accumulate=1, epochs=1, max_steps=None, seed=0)
    assert plan.steps == 1
    pieces = plan.step_rows(0)[0]
    row = load(store, pieces, plan.rows, TAPS)
    unroll = Unroll(head, TargetHead(language.verifier.lm_head, ids_of_draft, torch.float32), kind, every_row)
    monkeypatch.setattr(data, "MOST_TTT_STEPS", steps)
    context = None if every_row else context_of(row)
    assert every_row or max(context) > 3, "most of a prompt is only context"
    got = unroll(row, Documents(row.lengths, plan.rows, context=context), steps)
    decay = 0.8 ** torch.arange(steps)
    ((got.loss * decay).sum() / (got.count * decay).sum()).backward()

    weights = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in head.named_parameters()}
    loss, count, correct = [0] * steps, [0] * steps, [0] * steps
    for piece in pieces:
        sample = store.read(piece.sample_id, TAPS)
        x = sample.response.prompt_token_ids + sample.response.response_token_ids
        document = x, len(sample.response.prompt_token_ids), sample.taps.double(), sample.final.double()
        for total, part in zip(
            (loss, count, correct),
            reference_sums(weights, config, language.verifier.lm_head.double(), ids_of_draft, document, kind, steps),
            strict=True,
        ):
            total[:] = [a + b for a, b in zip(total, part, strict=True)]
    total = sum(0.8**k * loss[k] for k in range(steps)) / sum(0.8**k * count[k] for k in range(steps))
    total.backward()

    assert got.count.tolist() == count
    assert 0 < count[0] < sum(p.rows for p in pieces) - len(pieces), "some positions must be masked"
    assert got.correct.tolist() == correct
    torch.testing.assert_close(got.loss.double(), torch.stack(loss), rtol=1e-5, atol=1e-5)
    for name, parameter in head.named_parameters():
        if parameter.requires_grad:
            wanted = weights[name].grad
            scale = wanted.abs().max()
            assert scale > 0, name
            error = (parameter.grad.double() - wanted).abs().max()
            assert error <= 2e-5 * scale, f"{name}: {error / scale:.1e} of its largest gradient"
