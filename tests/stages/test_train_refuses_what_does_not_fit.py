"""Bad input of training through the command line's own path: one sentence, the place and the remedy, exit 78, and it stands in the ledger."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import untrained_head
from run_with_states import EVAL_TAPS, answered, run_with_states, write_states

from entrypoints import cli
from jobs.context import Context
from jobs.stages import train, vocab

SAMPLES = [f"t{i:02d}#0" for i in range(4)]


def stored(**changes) -> Callable[[Path], Context]:
    """A run whose train states are of another kind than its settings say."""

    def made(folder: Path) -> Context:
        context = run_with_states(folder)
        write_states(context, "eval", ["e0#0"])
        write_states(context, "train", SAMPLES)
        vocab.run(context)
        (context.states("train")).rename(folder / "good")
        write_states(context, "train", SAMPLES, **changes)
        return context

    return made


def half_written(folder: Path) -> Context:
    """Its only checkpoint lacks a file."""
    context = answered(run_with_states(folder, "train.max_steps=2"))
    train.run(context)
    (context.path / "checkpoints" / "step-000002" / "optimizer.safetensors").unlink()
    return context


def warm_start_from(**changes) -> Callable[[Path], Context]:
    """A run that is to start from a head whose config.json says these things; nothing was judged yet."""

    def made(folder: Path) -> Context:
        head = untrained_head.saved(folder.parent / "head")
        config = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps(config | changes))
        context = run_with_states(folder, f'heads.candidates=[{{name="mine", model="{head}"}}]', "heads.warm_start=mine")
        write_states(context, "eval", SAMPLES, taps=EVAL_TAPS)
        return context

    return made


MLA = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 64}
CASES = {
    "type": (stored(dtype="float8_e4m3fn"), "stored as float8_e4m3fn, states.dtype is verifier", "set states.dtype to fp8"),
    "width": (stored(width=64), "states of width 64 cannot train a head of width 128", "generate the states again"),
    "taps": (stored(taps=(1, 5, 7)), "the head reads taps [2, 5, 7], the store holds [1, 5, 7]", "set verifier.taps to the head's"),
    "vocabulary": (stored(odd_token=1536), "a token id outside the vocabulary of 1536", "of one and the same verifier"),
    "no token": (stored(lengths=(1, 1)), "the store holds no token to train on", ""),
    "checkpoint": (half_written, "no checkpoint is whole (step-000002: optimizer.safetensors is missing", "--redo train"),
    "MLA draft": (
        warm_start_from(**MLA),
        "only Llama-form EAGLE-3 heads are supported, no MLA draft",
        "LlamaForCausalLMEagle3 or the speculators form",
    ),
    "taps of the start": (
        warm_start_from(eagle_aux_hidden_state_layer_ids=[1, 4, 9]),
        "mine reads taps [1, 4, 9], the eval states hold [2, 3, 5, 6, 7, 8]",
        "choose another head",
    ),
}
AT_BASELINE = {"MLA draft", "taps of the start"}  # before the train split is paid for


def command_of(context: Context, case: str) -> list[str]:
    context.run.close()
    return ["stage", "baseline" if case in AT_BASELINE else "train", "--run-dir", str(context.path), "--json"]


def refused(context: Context, code: int, result: dict, printed: str, case: str) -> None:
    _, words, remedy = CASES[case]
    assert (code, result["status"], result["exit_code"]) == (78, "failed", 78)
    assert words in result["error"]["message"] and result["error"]["where"] and remedy in (result["error"]["remedy"] or "")
    (said,) = [line for line in printed.splitlines() if line.startswith("eagle3-job: ")]
    assert words in said and remedy in said and "Traceback" not in printed
    ledger = json.loads((context.path / "run.json").read_text())
    assert (ledger["status"], ledger["exit_code"], ledger["error"]) == ("failed", 78, result["error"])
    assert [name for name, stage in ledger["stages"].items() if stage["state"] == "failed"] == [command_of(context, case)[1]]


@pytest.mark.parametrize("case", CASES)
def test_it_is_one_sentence_and_78(tmp_path, capfd, case):
    context = CASES[case][0](tmp_path / "run")
    command = command_of(context, case)
    capfd.readouterr()
    code, result = cli._run(command)
    refused(context, code, result, capfd.readouterr().err, case)


def test_a_process_ends_with_it(tmp_path):
    context = CASES["type"][0](tmp_path / "run")
    command = [sys.executable, "-m", "entrypoints.cli", *command_of(context, "type")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    refused(context, done.returncode, json.loads(done.stdout), done.stderr, "type")
