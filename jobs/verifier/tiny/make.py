"""Make the shipped miniature again: `python -m jobs.verifier.tiny.make prepare | train | export`.

  prepare --library LIB --work DIR   tokenizer, token rows (DIR/rows.npz), prompts.jsonl, held_out.jsonl
  train   --work DIR --seconds N     DIR/weights.pt; any device, `README.md` states the command that was used
  export  --work DIR                 checkpoint/: config, tokenizer, safetensors under the real names

The three are apart because they ran on two machines: text and export need no GPU, training wants one
(a CPU works, about a hundred times slower). Training stops after N seconds and its learning rate
follows the clock, so the weights are reproducible in kind, not bit for bit.
"""

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from jobs.verifier.tiny import CHECKPOINT, HELD_OUT, PROMPTS
from jobs.verifier.tiny.model import TEXT_CONFIG, VISION_CONFIG, TinyKimi, checkpoint_tensors, vision_tensors

SEED = 0
ROW = 1024  # tokens of a packed row
CUTS = 3  # how often the library is cut anew: another cut, other prompts from the same text


# --- prepare -----------------------------------------------------------------------------------------------------------


def prepare(library: Path, work: Path) -> None:
    """Write the tokenizer, the rows to train on and the two JSONL files. `library` is a folder `.../lib/python3.11`."""
    from jobs.verifier.tiny import corpus

    work.mkdir(parents=True, exist_ok=True)
    files = corpus.read_library(library)
    train_texts = [file.text for file in files if file.part == "train"]
    pieces = corpus.train_ranks(train_texts)
    write_json(CHECKPOINT / "tokenizer_config.json", corpus.write_tokenizer(pieces, CHECKPOINT))
    renderer, random_ = corpus.Renderer(pieces), random.Random(SEED)

    stream = []
    for _ in range(CUTS):
        sequences = [s for f in files if f.part == "train" for m in corpus.conversations(f, random_) for s, _ in renderer.sequences(m)]
        random_.shuffle(sequences)
        stream += sequences
    validation = [s for f in files if f.part == "eval" for m in corpus.conversations(f, random_) for s in renderer.sequences(m)]
    np.savez_compressed(
        work / "rows.npz",
        **pack(stream, "train"),
        **pack([s for s, _ in validation], "eval"),
        vocabulary=np.array(len(pieces) + corpus.RESERVED_IDS),
    )

    name = f"cpython-{library.name.removeprefix('python')}"
    rows = corpus.prompt_rows(files, "prompts", "train", 1200, SEED, name) + corpus.prompt_rows(files, "eval", "eval", 96, SEED, name)
    PROMPTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    talks = [dict(source=f"{name}/Lib/{f.name}", messages=m) for f in files if f.part == "eval" for m in corpus.conversations(f, random_)]
    HELD_OUT.write_text("".join(json.dumps(row) + "\n" for row in random_.sample(talks, 40)))
    for part in ("train", "prompts", "eval"):
        chosen = [file.text for file in files if file.part == part]
        print(f"{part}: {len(chosen)} files, {sum(map(len, chosen)):,} characters")
    print(f"{len(stream):,} sequences, {sum(map(len, stream)):,} tokens to train on; {len(rows)} prompts")


def pack(sequences: list[list[int]], part: str) -> dict[str, np.ndarray]:
    """Join sequences and cut the stream into rows [N, ROW + 1] of ids, and of flags that are 1 where a sequence starts."""
    tokens = np.concatenate([np.array(s, dtype=np.uint16) for s in sequences])
    starts = np.zeros(len(tokens), dtype=np.uint8)
    starts[np.cumsum([0] + [len(s) for s in sequences[:-1]])] = 1
    rows = (len(tokens) - 1) // ROW
    index = np.arange(rows)[:, None] * ROW + np.arange(ROW + 1)[None]  # neighbours share one token: input here, target there
    return {f"{part}_tokens": tokens[index], f"{part}_starts": starts[index]}


# --- train -------------------------------------------------------------------------------------------------------------


def loss_of(model: torch.nn.Module, rows: Tensor, starts: Tensor, causal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows, starts [B, ROW + 1]; causal [ROW, ROW] -> mean loss, share of tokens predicted greedily, expert loads [layers - 1, E]."""
    document = starts[:, :-1].int().cumsum(dim=1)  # [B, ROW]
    mask = (document[:, :, None] == document[:, None, :])[:, None] & causal  # [B, 1, ROW, ROW]
    targets = rows[:, 1:].masked_fill(starts[:, 1:].bool(), -100)  # nobody can know how the next sequence starts
    logits, loads = model(rows[:, :-1], mask)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    correct = (logits.argmax(dim=-1) == targets).sum() / (targets != -100).sum()
    return loss, correct, loads


class Muon:
    """Muon (momentum, then the nearest orthogonal matrix by five Newton-Schulz steps; kellerjordan.github.io/posts/muon)."""

    def __init__(self, parameters: list[Tensor], decay: float):
        self.decay = decay
        self.groups: dict[tuple, list[Tensor]] = {}
        for parameter in parameters:
            self.groups.setdefault(tuple(parameter.shape[-2:]), []).append(parameter)
        self.momentum = {p: torch.zeros_like(p) for p in parameters}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for (rows, columns), parameters in self.groups.items():
            gradients = [p.grad for p in parameters]
            buffers = [self.momentum[p] for p in parameters]
            torch._foreach_lerp_(buffers, gradients, 0.05)
            updates = torch._foreach_lerp(gradients, buffers, 0.95)
            stacked = torch.cat([u.reshape(-1, rows, columns) for u in updates])  # [M, rows, columns]
            change = orthogonal(stacked) * (-rate * max(1.0, rows / columns) ** 0.5)
            pieces = change.split([p.numel() // (rows * columns) for p in parameters])
            torch._foreach_mul_(parameters, 1 - rate * self.decay)
            torch._foreach_add_(parameters, [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)])


def orthogonal(x: Tensor) -> Tensor:
    """x [M, R, C] -> about U V^T of each matrix, in bf16 on a GPU."""
    wide = x.shape[1] <= x.shape[2]
    y = (x if wide else x.mT).to(torch.bfloat16 if x.is_cuda else torch.float32)
    y = y / (y.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return (y if wide else y.mT).to(x.dtype)


def train(work: Path, seconds: float, batch: int, device: str, out: Path) -> None:
    """Train for `seconds` and write `out`/weights.pt with the validation figures in `out`/training.json."""
    data = np.load(work / "rows.npz")
    rows, starts, val_rows, val_starts = (
        torch.from_numpy(data[k].astype(t)).to(device)
        for k, t in (("train_tokens", np.int32), ("train_starts", np.uint8), ("eval_tokens", np.int32), ("eval_starts", np.uint8))
    )
    spread = torch.linspace(0, len(val_rows) - 1, 64 if device == "cuda" else 8).long().to(device)
    val_rows, val_starts = val_rows[spread], val_starts[spread]  # from every eval file
    model = TinyKimi({**TEXT_CONFIG, "vocab_size": int(data["vocabulary"])}, SEED).to(device)
    matrices = [
        p for n, p in model.named_parameters() if p.dim() >= 2 and not n.startswith(("embed", "lm_head")) and not n.endswith(".gate")
    ]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = Muon(matrices, decay=0.1)
    adam = torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")
    routers = [layer.mlp for layer in model.layers[TEXT_CONFIG["first_k_dense_replace"] :]]
    causal = torch.ones(ROW, ROW, dtype=torch.bool, device=device).tril()
    compiled = torch.compile(loss_of, dynamic=False) if device == "cuda" else loss_of
    generator = torch.Generator().manual_seed(SEED)
    amp = torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")

    @torch.no_grad()
    def validate() -> tuple[float, float]:
        with amp:
            figures = [
                loss_of(model, r, s, causal)[:2]
                for r, s in zip(val_rows.long().split(batch), val_starts.split(batch), strict=True)
                if len(r) == batch
            ]
        return tuple(float(torch.stack(column).mean()) for column in zip(*figures, strict=True))

    log, step, order, started, load = [], 0, [], None, None
    while True:
        if step == 5:  # compilation is over
            started = time.monotonic()
        share = 0.0 if started is None else (time.monotonic() - started) / seconds
        if share >= 1:
            break
        rate = min(1.0, (step + 1) / 100) * (1.0 if share < 0.3 else max(0.01, (1 - share) / 0.7))
        if len(order) < batch:
            order = torch.randperm(len(rows), generator=generator).tolist()
        picked = torch.tensor([order.pop() for _ in range(batch)], device=device)
        with amp:
            loss, correct, load = compiled(model, rows[picked].long(), starts[picked], causal)
        loss.backward()
        muon.step(0.02 * rate)
        for group in adam.param_groups:
            group["lr"] = 4e-3 * rate
        adam.step()
        model.zero_grad(set_to_none=True)
        with torch.no_grad():  # DeepSeek-V3, section 2.1.2: push the bias of experts chosen too seldom up
            for router, counts in zip(routers, load, strict=True):
                router.e_score_correction_bias.add_((counts.mean() - counts).sign(), alpha=2e-3 * rate)
        step += 1
        if step % (500 if device == "cuda" else 20) == 0:
            figures = validate() if step % (2500 if device == "cuda" else 60) == 0 else (None, None)
            busiest = (load.max(dim=1).values / load.mean(dim=1)).mean().item()
            log.append(
                dict(step=step, share=round(share, 3), loss=loss.item(), accuracy=correct.item(), eval=figures, busiest_expert=busiest)
            )
            print(json.dumps(log[-1]), flush=True)
    final = dict(steps=step, tokens=step * batch * ROW, eval=validate(), seconds=seconds, device=device, torch=torch.__version__)
    print(json.dumps(final), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), out / "weights.pt")
    write_json(out / "training.json", dict(final=final, log=log))


# --- export ------------------------------------------------------------------------------------------------------------


def export(work: Path) -> None:
    """Write config, generation config and weights of `work`/weights.pt (random ones where there is none) into checkpoint/."""
    from safetensors.torch import save_file

    added = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    ids = {token["content"]: int(index) for index, token in added.items()}
    special = dict(bos_token_id=ids["[BOS]"], eos_token_id=ids["<|im_end|>"], pad_token_id=ids["[PAD]"])
    text = {**TEXT_CONFIG, "vocab_size": max(ids.values()) + 1, **special}
    model = TinyKimi(text, SEED)
    if (work / "weights.pt").exists():
        model.load_state_dict(torch.load(work / "weights.pt", map_location="cpu", weights_only=True))
    tensors = {**checkpoint_tensors(model), **vision_tensors(SEED)}
    save_file(dict(sorted(tensors.items())), CHECKPOINT / "model.safetensors", metadata={"format": "pt"})
    write_json(CHECKPOINT / "config.json", dict(
        architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=text, vision_config=VISION_CONFIG,
        ignore_index=-100, media_placeholder_token_id=ids["<|media_pad|>"], use_unified_vision_chunk=True,
        video_placeholder="<|kimi_k25_video_placeholder|>", tie_word_embeddings=False, torch_dtype="bfloat16", **special,
    ))  # fmt: skip
    write_json(
        CHECKPOINT / "generation_config.json",
        dict(eos_token_id=ids["<|im_end|>"], max_length=4096, temperature=1.0, top_p=0.95, do_sample=True),
    )
    print(f"{sum(t.numel() for t in tensors.values()):,} parameters in {len(tensors)} tensors")


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("prepare", "train", "export"))
    parser.add_argument("--library", type=Path, help="standard library to read, for example /usr/lib/python3.11")
    parser.add_argument("--work", type=Path, required=True, help="folder of the intermediate files")
    parser.add_argument("--out", type=Path, help="folder of train's results; default is --work")
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--batch", type=int, default=32, help=f"rows of {ROW} tokens in a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.step == "prepare":
        prepare(arguments.library, arguments.work)
    elif arguments.step == "train":
        train(arguments.work, arguments.seconds, arguments.batch, arguments.device, arguments.out or arguments.work)
    else:
        export(arguments.work)


if __name__ == "__main__":
    main()
