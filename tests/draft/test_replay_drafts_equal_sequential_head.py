"""Drafting all rows at once gives what drafting from one row after the other, from scratch, gives."""

import pytest
import torch
from small_heads import H, random_sequence, small_head

from jobs.draft.attention import Documents
from jobs.draft.drafting import draft_chains
from jobs.draft.model import UnrollCache
from jobs.errors import MustFix

K = 4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SHAPES = [
    dict(),
    dict(norm_before_residual=True),
    dict(kv_heads=4, rope_theta=1e6),
    dict(kv_heads=1, draft_vocab_size=97),
    dict(rope_scaling=YARN, max_position_embeddings=64),
]


class PlainHead:
    """The head written out in fp64 over a plain sequence, all keys recomputed for every drafted token.

    Nothing is shared with the code under test: rotary tables come from transformers, attention is one
    causal matrix, the draft appends tokens and features to a list.
    """

    def __init__(self, head):
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.c = c = head.config
        self.w = {name: t.double() if t.is_floating_point() else t for name, t in head.state_dict().items()}
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=c.hidden_size, num_attention_heads=c.heads, head_dim=c.head_dim, rope_theta=c.rope_theta,
                rope_scaling=c.rope_scaling, max_position_embeddings=c.max_position_embeddings,
            )
        )  # fmt: skip

    def norm(self, x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c.rms_norm_eps).sqrt() * self.w[name + ".weight"]

    def last(self, tokens, features):
        """Feature and draft id after the last of the sequence. tokens: n ids; features: n times [H]."""
        c, w, n = self.c, self.w, len(tokens)
        features = torch.stack(features)
        normed = self.norm(features, "layers.0.hidden_norm")
        x = torch.cat((self.norm(w["embed_tokens.weight"][tokens], "layers.0.input_layernorm"), normed), -1)
        project = lambda name, heads: (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T).view(n, heads, c.head_dim)  # noqa: E731
        cosine, sine = (t[0].double()[:, None] for t in self.rotary(torch.zeros(1), torch.arange(n)[None]))

        def rotate(y):
            a, b = y[..., : c.head_dim // 2], y[..., c.head_dim // 2 :]
            return y * cosine + torch.cat((-b, a), -1) * sine

        q, k, v = rotate(project("q", c.heads)), rotate(project("k", c.kv_heads)), project("v", c.kv_heads)
        k, v = (t.repeat_interleave(c.heads // c.kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / c.head_dim**0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", scores, v).reshape(n, -1)
        hidden = (normed if c.norm_before_residual else features) + mixed @ w["layers.0.self_attn.o_proj.weight"].T
        y = self.norm(hidden, "layers.0.post_attention_layernorm")
        gate, up, down = (w[f"layers.0.mlp.{m}_proj.weight"] for m in ("gate", "up", "down"))
        feature = (hidden + (torch.nn.functional.silu(y @ gate.T) * (y @ up.T)) @ down.T)[-1]
        return feature, (self.norm(feature, "norm") @ w["lm_head.weight"].T)

    def chain(self, tokens, taps, row):
        """K drafts from one row: tokens x[1..row+1], features of rows 0..row, then its own."""
        sequence = list(tokens[1 : row + 2])
        features = [t.double().flatten() @ self.w["fc.weight"].T for t in taps[: row + 1]]
        margin, drafted = float("inf"), []
        for _ in range(K):
            feature, logits = self.last(sequence, features)
            best = logits.topk(2)
            margin = min(margin, (best.values[0] - best.values[1]).item())
            drafted.append((best.indices[0] + self.w["d2t"][best.indices[0]]).item())
            sequence.append(drafted[-1])
            features.append(feature)
        return drafted, margin


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: ",".join(s) or "default")
def test_every_row_drafts_what_a_plain_sequential_head_drafts(shape):
    head = small_head(3, **shape)
    tokens, taps = random_sequence(24, seed=1)
    chains = draft_chains(head, tokens, taps, K)
    plain = PlainHead(head)
    assert chains.shape == (23, K) and len(set(chains.flatten().tolist())) > 10
    for row in range(23):
        expected, margin = plain.chain(tokens, taps, row)
        assert margin > 1e-4  # no tie decides; a smaller one would let fp32 differ from fp64
        assert chains[row].tolist() == expected


@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
@pytest.mark.parametrize("first", [0, 5, 22])
def test_neither_the_chunk_nor_the_first_row_changes_a_chain(chunk, first):
    head = small_head(4)
    tokens, taps = random_sequence(24, seed=2)
    whole = draft_chains(head, tokens, taps, K)
    assert torch.equal(draft_chains(head, tokens, taps, K, first_row=first, chunk_rows=chunk), whole[first:])
    assert torch.equal(draft_chains(head, tokens, taps, 2, first_row=first), whole[first:, :2])


def test_it_is_the_unroll_of_training_fed_with_its_own_drafts():
    head = small_head(5, norm_before_residual=True)
    tokens, taps = random_sequence(40, seed=3)
    fed, feature, cache = torch.tensor(tokens[1:]), head.fuse(taps), UnrollCache()
    for step in range(K):
        feature = head.step(fed, feature, torch.arange(39), cache, Documents.one(39))
        fed = head.targets(head.logits(feature).argmax(-1))
        assert torch.equal(fed, draft_chains(head, tokens, taps, K)[:, step])


def test_a_later_token_or_tap_changes_no_earlier_chain():
    head = small_head(6)
    tokens, taps = random_sequence(24, seed=4)
    before = draft_chains(head, tokens, taps, K)
    changed, other = list(tokens), taps.clone()
    changed[15] = (changed[15] + 1) % 97
    other[14:] += 1.0
    after = draft_chains(head, changed, other, K)
    assert torch.equal(before[:14], after[:14]) and not torch.equal(before[14:], after[14:])


def test_memory_is_bounded_on_a_long_answer(monkeypatch):
    import jobs.draft.drafting as drafting

    seen = []
    plain = drafting._attend
    monkeypatch.setattr(
        drafting, "_attend", lambda q, k, *rest: (seen.append(q.shape[0] * q.shape[1] * k.shape[1] * 4), plain(q, k, *rest))[1]
    )
    monkeypatch.setitem(drafting.CHUNK_BYTES, "cpu", 1 << 18)
    tokens, taps = random_sequence(1000, seed=5)
    draft_chains(small_head(7), tokens, taps, 2, first_row=800)
    assert max(seen) <= (1 << 18) / 3 < 4 * 200 * 1000 * 4


def test_taps_that_do_not_fit_are_refused():
    tokens, taps = random_sequence(10)
    for wrong in (taps[:-1], taps[..., : H - 1], taps[:, :2]):
        with pytest.raises(MustFix, match="do not fit 9 rows of a head of width 32"):
            draft_chains(small_head(0), tokens, wrong, K)
