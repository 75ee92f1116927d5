"""`eagle3-job states verify RUN`: rows that are whole, with right checksums, but another position's or another sample's, are found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from entrypoints.state_check import Check, verify_states
from jobs.context import Context
from jobs.draft.weights import VerifierWeights
from jobs.errors import MustFix
from jobs.job_file import load
from jobs.reporting.display import Display
from jobs.run import RunDirectory
from jobs.stages import fetch
from jobs.storage.reader import LOGPROB_TOLERANCE
from jobs.storage.states import Response, ResponseLog, StateLayout, StateWriter
from jobs.verifier.chat import Chat
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.logprob_gate import logprobs
from jobs.verifier.tiny import CHECKPOINT

PROMPT, ANSWER, SAMPLES = 3, 40, 4


def exchanged(final: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two neighbours of a batch, each with the other's rows."""
    return final | {"p1#0": final["p2#0"], "p2#0": final["p1#0"]}


def one_off(final: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every row of one sample at the position after its own."""
    return final | {"p3#0": final["p3#0"].roll(1, 0)}


def run_with(folder: Path, wrong, stores: dict[str, str] | None = None) -> Path:
    """A run directory whose stores (split -> type) say of every answer row what log_softmax(lm_head(row)) gives, before `wrong` moved rows."""
    run = RunDirectory(folder)
    settings = load("smoke", environment={})
    run.begin(settings)
    context = Context(settings, run, Display.open("plain", stream=sys.stderr))
    fetch.run(context)
    for split, dtype in (stores or {"eval": "float32"}).items():
        write_store(context.states(split), dtype, wrong)
    run.close()
    return folder


def write_store(folder: Path, dtype: str, wrong) -> None:
    facts, generator = VerifierFacts.read(CHECKPOINT), torch.Generator().manual_seed(0)
    computed = torch.float32 if dtype == "float32" else torch.bfloat16
    lm_head = VerifierWeights.read(CHECKPOINT).lm_head.to(computed)  # [V, H]
    answers = [
        Response(f"p{i}#0", [1, 2, 3], torch.randint(1000, (ANSWER,), generator=generator).tolist(), "length", {}, "test", False)
        for i in range(SAMPLES)
    ]
    final = {a.id: torch.randn(a.rows, facts.hidden_size, generator=generator).to(computed) for a in answers}  # [n-1, H]
    layout = StateLayout((2, 3, 5, 6, 7, 8), facts.hidden_size, dtype, "tiny", facts.revision, Chat.load(CHECKPOINT).tokenizer_sha256)
    writer, moved = StateWriter(folder, layout), wrong(final)
    for answer in answers:
        following = torch.tensor([*answer.prompt_token_ids, *answer.response_token_ids])[1:]  # [n-1]
        # As an engine of this type has them: its logits are rounded to it.
        logprob = (final[answer.id] @ lm_head.T).float().log_softmax(-1).gather(1, following[:, None])[:, 0]
        logprob[: PROMPT - 1] = float("nan")  # prompt rows have none
        taps = torch.randn(answer.rows, 6, facts.hidden_size, generator=generator).to(computed)
        writer.append(answer.id, 0, taps[:20], moved[answer.id][:20], logprob[:20])
        writer.append("other", 0, taps[:5], moved[answer.id][:5], logprob[:5])  # decoded beside it: the sample lies in two pieces
        writer.append(answer.id, 20, taps[20:], moved[answer.id][20:], logprob[20:])
        writer.finish(answer.id, answer.tokens)
    writer.sync()
    writer.close()
    with ResponseLog(folder) as log:
        for answer in answers:
            log.append(answer)


def verified(run: Path, *options: str) -> tuple[int, dict, str]:
    command = [sys.executable, "-m", "entrypoints.cli", "states", "verify", str(run), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_rows_at_their_place_pass_and_each_is_checked(tmp_path):
    """In every type that a store may have, with the time said before it is spent, and the rate after."""
    for run, stores in ((tmp_path / "fp32", {"eval": "float32"}), (tmp_path / "paid", {"eval": "bfloat16", "train": "float8_e4m3fn"})):
        code, told, said = verified(run_with(run, lambda final: final, stores))
        assert code == 0 and set(told["stores"]) == set(stores), told
        for split, dtype in stores.items():
            found = told["stores"][split]
            assert found["checked_logprobs"] == SAMPLES * ANSWER and found["problems"] == [], found
            assert found["largest_logprob_error"] <= LOGPROB_TOLERANCE[dtype]
            assert f"states/{split}: log-probabilities of {SAMPLES * ANSWER} of " in said and " rows/s computed" in said
        if not torch.cuda.is_available():
            assert "without a GPU, log-probabilities of up to" in said


@pytest.mark.parametrize(("wrong", "named"), [(exchanged, "p1#0 and 1 more"), (one_off, "p3#0")])
@pytest.mark.parametrize("store", [("eval", "float32"), ("eval", "bfloat16"), ("train", "float8_e4m3fn")], ids="/".join)
def test_rows_at_anothers_place_are_78_and_named(tmp_path, wrong, named, store):
    run = run_with(tmp_path / "run", wrong, dict([store]))
    if store[1] == "float32":
        code, told, _ = verified(run)
        assert code == 78
        message = told["error"]["message"]
    else:
        with pytest.raises(MustFix) as refused:
            verify_states(run)
        message = refused.value.message
    assert "log-probabilities" in message, message
    first, _, more = named.partition(" ")
    assert [name for name in ("p0#0", "p1#0", "p2#0", "p3#0") if name in message] == [first] and message.endswith(more), message


def test_a_share_of_every_sample_finds_them_too(tmp_path):
    code, told, _ = verified(run_with(tmp_path / "whole", lambda final: final), "--share", "0.1")
    assert code == 0 and told["share"] == 0.1 and told["stores"]["eval"]["checked_logprobs"] == SAMPLES * ANSWER // 10
    with pytest.raises(MustFix, match="p1#0"):
        verify_states(run_with(tmp_path / "wrong", exchanged, {"eval": "bfloat16"}), share=0.1)


def test_the_rows_of_a_share_are_the_same_ones_again_and_others_in_another_sample():
    response = Response("a#0", [1], list(range(1, 101)), "stop", {}, "test", False)
    known = torch.zeros(100)
    first = Check(torch.zeros(2, 2), 0.2, seed=1)._chosen(response.id, known == 0)
    again = Check(torch.zeros(2, 2), 0.2, seed=1)._chosen(response.id, known == 0)
    other = Check(torch.zeros(2, 2), 0.2, seed=1)._chosen("b#0", known == 0)
    assert len(first) == 20 and torch.equal(first, again) and not torch.equal(first, other)


PEAK = """
import resource, sys, torch
from jobs.verifier.logprob_gate import logprobs
rows, vocabulary, width = (int(argument) for argument in sys.argv[1:])
generator = torch.Generator().manual_seed(0)
head = torch.randn(vocabulary, width, generator=generator) / width**0.5
final, tokens = torch.randn(rows, width, generator=generator), torch.randint(vocabulary, (rows,), generator=generator)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.inference_mode():
    found = logprobs(final, head, tokens)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
some = torch.arange(0, rows, rows // 8)
exact = (final[some].double() @ head.double().T).log_softmax(-1).gather(1, tokens[some, None])[:, 0]
print(grown, float((found[some] - exact).abs().max()))
"""


def test_memory_is_bounded_at_the_vocabulary_of_the_real_verifier():
    """4,096 rows of 163,840 logits are 2.7 GB in fp32, and as much again for their softmax; formed in parts they take a tenth."""
    done = subprocess.run([sys.executable, "-c", PEAK, "4096", "163840", "32"], capture_output=True, text=True, check=True)
    grown_mib, error = (float(figure) for figure in done.stdout.split())
    assert grown_mib < 512 and error < 1e-4, done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_what_a_cpu_does():
    head, final = torch.randn(40_000, 256).bfloat16() / 16, torch.randn(3000, 256).bfloat16()
    tokens = torch.randint(40_000, (3000,))
    for dtype in (torch.bfloat16, torch.float32):
        there = logprobs(final.to(dtype), head.to("cuda", dtype), tokens)
        assert there.device.type == "cpu"
        torch.testing.assert_close(there, logprobs(final.to(dtype), head.to(dtype), tokens), rtol=0, atol=1e-4)
