"""`generate.backend = "speculators"`: an independent implementation's states in our store, in our conventions.

Compared with transformers' DeepSeek-V3 in fp32: order over more than ten responses, taps at the INPUT of the
layer, final after the verifier's norm, n-1 rows. In a process of its own, since the generator starts workers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepseek_reference import Reference, largest_error

from jobs.storage.states import Response, ResponseLog, StateStore
from jobs.verifier.chat import Chat
from jobs.verifier.tiny import CHECKPOINT

STAGES = Path(__file__).parents[1] / "stages"
CLOSE = 1e-4
torch.set_num_threads(1)
pytestmark = pytest.mark.slow


def responses(count: int) -> list[Response]:
    generator = torch.Generator().manual_seed(5)

    def ids(length: int) -> list[int]:
        return torch.randint(0, 1500, (length,), generator=generator).tolist()

    chat = Chat.load(CHECKPOINT)
    prompts = [chat.render([{"role": "user", "content": "word " * (1 + 3 * i)}], False) for i in range(count)]
    return [Response(f"p{i:03d}#0", prompts[i], ids(20), "length", {"temperature": 0}, "test", False) for i in range(count)]


def extract(run: Path, split: str) -> subprocess.CompletedProcess:
    environ = os.environ | {"PYTHONPATH": str(STAGES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(STAGES / "generate_in_process.py"), str(run), split]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run directory, the responses that were there before it, and what the stage printed at the first and second call."""
    sys.path.insert(0, str(STAGES))
    from generate_in_process import prepare

    folder = tmp_path_factory.mktemp("speculators")
    given = responses(12)
    with ResponseLog(folder / "given" / "eval") as log:
        for response in given:
            log.append(response)
    run = prepare(folder / "run", [], generate={"backend": "speculators", "responses": str(folder / "given")})
    return run, given, [extract(run, "eval") for _ in range(2)]


def test_every_row_is_the_reference_s(made):
    run, given, (first, _) = made
    assert first.returncode == 0, first.stderr[-4000:]
    store, reference = StateStore(run / "states" / "eval"), Reference(CHECKPOINT)
    assert store.ids() == sorted(response.id for response in given)
    assert store.layout.taps == (2, 3, 5, 6, 7, 8)
    for response in given:
        sample = store.read(response.id)
        ids = [*response.prompt_token_ids, *response.response_token_ids]
        taps, final = reference.states(ids, store.layout.taps)
        assert largest_error(sample.taps.float(), taps[:-1]) < CLOSE
        assert largest_error(sample.final.float(), final[:-1]) < CLOSE
        assert sample.response == response
        assert torch.isnan(sample.logprob).all()


def test_counts_and_a_second_call_that_has_nothing_to_do(made):
    _, given, (first, second) = made
    counts, again = (json.loads(call.stdout.strip().splitlines()[-1]) for call in (first, second))
    assert counts["turns"] == again["turns"] == len(given)
    assert counts["rows"] == sum(response.tokens - 1 for response in given)
    assert "Initializing hidden states generator" not in second.stderr + second.stdout  # no verifier is loaded for nothing


def test_store_verifies(made):
    assert not StateStore(made[0] / "states" / "eval").verify().problems
