"""The EAGLE-3 draft head in plain PyTorch: what vLLM serves, in a form that can be trained.

One decoder layer over `concat(norm(embedding of the next token), norm(feature))`; the feature is
`fc` over three tapped residual streams of the verifier at step 0, and the head's own output
afterwards (EAGLE-3, arXiv 2503.01840, section 3; `vllm/model_executor/models/llama_eagle3.py` in
0.16.0 is the serving form this equals number by number).

Decisions:
* No transformers module inside: the unroll's attention (`jobs.draft.attention`) is not a causal
  mask over a sequence, and a class made for text generation would have to be patched for it.
* Rows, not batches: every tensor is `[R, ...]` over the rows of one packed row; documents are told
  apart by `Documents`. Training and replay go through the same `step`.
* The embedding stays in the verifier's own dtype and is never trained: vLLM shares the verifier's
  copy only when the head's is equal to it bit for bit.
* `state_dict()` has the names of a speculators checkpoint, d2t and t2d included, so a saved head
  needs no renaming (the table of the other form's names is in `jobs.draft.formats`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jobs.draft import float8
from jobs.draft.attention import Documents, attend
from jobs.draft.rope import attention_factor, inverse_frequencies, rope_type, rotate
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix

__all__ = ["Eagle3Head", "HeadConfig", "UnrollCache", "VerifierWeights"]


@dataclass(frozen=True)
class HeadConfig:
    """Shape and conventions of a head; what a checkpoint's config.json has to say about it.

    taps: EAGLE-3 ids, the residual stream at the INPUT of verifier layer i.
    norm_before_residual: the layer's residual is the normed feature (true) or the raw one (false).
    rope_theta, rope_scaling: the head's own, never the verifier's.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None
    taps: tuple[int, int, int]
    norm_before_residual: bool
    max_position_embeddings: int = 262_144

    def __post_init__(self) -> None:
        rope_type(self.rope_scaling)
        problem = None
        if len(set(self.taps)) != 3:
            problem = f"a head reads three different taps, got {tuple(self.taps)}"
        elif self.heads % self.kv_heads:
            problem = f"{self.heads} heads cannot share {self.kv_heads} key-value heads"
        elif self.head_dim % 2:
            problem = f"head_dim {self.head_dim} is odd, rotary positions need pairs"
        elif not 0 < self.draft_vocab_size <= self.vocab_size:
            problem = f"a draft vocabulary of {self.draft_vocab_size} does not fit into one of {self.vocab_size} tokens"
        if problem:
            raise MustFix(problem, where="shape of the draft head", remedy="correct the settings or the head's config.json")


class UnrollCache:
    """Keys and values of the steps done so far, `[kv_heads, R, D]` each; entry 0 is step 0."""

    def __init__(self) -> None:
        self.entries: list[tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self.entries)


class RMSNorm(nn.Module):
    """Root-mean-square norm, statistics in fp32, result in the dtype of the input."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()  # [..., H]
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class Matrix(nn.Linear):
    """A linear map; in training its products are in FP8 where `fp8` says so."""

    fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """With a part of the weight in its place."""
        return float8.linear(x, weight) if self.fp8 and self.training else nn.functional.linear(x, weight)


def _matrix(inputs: int, outputs: int) -> Matrix:
    """Without bias and without PyTorch's default init: whoever builds a head fills it."""
    return nn.utils.skip_init(Matrix, inputs, outputs, bias=False)


class Attention(nn.Module):
    """Projections of the head's attention; its input is twice as wide as the model: embedding, feature.

    The two halves are projected apart and added. In training row t of step k is fed the TRUE token
    x[t+1+k], which is what row t+k of step 0 is fed: the embedding's half of a step is the first
    step's, shifted by k rows, and is computed once for all steps (a tenth of the whole arithmetic
    at three). The rotation comes after the sum, so nothing else changes.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.q_proj = _matrix(2 * config.hidden_size, config.heads * config.head_dim)
        self.k_proj = _matrix(2 * config.hidden_size, config.kv_heads * config.head_dim)
        self.v_proj = _matrix(2 * config.hidden_size, config.kv_heads * config.head_dim)
        self.o_proj = _matrix(config.heads * config.head_dim, config.hidden_size)
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim

    def halves(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Weights of query, key and value for the embedding, and for the feature: `[h * D, H]` each."""
        parts = [m.weight.chunk(2, dim=1) for m in (self.q_proj, self.k_proj, self.v_proj)]
        return tuple(zip(*parts, strict=True))

    def forward(
        self, normed: Tensor, embedded: tuple[Tensor, ...], cosine: Tensor, sine: Tensor, cache: UnrollCache, documents: Documents
    ) -> Tensor:
        """normed: the feature `[R, H]`. embedded: the embedding's share of query, key, value `[R, h * D]`.

        Of step 0 only the queries of `documents` come out, `[M, H]`; later steps are given no other rows.
        """
        asked = documents.of_queries if not cache.entries else _every_row
        query, key, value = (
            (self.q_proj.product(rows(normed), weight) + rows(share)).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)  # [h, M or R, D]
            for rows, weight, share in zip((asked, _every_row, _every_row), self.halves()[1], embedded, strict=True)
        )
        # The rotation is fp32 (cosines of a position of 200,000 have no meaning in bf16).
        query = rotate(query.float(), asked(cosine), asked(sine)).to(value.dtype)
        key = rotate(key.float(), cosine, sine).to(value.dtype)
        cache.entries.append((self._widen(key), self._widen(value)))
        (first_key, first_value), *own = cache.entries
        mixed = attend(query, first_key, first_value, own, documents)  # [h, M, D]
        return self.o_proj(mixed.transpose(0, 1).flatten(1))  # [M, H]

    def _widen(self, x: Tensor) -> Tensor:
        """Key-value heads repeated for the query heads that share them: [g, R, D] -> [h, R, D]."""
        return x if self.heads == self.kv_heads else x.repeat_interleave(self.heads // self.kv_heads, dim=0)


class FeedForward(nn.Module):
    """Llama's gated feed-forward layer."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.gate_proj = _matrix(config.hidden_size, config.intermediate_size)
        self.up_proj = _matrix(config.hidden_size, config.intermediate_size)
        self.down_proj = _matrix(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def _every_row(x: Tensor) -> Tensor:
    return x


class DraftLayer(nn.Module):
    """The one decoder layer: norms of embedding and feature apart, attention over both side by side."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.norm_before_residual = config.norm_before_residual

    def project(self, embedded: Tensor) -> tuple[Tensor, ...]:
        """The embedding's share of query, key and value, before rotation: `[R, H]` -> `[R, h * D]` each."""
        normed = self.input_layernorm(embedded)  # [R, H]
        return tuple(self.self_attn.q_proj.product(normed, weight) for weight in self.self_attn.halves()[0])

    def forward(
        self, projected: tuple[Tensor, ...], feature: Tensor, cosine: Tensor, sine: Tensor, cache: UnrollCache, documents: Documents
    ) -> Tensor:
        normed = self.hidden_norm(feature)  # [R, H]
        residual = normed if self.norm_before_residual else feature
        residual = residual if cache.entries else documents.of_queries(residual)  # [M, H]
        hidden = residual + self.self_attn(normed, projected, cosine, sine, cache, documents)  # [M, H]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # [M, H]


class Eagle3Head(nn.Module):
    """An EAGLE-3 head. Build it with `from_scratch` or `jobs.draft.formats.load_head`: the plain
    constructor leaves every matrix uninitialised."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.utils.skip_init(nn.Embedding, config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = _matrix(3 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([DraftLayer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = _matrix(config.hidden_size, config.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._attention_factor = attention_factor(config.rope_scaling)
        self.register_buffer("_frequencies", self._computed_frequencies(), persistent=False)  # fp32 [D/2]

    def _computed_frequencies(self) -> Tensor:
        c = self.config
        return inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, c.max_position_embeddings)

    def _apply(self, function, recurse: bool = True) -> "Eagle3Head":
        """`.to(...)` moves the frequencies and must not round them: in bf16 position 1,000 is off by four."""
        super()._apply(function, recurse)
        self._frequencies = self._computed_frequencies().to(self.d2t.device)
        return self

    def train_in_fp8(self) -> None:
        """From now on every product of a training step but the output head's is in FP8."""
        for matrix in (self.fc, *(m for m in self.layers.modules() if isinstance(m, Matrix))):
            matrix.fp8 = True

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, fp32 `[R, D]` each, of integer positions `[R]`."""
        angles = positions.float().unsqueeze(-1) * self._frequencies  # [R, D/2]
        angles = torch.cat((angles, angles), -1)  # [R, D]
        return angles.cos() * self._attention_factor, angles.sin() * self._attention_factor

    def fuse(self, taps: Tensor) -> Tensor:
        """Taps `[..., 3, H]` in the order of `config.taps` -> the feature of step 0, `[..., H]`."""
        return self.fc(taps.flatten(-2).to(self.fc.weight.dtype))

    def project(self, tokens: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What the tokens `[R]` add to query, key and value of a step, `[R, h * D]` each; see `Attention`."""
        return self.layers[0].project(self.embed_tokens(tokens).to(dtype))

    def step(
        self, fed: Tensor | tuple[Tensor, ...], feature: Tensor, positions: Tensor, cache: UnrollCache, documents: Documents
    ) -> Tensor:
        """One drafting step k = `len(cache)` (from 0) for all rows at once; appends to the cache.

        fed: `[R]` target ids, or what `project` made of them. Training: the true x[t+1+k]. Replay:
            x[t+1] at step 0, afterwards the draft of step k-1 at row t (under the walk's condition,
            that it was accepted, equal).
        feature: `[R, H]`, `fuse` of row t at step 0, what this method returned at step k-1 afterwards.
        positions: `[R]` integers, t of step 0 (row's place in its sample); step k is added here.
        cache: keys and values of the steps before; row t sees step 0 up to t within its document,
            and of the later steps only its own.
        documents: where it has context, steps 1.. are given, and all return, the M rows of its queries.
        Returns the next feature `[R, H]`; `logits` of it are the distribution of x[t+2+k].
        """
        projected = self.project(fed, feature.dtype) if isinstance(fed, Tensor) else fed
        cosine, sine = self.rotation(positions + len(cache))  # [R, D]
        return self.layers[0](projected, feature, cosine, sine, cache, documents)

    def logits(self, feature: Tensor) -> Tensor:
        """Feature `[..., H]` -> logits over the draft vocabulary `[..., Vd]`."""
        return self.lm_head(self.norm(feature))

    def targets(self, draft_ids: Tensor) -> Tensor:
        """Draft ids -> target ids: `d2t` holds offsets, the target of i is i + d2t[i]."""
        return draft_ids + self.d2t[draft_ids]

    @property
    def draft_ids(self) -> Tensor:
        """Target id of every draft id, int64 `[Vd]`."""
        return torch.arange(self.config.draft_vocab_size, device=self.d2t.device) + self.d2t

    def set_vocabulary(self, draft_ids: Tensor) -> None:
        """Fills `d2t` and `t2d` from the target ids of the draft vocabulary, `[Vd]`, ascending."""
        c = self.config
        ids = draft_ids.to(device=self.d2t.device, dtype=torch.int64)
        fits = ids.shape == (c.draft_vocab_size,) and bool((ids.diff() > 0).all()) and ids[0] >= 0 and ids[-1] < c.vocab_size
        if not fits:
            raise MustFix(
                f"the draft vocabulary is not {c.draft_vocab_size} ascending ids below {c.vocab_size}",
                where="draft ids",
                remedy="build it again with the vocab stage",
            )
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True

    @classmethod
    def from_scratch(cls, config: HeadConfig, verifier: VerifierWeights, draft_ids: Tensor, seed: int) -> "Eagle3Head":
        """A fresh head in fp32: matrices uniform within 1/sqrt(fan-in), the two that write into the
        residual halved, norms 1, output head from the verifier, embedding bit-equal to it.

        draft_ids: target ids of the draft vocabulary `[Vd]`, ascending. MustFix where the shapes of
        verifier and config disagree. The scheme is the one that learned fastest on two verifiers
        (NOTES.md): wider matrices, or the verifier's last norm, cost acceptance on both.
        """
        verifier.check(config.vocab_size, config.hidden_size)
        head = cls(config).to(torch.float32)
        head.set_vocabulary(draft_ids)
        generator = torch.Generator().manual_seed(seed)
        layer = head.layers[0]
        halved = {id(layer.self_attn.o_proj), id(layer.mlp.down_proj)}
        with torch.no_grad():
            for module in head.modules():
                if isinstance(module, nn.Linear) and module is not head.lm_head:
                    bound = module.in_features**-0.5 * (0.5 if id(module) in halved else 1.0)
                    module.weight.uniform_(-bound, bound, generator=generator)
            head.lm_head.weight.copy_(verifier.lm_head[draft_ids])
        head.set_embedding(verifier.embedding)
        return head

    def set_embedding(self, embedding: Tensor) -> None:
        """Takes over the verifier's embedding `[V, H]` in its own dtype, frozen."""
        self.embed_tokens.weight = nn.Parameter(embedding.detach().clone(), requires_grad=False)
