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
from the verifier's final state with its frozen head at every step and are stored nowhere. Over
`CHUNK_BYTES` of logits the rows go through in chunks that are recomputed in the backward pass: the
fp32 log-probabilities of 4,096 rows x 32,000 draft ids would be half a gigabyte three times over.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jobs.draft.attention import Documents
from jobs.draft.data import PackedRow
from jobs.draft.model import Eagle3Head, UnrollCache

CHUNK_BYTES = 256 << 20


class Targets(NamedTuple):
    """What the verifier says at some rows of a packed row."""

    logits: Tensor | None  # [M, Vd] over the draft vocabulary; None for the cross-entropy loss
    place: Tensor  # [R] int64: which of the M a row is
    covered: Tensor  # [R] bool: the row may be a target at all


class Unrolled(NamedTuple):
    """Sums over the loss positions of each TTT step, `[K]` each; `loss` carries the gradient."""

    loss: Tensor  # fp32
    count: Tensor  # fp32, whole numbers
    correct: Tensor  # fp32: the draft's argmax is the target's
    chain: Tensor  # fp32: so are those of all earlier steps at this row


class TargetHead(nn.Module):
    """The verifier's frozen output head, whole (for the argmax) and sliced to the draft vocabulary.

    lm_head: `[V, H]`; draft_ids: `[Vd]` target ids, ascending. Its tensors are buffers that no
    checkpoint contains.
    """

    def __init__(self, lm_head: Tensor, draft_ids: Tensor, dtype: torch.dtype):
        super().__init__()
        lm_head = lm_head.to(dtype)
        self.whole_vocabulary = len(draft_ids) == lm_head.shape[0]
        self.register_buffer("draft_ids", draft_ids.clone(), persistent=False)
        self.register_buffer("sliced", lm_head[draft_ids].contiguous(), persistent=False)  # [Vd, H]
        if not self.whole_vocabulary:
            self.register_buffer("whole", lm_head, persistent=False)  # [V, H]

    @torch.no_grad()
    def forward(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """final `[M, H]`, after the verifier's last norm -> logits `[M, Vd]`, argmax drafted `[M]` bool."""
        final = final.to(self.sliced.dtype)
        logits = final @ self.sliced.T  # [M, Vd]
        if self.whole_vocabulary:
            return logits, torch.ones(len(final), dtype=torch.bool, device=final.device)
        # Compared as ids within ONE product of the whole head: two products could round a tie apart.
        best = [(part @ self.whole.T).argmax(-1) for part in final.split(_chunk_rows(len(self.whole)))]
        return logits, torch.isin(torch.cat(best) if best else final.new_zeros(0).long(), self.draft_ids)


def _chunk_rows(vocabulary: int) -> int:
    return max(128, CHUNK_BYTES // (4 * vocabulary))


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
    """Head and targets as one module: what `DistributedDataParallel` and `torch.compile` wrap.

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
        targets = self._targets(row)
        feature = self.head.fuse(row.taps)  # [R, H]
        cache = UnrollCache()
        chain = torch.ones(len(row.tokens), dtype=torch.bool, device=row.tokens.device)  # [R]
        sums = []
        for k in range(steps):
            # x[t+1+k]; what rolls in from the next document lands in rows that are masked below.
            tokens = row.tokens.roll(-k)  # [R]
            feature = self.head.step(tokens, feature, row.positions, cache, documents)  # [R, H]
            target = torch.arange(len(tokens), device=tokens.device).add(1 + k).clamp(max=len(tokens) - 1)  # [R]
            mask = (row.remaining > k + 1) & row.predicted[target] & targets.covered[target]  # [R]
            sums.append(self._step_sums(feature, target, mask, chain, row.tokens, targets))
        return Unrolled(*(torch.stack(column) for column in zip(*sums, strict=True)))

    def _targets(self, row: PackedRow) -> Targets:
        rows = len(row.tokens)
        if self.loss == "cross_entropy":
            return Targets(None, torch.arange(rows, device=row.tokens.device), self.head.t2d[row.tokens])
        if self.every_row:
            logits, covered = self.target_head(row.final)
            return Targets(logits, torch.arange(rows, device=row.tokens.device), covered)
        needed = row.predicted.nonzero().squeeze(-1)  # [M]
        logits, drafted = self.target_head(row.final[needed])
        place = torch.zeros(rows, dtype=torch.int64, device=needed.device)
        place[needed] = torch.arange(len(needed), device=needed.device)
        covered = torch.zeros(rows, dtype=torch.bool, device=needed.device)
        covered[needed] = drafted
        return Targets(logits, place, covered)

    def _step_sums(self, feature: Tensor, target: Tensor, mask: Tensor, chain: Tensor, tokens: Tensor, targets: Targets):
        """One TTT step: loss, count, correct, chain, as scalars; `chain` `[R]` is updated in place."""
        rows = torch.arange(len(mask), device=mask.device) if self.every_row else mask.nonzero().squeeze(-1)  # [M]
        size = _chunk_rows(self.head.config.draft_vocab_size)
        losses, right = [], []
        for part in rows.split(size) if len(rows) else [rows]:
            arguments = (feature[part], *self._wanted(target[part], tokens, targets))
            if len(rows) > size:
                loss, correct = checkpoint(self._rows_loss, *arguments, use_reentrant=False)
            else:
                loss, correct = self._rows_loss(*arguments)
            # where, not a product: a masked row may be infinite, and 0 x inf is NaN.
            losses.append(loss.where(mask[part], 0.0).sum())
            right.append(correct & mask[part])
        correct = torch.zeros_like(mask)  # [R]
        correct[rows] = torch.cat(right)
        chain &= correct
        return torch.stack(losses).sum(), mask.sum().float(), correct.sum().float(), chain.sum().float()

    def _wanted(self, target: Tensor, tokens: Tensor, targets: Targets) -> tuple[Tensor | None, Tensor | None]:
        """Target logits `[M, Vd]`, or draft ids of the sampled tokens `[M]` for the cross-entropy loss."""
        if targets.logits is not None:
            return targets.logits[targets.place[target]], None
        # An undraftable token finds a neighbour's id here; its row is masked.
        found = torch.searchsorted(self.target_head.draft_ids, tokens[target])
        return None, found.clamp(max=self.head.config.draft_vocab_size - 1)

    def _rows_loss(self, feature: Tensor, target_logits: Tensor | None, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Loss fp32 `[M]` and whether the argmax is right, bool `[M]`."""
        logits = self.head.logits(feature)  # [M, Vd]
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.float(), labels, reduction="none")  # [M]
            return loss, logits.argmax(-1) == labels
        loss = ForwardKL.apply(logits, target_logits)  # [M]
        return loss, logits.argmax(-1) == target_logits.argmax(-1)
