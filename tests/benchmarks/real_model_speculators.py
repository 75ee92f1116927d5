"""speculators 0.4.0.1 trains its own EAGLE-3 head on the states that a run of ours captured.

usage: real_model_speculators.py RUN VERIFIER FILES OUT --epochs N --tokens-per-step R --learning-rate L …
RUN is a run directory with `states/train` and `vocab.safetensors`; FILES the folder of what speculators reads, written
if it is not whole (once for all trainings on these states: `--only-files` before several at once); OUT/checkpoints/<epoch>
is what speculators saves, OUT/trained.json what it cost. Model, data set, packing, collation, loss, optimizer, schedule, clipping and
checkpoint are speculators' own, put together as its `scripts/train.py` does; only the files it reads are written here.

Its recipe is kept (noise on the features, AdamW's defaults, the first residual normed, the verifier's attention
shape and its output rows as a start) where the two are not to be compared at the same value: the draft vocabulary, the samples, the
epochs, the packed length, the peak and the schedule of the learning rate. In fp32 its head is better than in the
bf16 that its script trains in, weights and optimizer state included: the harder one to beat.
"""

import argparse
import json
import math
import os
import resource
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from jobs.draft.vocabulary import DraftVocabulary
from jobs.draft.weights import VerifierWeights
from jobs.storage.files import write_json_atomically
from jobs.storage.states import StateStore

NOISE = 0.05  # the default of its recipe
LENGTHS = "sample_lengths.json"  # speculators reads it beside the files; here the last to be written


def write_files(store: StateStore, taps: tuple[int, ...], verifier: VerifierWeights, eps: float, folder: Path) -> None:
    """Its v1 format, a file a sample: `hidden_states` is the three taps and the last state BEFORE the final norm.

    We store the last state behind the norm. Divided by the norm's weight it has a root mean square of 1, so
    speculators' own norm gives back what we stored; a sample for which it does not is an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weight, lengths = verifier.final_norm.float(), {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of a few hundred rows a thread has nothing; with 16 it was four files a second
    rounding = 1e-3 if store.layout.dtype == "float32" else 2e-2
    for number, sample_id in enumerate(store.ids()):
        sample = store.read(sample_id, list(taps))
        final, answer = sample.final.float(), sample.response  # [n-1, H]
        before = final / weight
        again = before * torch.rsqrt(before.square().mean(-1, keepdim=True) + eps) * weight
        if not torch.allclose(again, final, rtol=rounding, atol=rounding * float(final.abs().max())):
            raise SystemExit(f"the last state of {sample_id} is not behind the verifier's final norm")
        ids = torch.tensor([*answer.prompt_token_ids, *answer.response_token_ids])[:-1]  # one id a row
        path = folder / f"data_{number}.pt"
        torch.save(
            {
                "input_ids": ids,
                "loss_mask": (torch.arange(len(ids)) >= len(answer.prompt_token_ids)).long(),
                # Copies: a row of the store is a view of its shard, and torch.save would write the shard with every sample.
                "hidden_states": [*(tap.float().clone() for tap in sample.taps.unbind(1)), before],  # 4 x [n-1, H]
            },
            path,
        )
        lengths[str(number)] = len(ids)
    torch.set_num_threads(threads)
    write_json_atomically(folder / LENGTHS, lengths)


def files_in(folder: Path) -> list[str]:
    return [str(folder / f"data_{number}.pt") for number in range(len(json.loads((folder / LENGTHS).read_text())))]


def draft_model(verifier_path: Path, vocabulary: DraftVocabulary, options: argparse.Namespace):
    """As `create_transformer_layer_config` and `from_training_args` of its recipe make it."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import AutoConfig, LlamaConfig

    found = AutoConfig.from_pretrained(verifier_path)
    found = getattr(found, "text_config", found)
    layer = LlamaConfig(
        vocab_size=found.vocab_size, hidden_size=found.hidden_size, intermediate_size=options.intermediate_size or found.intermediate_size,
        num_hidden_layers=1, num_attention_heads=found.num_attention_heads, num_key_value_heads=found.num_key_value_heads,
        hidden_act=found.hidden_act, max_position_embeddings=found.max_position_embeddings, initializer_range=found.initializer_range,
        rms_norm_eps=found.rms_norm_eps, head_dim=getattr(found, "head_dim", None), rope_theta=getattr(found, "rope_theta", 10000.0),
    )  # fmt: skip
    layer.architectures = found.architectures
    layer._attn_implementation = "simple_flex_attention"
    return Eagle3DraftModel.from_training_args(
        verifier_config=layer, t2d=vocabulary.t2d.clone(), d2t=vocabulary.d2t.clone(), draft_vocab_size=vocabulary.size,
        norm_before_residual=True, ttt_steps=options.ttt_steps, verifier_name_or_path=str(verifier_path),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("verifier", type=Path)
    parser.add_argument("files", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only-files", action="store_true")
    parser.add_argument("--taps", type=int, nargs=3, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--tokens-per-step", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--warmup-share", type=float, required=True)
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--intermediate-size", type=int)
    parser.add_argument(
        "--true-tokens", action="store_true", help="its --use-off-policy-tokens: feed the verifier's tokens, not the draft's argmax"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights, features and optimizer state; its script takes bfloat16",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
    from speculators.train.noise_transforms import AddUniformNoise
    from speculators.train.trainer import Trainer, TrainerConfig

    verifier, vocabulary = VerifierWeights.read(options.verifier), DraftVocabulary.load(options.run / "vocab.safetensors")
    torch.manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)
    torch.set_default_dtype(dtype)  # a `.to` afterwards would round the rope's frequencies too
    model = draft_model(options.verifier, vocabulary, options)
    torch.set_default_dtype(torch.float32)
    eps = model.config.transformer_layer_config.rms_norm_eps
    if not (options.files / LENGTHS).exists():
        write_files(StateStore(options.run / "states" / "train"), tuple(options.taps), verifier, eps, options.files)
    if options.only_files:
        return
    files = files_in(options.files)
    data = Eagle3SampleFileDataset(
        max_len=options.tokens_per_step, file_list=files, transform=AddUniformNoise(std=NOISE), hidden_states_dtype=dtype
    )
    sampler = MultipackDistributedBatchSamplerV2(
        batch_max_length=options.tokens_per_step, lengths=data.approx_lengths, num_replicas=1, rank=0
    )
    workers = min(12, os.cpu_count() or 1) if options.device == "cuda" else 0
    loader = DataLoader(
        data, batch_sampler=sampler, num_workers=workers, collate_fn=create_collate_fn(options.tokens_per_step), pin_memory=options.device == "cuda",
        persistent_workers=workers > 0,
    )  # fmt: skip
    steps, trained = 0, 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        steps += len(batches)
        trained += sum(min(options.tokens_per_step, sum(data.approx_lengths[i] for i in batch)) for batch in batches)
    config = TrainerConfig(
        lr=options.learning_rate, num_epochs=options.epochs, save_path=str(options.out / "checkpoints"),
        # Its device is what .to() is given; where it is no number, there is no progress bar.
        local_rank=0 if options.device == "cuda" else "cpu",
        train_call_kwargs={"ttt_steps": options.ttt_steps, "ttt_step_loss_decay": 1.0, "use_off_policy_tokens": options.true_tokens},
        scheduler_type="cosine", scheduler_warmup_steps=max(1, math.ceil(options.warmup_share * steps)), scheduler_total_steps=steps,
    )  # fmt: skip
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    Trainer(model, config, loader).run_training()
    after = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "samples": len(files), "steps": steps, "tokens": trained, "seconds": time.perf_counter() - began,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }  # fmt: skip
    write_json_atomically(options.out / "trained.json", figures)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
