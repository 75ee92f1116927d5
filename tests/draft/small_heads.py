"""Small heads and verifiers of random weights for the tests of this folder."""

import torch

from jobs.draft.model import Eagle3Head, HeadConfig
from jobs.draft.weights import VerifierWeights

V, H = 97, 32


def small_config(**changes) -> HeadConfig:
    values = dict(
        vocab_size=V,
        draft_vocab_size=40,
        hidden_size=H,
        intermediate_size=48,
        heads=4,
        kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        rope_scaling=None,
        taps=(2, 5, 7),
        norm_before_residual=False,
    )
    return HeadConfig(**{**values, **changes})


def small_verifier(seed: int = 0, dtype: torch.dtype = torch.float32) -> VerifierWeights:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
    return VerifierWeights(draw(V, H), (1 + 0.1 * draw(H)).to(dtype), draw(V, H))


def small_head(seed: int = 0, verifier: VerifierWeights | None = None, **changes) -> Eagle3Head:
    """A head with every tensor random, norms included, so that a tensor in the wrong place shows."""
    config = small_config(**changes)
    generator = torch.Generator().manual_seed(seed + 100)
    ids = torch.randperm(V, generator=generator)[: config.draft_vocab_size].sort().values
    head = Eagle3Head.from_scratch(config, verifier or small_verifier(), ids, seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return head


def random_sequence(tokens: int, seed: int = 0) -> tuple[list[int], torch.Tensor]:
    """n ids and taps [n-1, 3, H]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (tokens,), generator=generator).tolist()
    return ids, torch.randn(tokens - 1, 3, H, generator=generator)
