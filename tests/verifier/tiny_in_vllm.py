"""Started by test_tiny_matches_independent_reference as a process of its own: the miniature in plain vLLM.

No engine of this project takes part, only `vllm.LLM`. argv: JSON of {name: ids}, output safetensors.
Writes per name the log-probabilities of the whole vocabulary [n - 1, V] and, in the metadata, the
number of parameters that vLLM holds.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_MLA_DISABLE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
)  # fmt: skip


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
    for name, answer in zip(wanted, answers):
        rows = [[row[token].logprob for token in range(len(row))] for row in answer.prompt_logprobs[1:]]
        tensors[name] = torch.tensor(rows)  # [n - 1, V]
    parameters = llm.apply_model(lambda model: sum(p.numel() for p in model.parameters()))[0]
    save_file(tensors, out, metadata={"parameters": str(parameters), "architecture": llm.apply_model(lambda m: type(m).__name__)[0]})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
