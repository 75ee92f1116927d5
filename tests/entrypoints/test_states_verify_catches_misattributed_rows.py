"""`eagle3-job states verify RUN`: rows that are whole, with right checksums, but another position's or another sample's, are found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jobs.context import Context
from jobs.draft.weights import VerifierWeights
from jobs.job_file import load
from jobs.reporting.display import Display
from jobs.run import RunDirectory
from jobs.stages import fetch
from jobs.storage.states import Response, ResponseLog, StateLayout, StateWriter
from jobs.verifier.chat import Chat
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.tiny import CHECKPOINT

PROMPT, ANSWER, SAMPLES = 3, 40, 4


def exchanged(final: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two neighbours of a batch, each with the other's rows."""
    return final | {"p1#0": final["p2#0"], "p2#0": final["p1#0"]}


def one_off(final: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every row of one sample at the position after its own."""
    return final | {"p3#0": final["p3#0"].roll(1, 0)}


def run_with(folder: Path, wrong) -> Path:
    """A run directory whose eval store says of every answer row what log_softmax(lm_head(row)) gives, before `wrong` moved rows."""
    run = RunDirectory(folder)
    settings = load("smoke", environment={})
    run.begin(settings)
    context = Context(settings, run, Display.open("plain", stream=sys.stderr))
    fetch.run(context)
    facts, generator = VerifierFacts.read(CHECKPOINT), torch.Generator().manual_seed(0)
    lm_head = VerifierWeights.read(CHECKPOINT).lm_head.float()  # [V, H]
    answers = [
        Response(f"p{i}#0", [1, 2, 3], torch.randint(1000, (ANSWER,), generator=generator).tolist(), "length", {}, "test", False)
        for i in range(SAMPLES)
    ]
    final = {a.id: torch.randn(a.rows, facts.hidden_size, generator=generator) for a in answers}  # [n-1, H]
    layout = StateLayout((2, 3, 5, 6, 7, 8), facts.hidden_size, "float32", "tiny", facts.revision, Chat.load(CHECKPOINT).tokenizer_sha256)
    writer, moved = StateWriter(context.states("eval"), layout), wrong(final)
    for answer in answers:
        following = torch.tensor([*answer.prompt_token_ids, *answer.response_token_ids])[1:]  # [n-1]
        logprob = (final[answer.id] @ lm_head.T).log_softmax(-1).gather(1, following[:, None])[:, 0]
        logprob[: PROMPT - 1] = float("nan")  # prompt rows have none
        writer.append(answer.id, 0, torch.randn(answer.rows, 6, facts.hidden_size, generator=generator), moved[answer.id], logprob)
        writer.finish(answer.id, answer.tokens)
    writer.sync()
    writer.close()
    with ResponseLog(context.states("eval")) as log:
        for answer in answers:
            log.append(answer)
    run.close()
    return folder


def verified(run: Path) -> tuple[int, dict]:
    done = subprocess.run([sys.executable, "-m", "entrypoints.cli", "states", "verify", str(run), "--json"], capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout)


def test_rows_at_their_place_pass_and_each_is_checked(tmp_path):
    code, told = verified(run_with(tmp_path / "run", lambda final: final))
    assert code == 0 and told["stores"]["eval"]["checked_logprobs"] == SAMPLES * ANSWER and told["stores"]["eval"]["problems"] == []


@pytest.mark.parametrize(("wrong", "named"), [(exchanged, "p1#0 and 1 more"), (one_off, "p3#0")])
def test_rows_at_anothers_place_are_78_and_named(tmp_path, wrong, named):
    code, told = verified(run_with(tmp_path / "run", wrong))
    message = told["error"]["message"]
    assert code == 78 and "log-probabilities" in message, message
    first, _, more = named.partition(" ")
    assert [name for name in ("p0#0", "p1#0", "p2#0", "p3#0") if name in message] == [first] and message.endswith(more), message
