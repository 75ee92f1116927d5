"""The training-time-test loss of one packed row.

Row t of step k drafts token x[t+2+k]; its target is the verifier's row t+1+k (EAGLE-3, arXiv
2503.01840, section 3; written out without packing in `tests/draft/test_loss_equals_plain_float64.py`).
In a packed row both are a shift by k+1, so one target distribution per row serves all steps. A row
carries loss at step k when

* row t+1+k is of the same document: the last k+1 rows of every document are masked;
* the drafted token is one of the response, not of the prompt;
* the verifier's argmax there lies inside the draft vocabulary, as in the EAGLE reference (a head
  cannot be taught a token it cannot say).

The total is a weighted mean over all loss positions of all packed rows of the optimizer step, on
every rank: sum_k decay^k sum_t loss(k, t) / sum_k decay^k count(k). This function therefore returns
SUMS; the trainer divides once, after the gradients are summed, so the result does not depend on how
the rows were spread over ranks.

Precision: softmax, KL and sums in fp32; the matmuls in what autocast says. Target distributions come
from the verifier's final state with its frozen head, once a packed row for all its steps, and are
stored nowhere. Whether the verifier's argmax can be drafted is a fact of the data, not of training:
`jobs.draft.coverage` finds it out once, since the product with all 163,840 rows costs an eighth of a step.

Memory: eager operations keep several fp32 copies of their logits, so over `EAGER_BYTES` rows go
through in chunks that are computed again in the backward pass. The compiled step fuses them away and
keeps one tensor a step, the gradient of the logits in the matmuls' type (0.5 GB at 8,192 rows x 32,000
draft ids); it chunks only over `COMPILED_BYTES`, because computing again costs 7 % of the arithmetic.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jobs.draft.attention import Documents
from jobs.draft.data import PackedRow
from jobs.draft.model import Eagle3Head, UnrollCache

EAGER_BYTES = 256 << 20  # of fp32 logits
COMPILED_BYTES = 4 << 30  # of fp32 logits that never exist: 33,554 rows at 32,000 draft ids


class Targets(NamedTuple):
    """What the verifier says at some rows of a packed row."""

    logits: Tensor | None  # [M, Vd] over the draft vocabulary; None for the cross-entropy loss
    best: Tensor | None  # [M] int64: their argmax
    place: Tensor  # [R] int64: which of the M a row is
    covered: Tensor  # [R] bool: the row may be a target at all


class Unrolled(NamedTuple):
    """Sums over the loss positions of each TTT step, `[K]` each; `loss` carries the gradient."""

    loss: Tensor  # fp32
    count: Tensor  # fp32, whole numbers
    correct: Tensor  # fp32: the draft's argmax is the target's
    chain: Tensor  # fp32: so are those of all earlier steps at this row


class TargetHead(nn.Module):
    """The verifier's frozen output head: its rows of the draft vocabulary, and the others for the argmax.

    lm_head: `[V, H]`; draft_ids: `[Vd]` target ids, ascending. Its tensors are buffers that no
    checkpoint contains. `others` is needed only to find out what can be drafted: `forget_others`.
    """

    def __init__(self, lm_head: Tensor, draft_ids: Tensor, dtype: torch.dtype):
        super().__init__()
        lm_head = lm_head.to(dtype)
        rest = torch.ones(len(lm_head), dtype=torch.bool)
        rest[draft_ids] = False
        self.register_buffer("draft_ids", draft_ids.clone(), persistent=False)
        self.register_buffer("sliced", lm_head[draft_ids].contiguous(), persistent=False)  # [Vd, H]
        self.register_buffer("others", lm_head[rest] if rest.any() else None, persistent=False)  # [V - Vd, H]

    def forward(self, final: Tensor) -> Tensor:
        """final `[M, H]`, after the verifier's last norm -> logits over the draft vocabulary `[M, Vd]`."""
        return final.to(self.sliced.dtype) @ self.sliced.T

    @torch.no_grad()
    def drafted(self, final: Tensor) -> Tensor:
        """final `[M, H]` -> whether the argmax over the whole vocabulary can be drafted, bool `[M]`.

        A tie counts as yes: the types of logits round near ones together. The rows go through in blocks
        of one size, so that what is found about a row does not depend on the rows it came with.
        """
        if self.others is None:
            return torch.ones(len(final), dtype=torch.bool, device=final.device)
        found = []
        for part in final.to(self.sliced.dtype).split(BLOCK_ROWS):
            whole = nn.functional.pad(part, (0, 0, 0, BLOCK_ROWS - len(part)))  # [B, H]
            inside, outside = ((whole @ rows.T).amax(-1)[: len(part)] for rows in (self.sliced, self.others))
            found.append(inside >= outside)
        return torch.cat(found) if found else final.new_zeros(0, dtype=torch.bool)


BLOCK_ROWS = 256  # their logits over 163,840 ids are 84 MB in bf16


def _chunk_rows(vocabulary: int, compiled: bool = False) -> int:
    return max(128, (COMPILED_BYTES if compiled else EAGER_BYTES) // (4 * vocabulary))


class ForwardKL(torch.autograd.Function):
    """KL(verifier || draft) of rows, fp32: logits of both `[M, Vd]` -> `[M]`.

    Written out because its gradient is one tensor, softmax(draft) - softmax(verifier), known in the
    forward pass: autograd's chain of log_softmax, exp and products keeps three more of that size and
    walks over them again. No gradient goes to the verifier's side.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target_logits: Tensor) -> Tensor:
        log_draft = logits.float().log_softmax(-1)  # [M, Vd]
        log_target = target_logits.float().log_softmax(-1)  # [M, Vd]
        target = log_target.exp()  # [M, Vd]
        loss = ((log_target - log_draft) * target).sum(-1)  # [M]
        ctx.save_for_backward((log_draft.exp_() - target).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * gradient.unsqueeze(-1).to(difference.dtype), None


class Unroll(nn.Module):
    """Head and targets as one module: what `torch.compile` wraps.

    every_row: compute masked rows too (static shapes, for the compiled step); else only the rows
    that carry loss go through the output heads.
    """

    def __init__(self, head: Eagle3Head, target_head: TargetHead, loss: str, every_row: bool = False):
        super().__init__()
        self.head = head
        self.target_head = target_head
        self.loss = loss
        self.every_row = every_row

    def forward(self, row: PackedRow, documents: Documents, steps: int) -> Unrolled:
        """Sums of the TTT steps 0..steps-1 over one packed row; gradients of `loss` flow into the head."""
        taps, final = row.states()  # [R, 3, H], [R, H]
        targets = self._targets(row, final)
        feature = self.head.fuse(taps)  # [R, H]
        projected = self.head.project(row.tokens, feature.dtype)  # [R, h * D] three times
        cache = UnrollCache()
        asked = documents.of_queries  # M of the R rows; all of them in the compiled step
        rows = asked(torch.arange(len(row.tokens), device=row.tokens.device))  # [M]
        positions, remaining = row.positions, asked(row.remaining)
        chain = torch.ones_like(rows, dtype=torch.bool)  # [M]
        sums = []
        for k in range(steps):
            # x[t+1+k]; what rolls in from the next document lands in rows that are masked below.
            fed = tuple(asked(part.roll(-k, 0)) for part in projected) if k else projected
            feature = self.head.step(fed, feature, positions, cache, documents)  # [M, H]
            positions = asked(row.positions)  # step 0 has seen the others
            target = rows.add(1 + k).clamp(max=len(row.tokens) - 1)  # [M]
            mask = (remaining > k + 1) & row.predicted[target] & targets.covered[target]  # [M]
            sums.append(self._step_sums(feature, target, mask, chain, row.tokens, targets))
        return Unrolled(*(torch.stack(column) for column in zip(*sums, strict=True)))

    @torch.no_grad()
    def _targets(self, row: PackedRow, final: Tensor) -> Targets:
        rows = len(row.tokens)
        every = torch.arange(rows, device=row.tokens.device)
        if self.loss == "cross_entropy":
            return Targets(None, None, every, self.head.t2d[row.tokens])
        if self.every_row:
            logits = self.target_head(final)
            covered = self.target_head.drafted(final) if row.covered is None else row.covered
            return Targets(logits, logits.argmax(-1), every, covered)
        needed = row.predicted.nonzero().squeeze(-1)  # [M]
        final = final[needed]
        logits = self.target_head(final)
        place, covered = torch.zeros_like(every), torch.zeros_like(row.predicted)
        place[needed] = torch.arange(len(needed), device=needed.device)
        covered[needed] = self.target_head.drafted(final) if row.covered is None else row.covered[needed]
        return Targets(logits, logits.argmax(-1), place, covered)

    def _step_sums(self, feature: Tensor, target: Tensor, mask: Tensor, chain: Tensor, tokens: Tensor, targets: Targets):
        """One TTT step: loss, count, correct, chain, as scalars; `chain` `[R]` is updated in place."""
        size = _chunk_rows(self.head.config.draft_vocab_size, self.every_row)
        if self.every_row:
            parts = [slice(begin, begin + size) for begin in range(0, len(mask), size)]
        else:
            parts = mask.nonzero().squeeze(-1).split(size)  # [M] in all
        losses = []
        correct = torch.zeros_like(mask)  # [R]
        for part in parts:
            arguments = (feature[part], *self._wanted(target[part], tokens, targets))
            if len(parts) > 1:
                loss, right = checkpoint(self._rows_loss, *arguments, use_reentrant=False)
            else:
                loss, right = self._rows_loss(*arguments)
            # where, not a product: a masked row may be infinite, and 0 x inf is NaN.
            losses.append(loss.where(mask[part], 0.0).sum())
            correct[part] = right & mask[part]
        chain &= correct
        return torch.stack(losses).sum(), mask.sum().float(), correct.sum().float(), chain.sum().float()

    def _wanted(self, target: Tensor, tokens: Tensor, targets: Targets) -> tuple[Tensor | None, Tensor]:
        """Target logits `[M, Vd]` (None for the cross-entropy loss) and the wanted draft ids `[M]`."""
        if targets.logits is not None:
            place = targets.place[target]
            return targets.logits[place], targets.best[place]
        # An undraftable token finds a neighbour's id here; its row is masked.
        found = torch.searchsorted(self.target_head.draft_ids, tokens[target])
        return None, found.clamp(max=self.head.config.draft_vocab_size - 1)

    def _rows_loss(self, feature: Tensor, target_logits: Tensor | None, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Loss fp32 `[M]` and whether the argmax is right, bool `[M]`."""
        logits = self.head.logits(feature)  # [M, Vd]
        if target_logits is None:
            loss = nn.functional.cross_entropy(logits.float(), wanted, reduction="none")  # [M]
        else:
            loss = ForwardKL.apply(logits, target_logits)  # [M]
        return loss, logits.argmax(-1) == wanted


def compiled(unroll: Unroll) -> Callable[..., Unrolled]:
    """The unroll as one graph of static shapes: a step that would leave the compiled path is an error, not a slow step."""
    import torch._functorch.config as partitioner

    # The backward pass makes norms, gates and bf16 weights again instead of keeping them: 7.0 instead of 11 GB
    # kept for it at 8,192 tokens (real head, 3 TTT steps), some passes over memory more.
    partitioner.ban_recompute_materialized_backward = False
    return torch.compile(unroll, fullgraph=True, dynamic=False)


def step_weights(decay: float, steps: int, device: torch.device) -> Tensor:
    """Weights of the TTT steps, fp32 `[K]`, filled on the device: a copy from the host would wait for it."""
    return torch.full((steps,), decay, device=device) ** torch.arange(steps, dtype=torch.float32, device=device)
