"""Who drafts while the verifier decodes, and vLLM's own count of what was accepted."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PREFIX = "vllm:spec_decode_"


@dataclass(frozen=True)
class Drafter:
    """An existing head or n-gram: its name, the taps it reads (none for n-gram) and vLLM's speculative config."""

    name: str
    taps: tuple[int, ...] | None
    config: dict[str, Any]


def counters(metrics: Iterable[Any], draft_tokens: int) -> dict[str, Any]:
    """{drafts, draft_tokens, accepted [K]} of vLLM's metrics, summed over its engines.

    drafts: steps of a request that drafted anything. accepted[j]: those of them that accepted drafts 0..j, as
    counted before a stop is handled. Source: SpecDecodingStats, vllm/v1/spec_decode/metrics.py.
    """
    found: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted": [0] * draft_tokens}
    for metric in metrics:
        match metric.name.removeprefix(PREFIX):
            case "num_drafts":
                found["drafts"] += int(metric.value)
            case "num_draft_tokens":
                found["draft_tokens"] += int(metric.value)
            case "num_accepted_tokens_per_pos":
                found["accepted"] = [so_far + int(value) for so_far, value in zip(found["accepted"], metric.values, strict=True)]
    return found
