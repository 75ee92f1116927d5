"""How the verifier is spread over its GPUs: attention split or replicated, experts by columns or whole ones by number.

    tp      everything split over all GPUs; a layer ends in an all-reduce, twice
    tp_ep   as `tp`, but each GPU has whole experts
    dp      replicas: each answers its own requests with its own attention and cache; the experts are split over all GPUs
            by columns, and a model without experts is there as often as there are replicas
    dp_ep   as `dp`, but each GPU has whole experts

Decision, between `tp` and `tp_ep`: neither interconnect nor memory tells the two apart in vLLM 0.16.0. As long as
attention is split by tensor parallelism both end a layer with the same all-reduce
(`FusedMoEParallelConfig.use_all2all_kernels` asks for data parallelism), and both hold the same bytes of weights and
cache. What does are the shapes: by columns every GPU has a slice of every expert, and a slice narrower than the kernels'
tiles wastes them; by number every GPU has whole experts, and a step lasts as long as the GPU with the most tokens takes,
which evens out only with many tokens an expert.

Decision, against choosing `dp_ep` unasked: its grounds are good where attention is latent (MLA), because tensor
parallelism holds the whole latent cache on every GPU. With a replica a GPU the cache holds about as many times the tokens
as there are GPUs, a step reads each token's cache once and not once a GPU, which outweighs the attention weights that
every replica then reads whole from some number of tokens in flight on, and an all-gather and a reduce-scatter move half
of what two all-reduces move (jobs/verifier/fit.py has the figures for a machine). But the replicas step together: one
with a long prompt holds up the others, and the fuller GPU's experts hold up all. What that costs nobody has measured
with this project, so `auto` stays with what was, says what `dp_ep` would hold, and leaves it to be set.
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
    replicas: int = 1  # data parallel

    @property
    def name(self) -> str:
        return ("dp" if self.replicas > 1 else "tp") + ("_ep" if self.experts else "")

    def each(self, total: int) -> int:
        """A replica's share of a number that the settings give for the whole verifier."""
        return -(-total // self.replicas)


def parallel(model: Path, settings: VerifierSettings, cuda: bool | None = None) -> Parallel:
    """What `verifier.parallel` means for the checkpoint in `model`, and why. MustFix for what cannot be done here.

    cuda: whether it runs on GPUs; None looks. vLLM's CPU kernels take their experts to be all of them (`list index out of range`).
    """
    import torch

    gpus, wanted = settings.tensor_parallel_size, settings.parallel
    cuda = torch.cuda.is_available() if cuda is None else cuda
    config = json.loads((Path(model) / "config.json").read_text())
    text = config.get("text_config", config)
    experts = text.get("n_routed_experts") or text.get("num_local_experts") or text.get("num_experts") or 0
    if wanted != "auto":
        by_number, replicated = wanted.endswith("_ep"), wanted.startswith("dp")
        if by_number and not (experts and cuda):
            what = "vLLM cannot split experts by number on a CPU" if experts else "The verifier has no experts to split"
            raise MustFix(what, where=f'verifier.parallel = "{wanted}"', remedy=f'use "auto" or "{wanted[:2]}"')
        return Parallel(by_number, "as set in verifier.parallel", replicas=(settings.data_parallel_size or gpus) if replicated else 1)
    if gpus == 1 or not experts or not cuda:
        return Parallel(False, "one GPU" if gpus == 1 else "no GPU" if experts else "no experts")
    columns = text.get("moe_intermediate_size", 0) // gpus
    tokens = settings.max_num_seqs * text.get("num_experts_per_tok", 1) / experts
    same = "interconnect and memory are the same either way"
    if columns >= NARROW:
        return Parallel(False, f"{columns} columns of each expert on each of {gpus} GPUs fill the kernels' tiles; {same}")
    if tokens < MANY:
        return Parallel(
            False, f"{tokens:.1f} tokens an expert at {settings.max_num_seqs} requests would leave GPUs waiting for the fullest; {same}"
        )
    return Parallel(
        True, f"{columns} columns of each expert on each of {gpus} GPUs are too narrow, and {tokens:.0f} tokens an expert even out; {same}"
    )
