"""The miniature in the real vLLM 0.16.0 equals transformers' DeepSeek-V3 code in fp32, and no weight is left over."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepseek_reference import Reference, largest_error
from held_out import sequences
from safetensors import safe_open

from jobs.verifier.tiny import CHECKPOINT

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def in_vllm(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("vllm")
    longest = sorted((ids for ids, _ in sequences()), key=len)[-3:]
    texts = {str(index): ids for index, ids in enumerate(longest)}
    (folder / "texts.json").write_text(json.dumps(texts))
    command = [sys.executable, str(HERE / "tiny_in_vllm.py"), str(folder / "texts.json"), str(folder / "out.safetensors")]
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    with safe_open(folder / "out.safetensors", "pt") as file:
        return {"texts": texts, "metadata": file.metadata(), "logprobs": {name: file.get_tensor(name) for name in texts}}


@pytest.mark.slow
def test_log_probabilities_of_the_whole_vocabulary_agree(in_vllm):
    reference = Reference(CHECKPOINT)
    assert sum(map(len, in_vllm["texts"].values())) > 700
    for name, ids in in_vllm["texts"].items():
        with torch.no_grad():
            want = reference.model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)  # [n - 1, V]
        assert largest_error(in_vllm["logprobs"][name], want) < 1e-4


@pytest.mark.slow
def test_vllm_takes_every_weight_and_has_none_of_its_own(in_vllm):
    # vLLM itself refuses a parameter that no tensor filled; an equal count excludes a tensor nobody took.
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        shipped = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  not a dict
    assert int(in_vllm["metadata"]["parameters"]) + int(in_vllm["metadata"]["vision"]) == shipped
    assert in_vllm["metadata"]["architecture"] == "KimiK25ForConditionalGeneration"
