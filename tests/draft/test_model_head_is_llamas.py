"""The head against independent code: transformers' rope and decoder layer, flex attention, its own names."""

import pytest
import torch
from synthetic_states import Language, draft_ids, small_config
from torch.nn.attention.flex_attention import create_block_mask
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from jobs.draft import rope
from jobs.draft.attention import Documents, attend
from jobs.draft.model import Eagle3Head, UnrollCache
from jobs.errors import MustFix

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0}
SCALINGS = [
    None,
    {"type": "linear", "factor": 4.0},
    YARN,
    YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    YARN | {"attention_factor": 0.9, "truncate": False},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: str(sorted(s) if s else s))
def test_rotation_equals_transformers_llama(scaling):
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, head_dim=64, rope_theta=1e6, rope_scaling=scaling, max_position_embeddings=8192
    )
    positions = torch.tensor([0, 1, 2, 77, 511, 4095, 8191])
    cosine, sine = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions[None])
    frequencies = rope.inverse_frequencies(64, 1e6, scaling, 8192)
    angles = positions.float()[:, None] * frequencies
    angles = torch.cat((angles, angles), -1)
    factor = rope.attention_factor(scaling)
    torch.testing.assert_close(angles.cos() * factor, cosine[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(angles.sin() * factor, sine[0], rtol=1e-6, atol=1e-6)
    q = torch.randn(1, 3, len(positions), 64)
    expected, _ = apply_rotary_pos_emb(q, q, cosine, sine)
    torch.testing.assert_close(rope.rotate(q[0], cosine[0], sine[0]), expected[0], rtol=1e-6, atol=1e-6)


def test_a_rope_that_vllm_serves_otherwise_is_told():
    assert [rope.served_alike(scaling) for scaling in SCALINGS] == [True, True, True, False, False, False]
    with pytest.raises(MustFix, match="'longrope' is not supported"):
        small_config(rope_scaling={"rope_type": "longrope", "factor": 2.0})


def test_norm_equals_transformers_llama():
    config = small_config()
    head = Eagle3Head.from_scratch(config, Language.make().verifier, draft_ids(config), 0)
    norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    norm.weight.data.copy_(head.norm.weight)
    x = torch.randn(9, config.hidden_size) * 5
    torch.testing.assert_close(head.norm(x), norm(x), rtol=1e-6, atol=1e-6)
    assert head.norm(x.bfloat16()).dtype == torch.bfloat16


def test_a_head_in_bfloat16_keeps_exact_rotations():
    config = small_config()
    head = Eagle3Head.from_scratch(config, Language.make().verifier, draft_ids(config), 0)
    positions = torch.tensor([0, 1_000, 200_000])
    exact = head.rotation(positions)
    for got, wanted in zip(head.to(torch.bfloat16).rotation(positions), exact, strict=True):
        assert torch.equal(got, wanted)
    assert "_frequencies" not in head.state_dict()


@pytest.mark.parametrize("own", [0, 2])
def test_flex_attention_equals_plain(own):
    """The form for the compiled step on CUDA against the one for CPU, gradients included."""
    lengths, rows = (40, 25, 50), 128
    g = torch.Generator().manual_seed(0)
    results = []
    tensors = [torch.randn(4, rows, 16, generator=g) for _ in range(3 + 2 * own)]
    for flex in (False, True):
        leaves = [t.clone().requires_grad_() for t in tensors]
        pairs = [(leaves[3 + 2 * i], leaves[4 + 2 * i]) for i in range(own)]
        out = attend(*leaves[:3], pairs, Documents(lengths, rows, flex=flex))
        (out[:, : sum(lengths)] ** 2).sum().backward()
        results.append([out[:, : sum(lengths)], *(leaf.grad[:, : sum(lengths)] for leaf in leaves)])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(plain, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("lengths", "rows"), [((40, 25, 50), 128), ((130, 126, 300, 1, 60), 640), ((512,), 512), ((200, 255), 700)])
def test_blocks_of_the_mask_are_those_of_pytorch(lengths, rows):
    """Which blocks are seen in part and which whole, against the mask of all pairs of rows."""
    documents = Documents(lengths, rows, flex=True)
    ours, ids = documents.block_mask, documents.ids()
    theirs = create_block_mask(lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), None, None, rows, rows, device="cpu")
    assert torch.equal(ours.kv_num_blocks, theirs.kv_num_blocks) and torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv", "full_kv"):
        counts, lists = getattr(ours, f"{name}_num_blocks"), (getattr(ours, f"{name}_indices"), getattr(theirs, f"{name}_indices"))
        for q, count in enumerate(counts[0, 0]):
            a, b = (sorted(x[0, 0, q, :count].tolist()) for x in lists)
            assert a == b, (name, q)


def test_blocks_of_queries_equal_one_softmax(monkeypatch):
    """Documents longer than a block of queries: the same numbers as a dense masked softmax."""
    monkeypatch.setattr("jobs.draft.attention.QUERY_BLOCK", 7)
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 40, 8, generator=g) for _ in range(3))
    documents = Documents((23, 9), 40)
    ids = documents.ids()
    mask = (ids[:, None] == ids[None]) & torch.ones(40, 40, dtype=torch.bool).tril()
    scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(attend(q, k, v, [], documents), scores.softmax(-1) @ v, rtol=1e-5, atol=1e-6)
    own_k, own_v = torch.randn(2, 40, 8, generator=g), torch.randn(2, 40, 8, generator=g)
    longer = torch.cat((scores, (q * own_k).sum(-1, keepdim=True) / 8**0.5), -1).softmax(-1)  # [h, R, R+1]
    expected = longer[..., :40] @ v + longer[..., 40:] * own_v
    torch.testing.assert_close(attend(q, k, v, [(own_k, own_v)], documents), expected, rtol=1e-5, atol=1e-6)


def test_unroll_equals_growing_a_sequence():
    """Drafting from row t by `step` gives what running the head over the extended sequence gives: the
    path the engine takes, where drafted tokens simply follow in the KV cache."""
    config = small_config(norm_before_residual=False)
    head = Eagle3Head.from_scratch(config, Language.make().verifier, draft_ids(config), 0)
    g = torch.Generator().manual_seed(2)
    rows, steps = 11, 4
    tokens = torch.randint(config.vocab_size, (rows,), generator=g)
    features = head.fuse(torch.randn(rows, 3, config.hidden_size, generator=g))
    with torch.no_grad():
        cache, current, fed, drafts = UnrollCache(), features, tokens, []
        for _ in range(steps):
            current = head.step(fed, current, torch.arange(rows), cache, Documents.one(rows))
            fed = head.targets(head.logits(current).argmax(-1))
            drafts.append(fed)
        for t in (0, 3, rows - 1):
            ids, feats, chain = tokens[: t + 1], features[: t + 1], []
            for _ in range(steps):  # the sequence grows by the draft and by the head's own output
                out = head.step(ids, feats, torch.arange(len(ids)), UnrollCache(), Documents.one(len(ids)))
                chain.append(head.targets(head.logits(out[-1]).argmax(-1)))
                ids, feats = torch.cat((ids, chain[-1][None])), torch.cat((feats, out[-1:]))
            assert chain == [step[t] for step in drafts], f"chain from row {t}"


def test_from_scratch_takes_over_the_verifier():
    config, language = small_config(), Language.make()
    ids = draft_ids(config)
    head = Eagle3Head.from_scratch(config, language.verifier, ids, seed=4)
    state = head.state_dict()
    names = {
        "embed_tokens.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
        *(f"layers.0.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *(f"layers.0.self_attn.{n}_proj.weight" for n in "qkvo"), *(f"layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    }  # fmt: skip
    assert set(state) == names
    assert state["embed_tokens.weight"].dtype == torch.bfloat16
    assert torch.equal(state["embed_tokens.weight"], language.verifier.embedding)
    assert torch.equal(state["lm_head.weight"], language.verifier.lm_head.float()[ids])
    assert all(torch.equal(state[name], torch.ones_like(state[name])) for name in names if "norm" in name)
    assert torch.equal(head.draft_ids, ids) and torch.equal(state["t2d"].nonzero().squeeze(-1), ids)
    assert torch.equal(head.targets(torch.arange(len(ids))), ids)
    for name, bound in (("fc", (3 * 32) ** -0.5), ("layers.0.self_attn.o_proj", 0.5 * 32**-0.5)):
        weight = state[f"{name}.weight"]
        assert 0.95 * bound < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1), "uniform"
    again = Eagle3Head.from_scratch(config, language.verifier, ids, seed=4).state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)


def test_shapes_that_cannot_be_are_refused():
    verifier = Language.make().verifier
    for changes, words in (
        ({"taps": (2, 2, 5)}, "three different taps"),
        ({"kv_heads": 3}, "4 heads cannot share 3"),
        ({"head_dim": 7}, "odd"),
        ({"draft_vocab_size": 65}, "draft vocabulary of 65"),
    ):
        with pytest.raises(MustFix, match=words):
            small_config(**changes)
    config = small_config(hidden_size=48)
    with pytest.raises(MustFix, match=r"embedding has shape \(64, 32\) where \(64, 48\)"):
        Eagle3Head.from_scratch(config, verifier, draft_ids(config), 0)
    with pytest.raises(MustFix, match="ascending ids below 64"):
        Eagle3Head.from_scratch(small_config(), verifier, torch.arange(40, 88), 0)
