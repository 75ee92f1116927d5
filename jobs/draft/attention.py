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
    """

    def __init__(self, lengths: Sequence[int], rows: int, flex: bool = False):
        padding = rows - sum(lengths)
        if padding < 0:
            raise ValueError(f"documents of {sum(lengths)} rows do not fit into {rows}")
        self.rows, self.flex = rows, flex
        self.spans: list[tuple[int, int]] = []
        start = 0
        for length in (*lengths, padding):
            if length:
                self.spans.append((start, start + length))
            start += length
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
        """The same with the block mask on a device; copies from pinned memory do not wait."""
        return self._with(tuple(x.to(device, non_blocking=True) for x in self._blocks)) if self.flex else self

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


def _by_document(query: Tensor, key: Tensor, value: Tensor, spans: Sequence[tuple[int, int]]):
    """The documents' own parts of `[h, R, D]`; one split, whose gradient is one concatenation."""
    lengths = [end - start for start, end in spans]
    return zip(*(x.split(lengths, dim=1) for x in (query, key, value)), strict=True)


def _plain(query: Tensor, key: Tensor, value: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Causal attention in each span: `[h, R, D]` three times -> `[h, R, D]`."""
    attended = [
        nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]  # [h, r, D]
        for q, k, v in _by_document(query, key, value, spans)
    ]
    return torch.cat(attended, 1)


def _plain_with_sums(query: Tensor, key: Tensor, value: Tensor, spans: Sequence[tuple[int, int]], scale: float):
    """The same with its log-sum-exp, fp32 `[h, R]`, which PyTorch's own function gives no gradient for."""
    outputs, sums = [], []
    for q, k, v in _by_document(query, key, value, spans):
        rows = q.shape[1]
        for begin in range(0, rows, QUERY_BLOCK):
            stop = min(begin + QUERY_BLOCK, rows)
            scores = (q[:, begin:stop] @ k[:, :stop].transpose(1, 2)).float() * scale  # [h, b, s]
            later = torch.ones(stop - begin, stop, dtype=torch.bool, device=query.device).triu(begin + 1)
            scores = scores.masked_fill(later, float("-inf"))
            total = scores.logsumexp(-1)  # [h, b]
            weights = (scores - total.unsqueeze(-1)).exp()  # [h, b, s]
            outputs.append(weights.to(v.dtype) @ v[:, :stop])  # [h, b, D]
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

    query, first_key, first_value: `[h, R, D]`, keys and values of step 0.
    own: keys and values `[h, R, D]` of the steps 1..k, of which row t sees only row t.
    Returns `[h, R, D]`.
    """
    scale = query.shape[-1] ** -0.5
    if documents.flex:
        output, sums = _flex(query, first_key, first_value, documents.block_mask, scale)
    elif own:
        output, sums = _plain_with_sums(query, first_key, first_value, documents.spans, scale)
    else:
        output = _plain(query, first_key, first_value, documents.spans)
    if not own:
        return output
    scores = [sums] + [(query * key).sum(-1, dtype=torch.float32) * scale for key, _ in own]  # k+1 times [h, R]
    weights = torch.stack(scores, -1).softmax(-1).to(output.dtype)  # [h, R, k+1]
    mixed = output * weights[..., :1]  # [h, R, D]
    for number, (_, value) in enumerate(own, start=1):
        mixed = mixed + value * weights[..., number : number + 1]
    return mixed
