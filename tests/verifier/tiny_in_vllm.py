"""Started by test_tiny_matches_independent_reference as a process of its own: the miniature in plain vLLM.

No engine of this project takes part, only `vllm.LLM`. argv: JSON of {name: ids}, output safetensors.
Writes per name the log-probabilities of the whole vocabulary [n - 1, V] and, in the metadata, the
number of parameters that vLLM holds: the text model's, since serving text only it leaves the vision
tower out. The tower and the projector are built beside it and take their tensors strictly.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_MLA_DISABLE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
)  # fmt: skip


def vision_parameters(vllm_config, checkpoint: Path) -> int:
    """Build vLLM's own MoonViT and projector; every tensor must find its parameter and every parameter its tensor."""
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models.kimi_k25 import KimiK25ForConditionalGeneration, KimiK25MultiModalProjector, MoonViT3dPretrainedModel

    config, mapper = vllm_config.model_config.hf_config.vision_config, KimiK25ForConditionalGeneration.hf_to_vllm_mapper
    tensors = {name: value for name, value in load_file(checkpoint / "model.safetensors").items() if not name.startswith("language_model.")}
    with set_current_vllm_config(vllm_config):
        parts = {"vision_tower": MoonViT3dPretrainedModel(config), "mm_projector": KimiK25MultiModalProjector(config)}
    for name, module in parts.items():
        own = {mapper._map_name(key).removeprefix(name + "."): value for key, value in tensors.items() if key.startswith(name + ".")}
        module.load_state_dict(own, strict=True)
    return sum(value.numel() for value in tensors.values())


def main(texts: Path, out: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams

    from jobs.verifier.tiny import CHECKPOINT

    llm = LLM(
        str(CHECKPOINT), trust_remote_code=True, dtype="float32", enforce_eager=True, max_model_len=512, max_num_batched_tokens=512,
        max_num_seqs=4, limit_mm_per_prompt={"vision_chunk": 0}, enable_prefix_caching=False, max_logprobs=-1,
    )  # fmt: skip
    wanted = json.loads(texts.read_text())
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)  # a slow tokenizer would take minutes
    answers = llm.generate([{"prompt_token_ids": ids} for ids in wanted.values()], asked, use_tqdm=False)
    tensors = {}
    for name, answer in zip(wanted, answers, strict=True):
        rows = [[row[token].logprob for token in range(len(row))] for row in answer.prompt_logprobs[1:]]
        tensors[name] = torch.tensor(rows)  # [n - 1, V]
    parameters = llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()))[0]
    architecture = llm.apply_model(lambda model: type(model).__name__)[0]
    vision = vision_parameters(llm.llm_engine.vllm_config, CHECKPOINT)
    save_file(tensors, out, metadata={"parameters": str(parameters), "vision": str(vision), "architecture": architecture})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
