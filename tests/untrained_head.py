"""A head of the tiny verifier as it is published, of random weights: for what does not ask how good it is."""

from pathlib import Path

import torch

from jobs.draft.formats import save_llama_eagle3
from jobs.draft.model import Eagle3Head, HeadConfig
from jobs.draft.weights import VerifierWeights
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.tiny import CHECKPOINT

DRAFTED = 256  # of the verifier's ids


def saved(folder: Path, seed: int = 0) -> Path:
    facts = VerifierFacts.read(CHECKPOINT)
    config = HeadConfig(
        facts.vocab_size, DRAFTED, facts.hidden_size, 128, facts.heads, facts.heads, facts.hidden_size // facts.heads,
        facts.rms_norm_eps, 1e4, None, (2, 5, 7), False,
    )  # fmt: skip
    head = Eagle3Head.from_scratch(config, VerifierWeights.read(CHECKPOINT), torch.arange(DRAFTED), seed)
    save_llama_eagle3(head, folder, dtype=torch.float32)
    return folder
