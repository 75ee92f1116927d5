"""A head of the tiny verifier that accepts something and not everything, made in seconds."""

from collections import Counter

import torch

from jobs.draft.attention import Documents
from jobs.draft.model import Eagle3Head, HeadConfig, UnrollCache, VerifierWeights
from jobs.draft.vocabulary import build
from jobs.storage.states import StateStore
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.tiny import CHECKPOINT

K, TRAINED_ROWS = 3, 40


def trained(store: StateStore, verifier: VerifierWeights, norm_before_residual: bool, taps: tuple[int, int, int]) -> Eagle3Head:
    """A head after 60 plain AdamW steps on the true tokens of the first rows, so that acceptance is neither 0 nor 1."""
    facts = VerifierFacts.read(CHECKPOINT)
    counts = Counter(token for i in store.ids() for token in store.response(i).response_token_ids)
    config = HeadConfig(
        facts.vocab_size, 512, facts.hidden_size, 256, facts.heads, facts.heads, facts.hidden_size // facts.heads, facts.rms_norm_eps,
        1e4, None, taps, norm_before_residual,
    )  # fmt: skip
    head = Eagle3Head.from_scratch(config, verifier, build(counts, 512, [], facts.vocab_size).draft_ids, seed=1)
    to_draft = torch.full((facts.vocab_size,), -100).index_copy(0, head.draft_ids, torch.arange(512))
    samples = [store.read(i, taps) for i in store.ids()]
    rows = [min(TRAINED_ROWS, s.taps.shape[0] - K - 1) for s in samples]
    tokens = [torch.tensor([*s.response.prompt_token_ids, *s.response.response_token_ids]) for s in samples]
    packed = torch.cat([s.taps[:r] for s, r in zip(samples, rows, strict=True)])  # [R, 3, H]
    documents, positions = Documents(tuple(rows), sum(rows)), torch.cat([torch.arange(r) for r in rows])
    shifted = lambda by: torch.cat([t[by : by + r] for t, r in zip(tokens, rows, strict=True)])  # noqa: E731
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=4e-3, weight_decay=0.0)
    for _ in range(60):
        feature, cache, loss = head.fuse(packed), UnrollCache(), 0.0
        for step in range(K):
            feature = head.step(shifted(1 + step), feature, positions, cache, documents)
            loss = loss + torch.nn.functional.cross_entropy(head.logits(feature), to_draft[shifted(2 + step)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head
