"""Attention of a packed row of documents, and of the training-time-test steps on top of it.

EAGLE-3's unroll (paper section 3.2, "training-time test") never makes long keys: at step k row t
sees the step-0 keys up to t of its own document and, of every later step 1..k, only ITS OWN key.
So one masked attention over the R step-0 keys is computed, together with its log-sum-exp, and the
k own keys are folded in row by row. That is exact, and it keeps the mask of all steps one and the
same static `[R, R]` mask, where concatenated keys (speculators) need a longer one every step.

Two ways to the masked attention, with one result:
* `plain`: document by document (step 0 through PyTorch's fused function, later steps in blocks of
  queries); on CPU and in eager mode. Nothing of size R x R exists, and a document's numbers cannot
  depend on its neighbours', not even in rounding.
* `flex`: `flex_attention` with a block mask, for the compiled step on CUDA. Static shapes; the mask
  is made outside the compiled region, once per packed row.
"""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor, nn

BLOCK = 128  # rows of a block of flex attention's mask
QUERY_BLOCK = 256  # rows of one block of the plain form: 256 x 8192 x 64 heads fp32 is 0.5 GB


class Documents:
    """Where the documents of a packed row lie: `lengths` in order, the rest of `rows` is padding.

    Padding is treated as one more document, so that no row ever has an empty set of keys (a softmax
    over nothing is NaN, and NaN times a zero mask is NaN). `spans` are the half-open ranges of rows;
    `block_mask` is the same for `flex_attention`, made only with flex=True. Everything is made here:
    the compiled step must find ready attributes, it cannot trace how they come about.

    context: how many first rows of each document nothing is asked of, in the plain form: most of a prompt.
    They give keys and values at step 0 and are not computed further; `queries` `[M]` are the others, and
    padding is not among them. None: every row is asked of.
    """

    def __init__(self, lengths: Sequence[int], rows: int, flex: bool = False, context: Sequence[int] | None = None):
        padding = rows - sum(lengths)
        if padding < 0:
            raise ValueError(f"documents of {sum(lengths)} rows do not fit into {rows}")
        self.rows, self.flex = rows, flex
        self.spans: list[tuple[int, int]] = []
        self.asked: list[int] = []  # queries of each span, its last rows
        start = 0
        for length, skipped in zip((*lengths, padding), (*(context or (0,) * len(lengths)), padding if context else 0), strict=True):
            if length:
                self.spans.append((start, start + length))
                self.asked.append(length - skipped)
            start += length
        of_spans = [torch.arange(end - asked, end) for (_, end), asked in zip(self.spans, self.asked, strict=True)]
        self.queries = torch.cat(of_spans) if context else None  # [M]
        self._blocks = (self.ids(), *_block_lists(self.spans, rows)) if flex else ()
        self.block_mask = self._block_mask()

    @classmethod
    def one(cls, rows: int, flex: bool = False) -> "Documents":
        """All rows belong to one document."""
        return cls((rows,), rows, flex)

    def ids(self) -> Tensor:
        """Document of each row, int32 `[R]`, on the CPU."""
        lengths = torch.tensor([end - start for start, end in self.spans])
        return torch.arange(len(self.spans), dtype=torch.int32).repeat_interleave(lengths)  # [R]

    def pinned(self) -> "Documents":
        return self._with(tuple(x.pin_memory() for x in self._blocks))

    def to(self, device: torch.device) -> "Documents":
        """The same with block mask and queries on a device; copies from pinned memory do not wait."""
        moved = self._with(tuple(x.to(device, non_blocking=True) for x in self._blocks))
        moved.queries = None if self.queries is None else self.queries.to(device, non_blocking=True)
        return moved

    def of_queries(self, x: Tensor) -> Tensor:
        """The rows that something is asked of: `[R, ...]` -> `[M, ...]`."""
        return x if self.queries is None else x[self.queries]

    def _with(self, blocks: tuple[Tensor, ...]) -> "Documents":
        other = copy(self)
        other._blocks = blocks
        other.block_mask = other._block_mask()
        return other

    def _block_mask(self):
        from torch.nn.attention.flex_attention import BlockMask

        if not self.flex:
            return None
        ids, *lists = self._blocks

        def causal_within_document(_batch, _head, query, key):
            return (query >= key) & (ids[query] == ids[key])

        return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, mask_mod=causal_within_document, seq_lengths=(self.rows, self.rows))


def _block_lists(spans: Sequence[tuple[int, int]], rows: int) -> tuple[Tensor, ...]:
    """Of every block of queries, which blocks of keys it sees in part, and which whole.

    Made from the documents' ends, a block at a time: `create_block_mask` would make the mask of all
    R x R pairs on the GPU, for every packed row.
    """
    first, last = _ends_of_blocks(spans, rows)
    earlier = torch.ones(len(first), len(first), dtype=torch.bool).tril(-1)  # [q, k]: block k lies before q
    # Documents follow each other: two blocks share one if the later begins before the earlier's last ends.
    whole = earlier & (first[None, :] == last[:, None])  # [q, k]: one and the same document in both
    if rows % BLOCK:
        whole[-1] = False  # the last block of queries is no whole one
    partly = (earlier & (last[None, :] >= first[:, None]) & ~whole) | torch.eye(len(first), dtype=torch.bool)
    return (*_ordered(partly), *_ordered(whole))


def _ends_of_blocks(spans: Sequence[tuple[int, int]], rows: int) -> tuple[Tensor, Tensor]:
    """Number of the document of each block's first and last row, `[rows / BLOCK]` each."""
    ends = torch.tensor([end for _, end in spans])
    first = torch.arange(0, rows, BLOCK)
    last = (first + BLOCK - 1).clamp(max=rows - 1)
    return torch.searchsorted(ends, first, right=True), torch.searchsorted(ends, last, right=True)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool `[q, k]` -> how many of each row are true `[1, 1, q]`, and their numbers first `[1, 1, q, k]`."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None].contiguous()


def _by_document(query: Tensor, key: Tensor, value: Tensor, documents: Documents):
    """The documents' own parts of `[h, M, D]` and `[h, R, D]`; one split, whose gradient is one concatenation."""
    lengths = [end - start for start, end in documents.spans]
    return zip(query.split(documents.asked, dim=1), key.split(lengths, dim=1), value.split(lengths, dim=1), strict=True)


def _plain(query: Tensor, key: Tensor, value: Tensor, documents: Documents) -> Tensor:
    """Causal attention in each span, of its last rows: `[h, M, D]`, `[h, R, D]` twice -> `[h, M, D]`."""
    attended = []
    for q, k, v in _by_document(query, key, value, documents):
        asked, seen = q.shape[1], k.shape[1]
        # PyTorch's own causal mask is that of the first rows.
        mask = None if asked == seen else torch.ones(asked, seen, dtype=torch.bool, device=q.device).tril(seen - asked)  # [m, r]
        attended.append(
            nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None)[0]
        )  # [h, m, D]
    return torch.cat(attended, 1)


def _plain_with_sums(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float):
    """The same with its log-sum-exp, fp32 `[h, M]`, which PyTorch's own function gives no gradient for."""
    outputs, sums = [], []
    for q, k, v in _by_document(query, key, value, documents):
        asked = q.shape[1]
        before = k.shape[1] - asked
        for begin in range(0, asked, QUERY_BLOCK):
            stop = min(begin + QUERY_BLOCK, asked)
            seen = before + stop
            scores = (q[:, begin:stop] @ k[:, :seen].transpose(1, 2)).float() * scale  # [h, b, s]
            later = torch.ones(stop - begin, seen, dtype=torch.bool, device=query.device).triu(before + begin + 1)
            scores = scores.masked_fill(later, float("-inf"))
            total = scores.logsumexp(-1)  # [h, b]
            weights = (scores - total.unsqueeze(-1)).exp()  # [h, b, s]
            outputs.append(weights.to(v.dtype) @ v[:, :seen])  # [h, b, D]
            sums.append(total)
    return torch.cat(outputs, 1), torch.cat(sums, 1)


def _flex(query: Tensor, key: Tensor, value: Tensor, block_mask, scale: float):
    """The same through `flex_attention`, which differentiates through its log-sum-exp as well."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    query, key, value = (x.unsqueeze(0).contiguous() for x in (query, key, value))  # [1, h, R, D]
    wanted = AuxRequest(lse=True)
    output, extra = flex_attention(query, key, value, block_mask=block_mask, scale=scale, return_aux=wanted)
    return output.squeeze(0), extra.lse.squeeze(0)


def attend(
    query: Tensor,
    first_key: Tensor,
    first_value: Tensor,
    own: Sequence[tuple[Tensor, Tensor]],
    documents: Documents,
) -> Tensor:
    """Attention of one training-time-test step.

    query: `[h, M, D]`, of the rows that something is asked of (M = R where `documents` has no context).
    first_key, first_value: `[h, R, D]`, keys and values of step 0.
    own: keys and values `[h, M, D]` of the steps 1..k, of which row t sees only row t.
    Returns `[h, M, D]`.
    """
    scale = query.shape[-1] ** -0.5
    if documents.flex:
        output, sums = _flex(query, first_key, first_value, documents.block_mask, scale)
    elif own:
        output, sums = _plain_with_sums(query, first_key, first_value, documents, scale)
    else:
        output = _plain(query, first_key, first_value, documents)
    if not own:
        return output
    scores = [sums] + [(query * key).sum(-1, dtype=torch.float32) * scale for key, _ in own]  # k+1 times [h, M]
    weights = torch.stack(scores, -1).softmax(-1).to(output.dtype)  # [h, M, k+1]
    mixed = output * weights[..., :1]  # [h, M, D]
    for number, (_, value) in enumerate(own, start=1):
        mixed = mixed + value * weights[..., number : number + 1]
    return mixed
