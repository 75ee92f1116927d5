"""Draft as the engine does, from every row of a stored answer at once: argmax, fed back K-1 times.

Row t knows tokens 0..t+1 and the verifier's taps of positions 0..t. Step 0 takes x[t+1] and the fused
taps of row t, later steps the drafted token and the head's own output; RoPE position t+k; attention
over the step-0 keys up to t and the row's own keys of steps 1..k. That is what vLLM 0.16.0 computes
(`vllm/v1/spec_decode/eagle.py`: the first pass of every step rewrites the draft's cache with the
verifier's own taps, so nothing a rejected chain left behind is ever seen).

Why not `Eagle3Head.step`: it computes all rows of a sample at once and keeps their keys of every
step, which training must and a 200,000-token answer cannot afford. Here the step-0 keys of the whole
sample are kept and everything else lives for one chunk of rows, sized by the bytes of its attention
scores. The weights are the head's own modules; tests/draft/test_replay_drafts_equal_sequential_head.py
holds the two together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jobs.draft.model import Eagle3Head
from jobs.draft.rope import rotate
from jobs.errors import MustFix

# Attention scores of one chunk (fp32, of which three copies live at the peak) and logits fit in this.
CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
LARGEST_CHUNK = 4096  # rows; past this a larger matrix product is not faster


@torch.inference_mode()
def draft_chains(
    head: Eagle3Head, tokens: Sequence[int] | Tensor, taps: Tensor, draft_tokens: int, *, first_row: int = 0, chunk_rows: int | None = None
) -> Tensor:
    """What the head drafts from rows `first_row` .. n-2.

    Args:
        head: on the device and in the type it is to be judged in.
        tokens: prompt and response, n target ids.
        taps: [n-1, 3, H] in the order of `head.config.taps`; any float type and device.
        draft_tokens: K.
        first_row: len(prompt) - 1 for the live process; 0 drafts from every row.
        chunk_rows: rows of one chunk; None sizes it by memory. The result does not depend on it.

    Returns:
        int64 [n - 1 - first_row, K] target ids, on the head's device.

    Raises:
        MustFix: taps that do not fit the tokens or the head.
    """
    config, weight = head.config, head.fc.weight
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=weight.device)  # [n]
    rows = ids.numel() - 1
    if tuple(taps.shape) != (rows, 3, config.hidden_size):
        raise MustFix(
            f"Taps of shape {tuple(taps.shape)} do not fit {rows} rows of a head of width {config.hidden_size}",
            where="draft_chains",
            remedy="give the three taps that the head reads, one row a token",
        )
    taps = taps.to(weight.device)  # [n-1, 3, H]
    chunk = chunk_rows or _chunk_rows(head, rows)
    keys, values = _first_keys(head, ids, taps, chunk)  # [g, n-1, D] twice
    chains = [
        _draft_chunk(head, ids, taps, keys, values, range(begin, min(begin + chunk, rows)), draft_tokens)
        for begin in range(first_row, rows, chunk)
    ]
    return torch.cat(chains) if chains else ids.new_empty((0, draft_tokens))  # [rows, K]


def _chunk_rows(head: Eagle3Head, rows: int) -> int:
    """Rows whose scores over all keys (three copies) and whose logits stay within the device's bytes."""
    config = head.config
    of_a_row = 4 * max(3 * config.heads * (rows + 1), 2 * config.draft_vocab_size, 4 * config.intermediate_size)
    return max(1, min(LARGEST_CHUNK, CHUNK_BYTES.get(head.fc.weight.device.type, CHUNK_BYTES["cpu"]) // of_a_row))


def _first_keys(head: Eagle3Head, ids: Tensor, taps: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Keys and values of step 0 for every row: [g, n-1, D] each."""
    config, attention = head.config, head.layers[0].self_attn
    rows = ids.numel() - 1
    shape = (config.kv_heads, rows, config.head_dim)
    keys, values = (torch.empty(shape, dtype=head.fc.weight.dtype, device=ids.device) for _ in range(2))
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        both, _ = _attention_input(head, ids[begin + 1 : end + 1], head.fuse(taps[begin:end]))  # [c, 2H]
        positions = torch.arange(begin, end, device=ids.device)  # [c]
        keys[:, begin:end] = _rotated(head, attention.k_proj(both), config.kv_heads, positions)
        values[:, begin:end] = _split(attention.v_proj(both), config.kv_heads)
    return keys, values


def _draft_chunk(head: Eagle3Head, ids: Tensor, taps: Tensor, keys: Tensor, values: Tensor, rows: range, draft_tokens: int) -> Tensor:
    """K drafts of each row of the chunk: [c, K] target ids."""
    config, layer = head.config, head.layers[0]
    attention = layer.self_attn
    at = torch.arange(rows.start, rows.stop, device=ids.device)  # [c]
    tokens, feature = ids[at + 1], head.fuse(taps[rows.start : rows.stop])  # [c], [c, H]
    own: list[tuple[Tensor, Tensor]] = []  # of steps 1..k: [g, c, D] twice
    drafted = []
    for step in range(draft_tokens):
        both, residual = _attention_input(head, tokens, feature)  # [c, 2H], [c, H]
        query = _rotated(head, attention.q_proj(both), config.heads, at + step)  # [h, c, D]
        if step:
            own.append(
                (_rotated(head, attention.k_proj(both), config.kv_heads, at + step), _split(attention.v_proj(both), config.kv_heads))
            )
        mixed = _attend(query, keys[:, : rows.stop], values[:, : rows.stop], own, at)  # [c, h * D]
        hidden = residual + attention.o_proj(mixed)  # [c, H]
        feature = hidden + layer.mlp(layer.post_attention_layernorm(hidden))  # [c, H]
        tokens = head.targets(head.logits(feature).argmax(-1))  # [c] target ids
        drafted.append(tokens)
    return torch.stack(drafted, dim=1)  # [c, K]


def _attention_input(head: Eagle3Head, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
    """Normed embedding and feature side by side [c, 2H], and the layer's residual [c, H]."""
    layer = head.layers[0]
    normed = layer.hidden_norm(feature)  # [c, H]
    embedded = head.embed_tokens(tokens).to(feature.dtype)  # [c, H]
    both = torch.cat((layer.input_layernorm(embedded), normed), -1)  # [c, 2H]
    return both, normed if layer.norm_before_residual else feature


def _split(x: Tensor, heads: int) -> Tensor:
    """[c, heads * D] -> [heads, c, D]."""
    return x.view(x.shape[0], heads, -1).transpose(0, 1)


def _rotated(head: Eagle3Head, x: Tensor, heads: int, positions: Tensor) -> Tensor:
    """[c, heads * D] at positions [c] -> [heads, c, D]; the rotation in fp32, as in training."""
    return rotate(_split(x, heads).float(), *head.rotation(positions)).to(x.dtype)


def _attend(query: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]], at: Tensor) -> Tensor:
    """Each row over the step-0 keys up to itself and its own later ones.

    Args:
        query: [h, c, D]. keys, values: [g, s, D] of rows 0..s-1. own: [g, c, D] of steps 1..k. at: rows [c].

    Returns:
        [c, h * D]
    """
    heads, chunk, width = query.shape
    groups, seen = keys.shape[:2]
    query = query.view(groups, heads // groups, chunk, width) * width**-0.5  # [g, h/g, c, D]
    first = (query.flatten(1, 2) @ keys.transpose(1, 2)).float().view(groups, -1, chunk, seen)  # [g, h/g, c, s]
    later = torch.arange(seen, device=at.device) > at[:, None]  # [c, s]
    first = first.masked_fill(later, float("-inf"))
    mine = [(query * key.unsqueeze(1)).sum(-1, keepdim=True, dtype=torch.float32) for key, _ in own]  # k x [g, h/g, c, 1]
    weights = torch.cat((first, *mine), -1).softmax(-1).to(values.dtype)  # [g, h/g, c, s + k]
    mixed = (weights[..., :seen].flatten(1, 2) @ values).view(groups, -1, chunk, width)  # [g, h/g, c, D]
    for step, (_, value) in enumerate(own):
        mixed = mixed + weights[..., seen + step, None] * value.unsqueeze(1)
    return mixed.reshape(heads, chunk, width).transpose(0, 1).flatten(1)
