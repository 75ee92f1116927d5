"""How the verifier's experts are split over its tensor-parallel GPUs: each by columns, or whole ones by number.

Decision: neither interconnect nor memory tells the two apart in vLLM 0.16.0. As long as attention is split by tensor
parallelism both end a layer with the same all-reduce (`FusedMoEParallelConfig.use_all2all_kernels` asks for data
parallelism), and both hold the same bytes of weights and cache. What does are the shapes: by columns every GPU has a
slice of every expert, and a slice narrower than the kernels' tiles wastes them; by number every GPU has whole experts,
and a step lasts as long as the GPU with the most tokens takes, which evens out only with many tokens an expert.

Data-parallel attention, which would not hold the latent cache on every GPU, is refused: every replica would have to
write its own requests, which the store does not do yet (jobs/contradictions.py).
"""

import json
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import MustFix
from jobs.settings import VerifierSettings

NARROW = 128  # columns of an expert on one GPU; tiles of vLLM's fused kernels have 64 to 128
MANY = 8  # tokens an expert has in a full decoding step


@dataclass(frozen=True)
class Parallel:
    experts: bool  # expert parallel
    why: str


def parallel(model: Path, settings: VerifierSettings, cuda: bool | None = None) -> Parallel:
    """What `verifier.parallel` means for the checkpoint in `model`, and why. MustFix where experts cannot be split by number.

    cuda: whether it runs on GPUs; None looks. vLLM's CPU kernels take their experts to be all of them (`list index out of range`).
    """
    import torch

    gpus, wanted = settings.tensor_parallel_size, settings.parallel
    cuda = torch.cuda.is_available() if cuda is None else cuda
    config = json.loads((Path(model) / "config.json").read_text())
    text = config.get("text_config", config)
    experts = text.get("n_routed_experts") or text.get("num_local_experts") or text.get("num_experts") or 0
    if wanted != "auto":
        if wanted == "tp_ep" and not (experts and cuda):
            what = "vLLM cannot split experts by number on a CPU" if experts else "The verifier has no experts to split"
            raise MustFix(what, where='verifier.parallel = "tp_ep"', remedy='use "auto" or "tp"')
        return Parallel(wanted == "tp_ep", "as set in verifier.parallel")
    if gpus == 1 or not experts or not cuda:
        return Parallel(False, "one GPU" if gpus == 1 else "no GPU" if experts else "no experts")
    columns = text.get("moe_intermediate_size", 0) // gpus
    tokens = settings.max_num_seqs * text.get("num_experts_per_tok", 1) / experts
    same = "interconnect and memory are the same either way"
    if columns >= NARROW:
        return Parallel(False, f"{columns} columns of each expert on each of {gpus} GPUs fill the kernels' tiles; {same}")
    if tokens < MANY:
        return Parallel(False, f"{tokens:.1f} tokens an expert at {settings.max_num_seqs} requests would leave GPUs waiting for the fullest; {same}")
    return Parallel(True, f"{columns} columns of each expert on each of {gpus} GPUs are too narrow, and {tokens:.0f} tokens an expert even out; {same}")
