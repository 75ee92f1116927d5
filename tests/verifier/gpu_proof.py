"""Capture on a CUDA device, one finding a call, each in a process of its own: what no CPU can show.

    python gpu_proof.py STEP WORK      prints one line of JSON; exit code 0 only if what it promises holds

WORK is a folder shared by the steps: a later one reads the stores that an earlier one left. Started by
test_capture_on_a_gpu.py, and by hand on a machine without pytest. What must hold is in LIMITS, with its reasons.
"""

import json
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
# Workers are started as new processes and import the spy by name.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])

import torch  # noqa: E402
from captured import TAPS, answer_into, layout_of, requests, whole  # noqa: E402
from deepseek_reference import Reference  # noqa: E402
from served import random_head, shares_fed, small_llama  # noqa: E402
from serving_spy import EXTENSION  # noqa: E402

from jobs.settings import VerifierSettings  # noqa: E402
from jobs.storage.shards import encode  # noqa: E402
from jobs.storage.states import StateStore  # noqa: E402
from jobs.verifier.engine import Request, VerifierEngine  # noqa: E402
from jobs.verifier.tiny import CHECKPOINT  # noqa: E402

# Few graphs, so that a start is short; steps of up to 32 requests are replayed, larger ones compiled only.
GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
NARROW = (2, 5, 7)

# What must hold of the relative errors of rows (median, 99 %), by the verifier's type: about three times what an H200
# gave for 21,444 rows, in brackets. `again` compares two passes over the same tokens: prefill with decoding, two GPUs
# with one.
#
# Rounding moves every row a little, so the medians say whether states are right at all; in fp32 it is the rounding of
# TF32 (Triton's matrix products). Where two experts are nearly tied it chooses between them, and such a row is moved by
# as much as another layer would move it (up to 0.41, final states 0.58): one row in a hundred may be, and how far is not
# limited. So that these are not rows of other samples, the log-probability of every response row must fit its state
# (the largest difference): both come from one forward pass, whichever experts were chosen in it.
LIMITS = {
    "bfloat16": {
        "taps": (2e-2, 0.25),  # (6.5e-3, 8.0e-2)
        "final": (4e-2, 0.5),  # (1.3e-2, 0.16): the taps lie before the last layers
        "taps again": (1e-2, 3e-2),  # (0, 1.0e-2)
        "final again": (1e-2, 6e-2),  # (0, 1.7e-2)
        "logprob": 0.25,  # (7.4e-2); the limit of the gate in a run
    },
    "float32": {
        "taps": (2.5e-3, 7e-3),  # (7.6e-4, 2.1e-3)
        "final": (3e-3, 4e-2),  # (1.0e-3, 1.2e-2)
        "taps again": (5e-4, 2e-3),  # (0, 5.8e-4); two GPUs against one (1.7e-4, 6.1e-4)
        "final again": (1.3e-3, 9e-3),  # (0, 9.2e-4); two GPUs against one (4.2e-4, 2.9e-3)
        "logprob": 1e-3,  # (1.0e-5); the limit of the gate in a run
    },
}
# Taps one layer off have a median of 0.334, fifty times that of bf16: rounding and a wrong layer cannot be confused.
ONE_LAYER_OFF = 0.15
FP8, FP8_ROUNDING = "float8_e4m3fn", 0.04


def start(
    dtype: str,
    *,
    model: Path = CHECKPOINT,
    taps: tuple[int, ...] = TAPS,
    eager: bool = False,
    tensor_parallel: int = 1,
    parallel: str = "tp",
    **arguments,
) -> VerifierEngine:
    """An engine of 64 sequences in a KV cache of 3,072 tokens: requests of up to 330 tokens are preempted."""
    settings = VerifierSettings(
        dtype=dtype, max_model_len=512, max_num_seqs=64, max_num_batched_tokens=256, enforce_eager=eager,
        tensor_parallel_size=tensor_parallel, parallel=parallel, gpu_memory_utilization=0.4,
    )  # fmt: skip
    arguments = {
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": False,
        "num_gpu_blocks_override": 192,
        "block_size": 16,
    } | arguments
    if not eager:
        arguments = {"compilation_config": GRAPHS} | arguments
    return VerifierEngine(model, settings, seed=0, capture_taps=taps, engine_arguments=arguments)


def facts_of(engine: VerifierEngine) -> dict:
    config = getattr(engine._llm, "llm_engine", engine._llm).vllm_config
    counters = next(iter(engine._rpc("spy_counters")))
    metrics = {m.name.removeprefix("vllm:"): getattr(m, "value", 0) for m in engine._core.metrics()}
    kept = (
        "num_graph_captures",
        "num_cudagraph_captured",
        "num_gpu_runner_capture_triggers",
        "num_inductor_compiles",
        "num_cache_entries_updated",
        "num_backend_compilations",
    )
    return {
        "cudagraphs": str(config.compilation_config.cudagraph_mode), "async": config.scheduler_config.async_scheduling,
        "preemptions": metrics.get("num_preemptions"), **{name: counters[name] for name in kept if name in counters},
    }  # fmt: skip


def errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative error of every row (norms over the last dimension), flat."""
    assert got.shape == want.shape, (got.shape, want.shape)
    return ((got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)).flatten()


def summary(rows: list[torch.Tensor]) -> dict[str, float]:
    flat = torch.cat(rows)
    at = torch.quantile(flat[torch.randperm(len(flat))[:1_000_000]], torch.tensor([0.5, 0.99]))
    return {"median": round(at[0].item(), 6), "p99": round(at[1].item(), 6), "max": round(flat.max().item(), 5), "rows": len(flat)}


def against_reference(store: StateStore, most: int = 200) -> dict:
    """Errors of taps and final states against transformers in fp32, and of the taps against the layer after."""
    reference = Reference(CHECKPOINT, "cuda" if torch.cuda.is_available() else "cpu")
    taps, final, shifted, logprob = [], [], [], []
    ids = store.ids()[:most]
    for sample_id in ids:
        sample = store.read(sample_id)
        tokens, prompt = whole(sample), len(sample.response.prompt_token_ids)
        assert len(sample.taps) == len(sample.final) == len(sample.logprob) == len(tokens) - 1
        want, want_final = reference.states(tokens[:-1], store.layout.taps)
        later, _ = reference.states(tokens[:-1], tuple(tap + 1 for tap in store.layout.taps))
        taps.append(errors(sample.taps, want))
        final.append(errors(sample.final, want_final))
        shifted.append(errors(sample.taps, later))
        own = (sample.final.float() @ reference.lm_head.T).log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        logprob.append((sample.logprob - own)[prompt - 1 :].abs())
    assert not torch.cat(logprob).isnan().any(), "a response row has no log-probability"
    return {
        "samples": len(ids),
        "taps": summary(taps),
        "final": summary(final),
        "one_layer_off": summary(shifted),
        "logprob": summary(logprob),
    }


def holds(found: dict, again: dict, dtype: str) -> bool:
    """found: of `against_reference`; again: of `prefilled`."""
    limits, seen = (
        LIMITS[dtype],
        {name: found[name] for name in ("taps", "final")} | {f"{name} again": again[name] for name in ("taps", "final")},
    )
    close = all(seen[name]["median"] < limits[name][0] and seen[name]["p99"] < limits[name][1] for name in seen)
    return close and found["logprob"]["max"] < limits["logprob"] and found["one_layer_off"]["median"] > ONE_LAYER_OFF


def prefilled(engine: VerifierEngine, folder: Path, store: StateStore, taps: tuple[int, ...] = TAPS) -> dict:
    """Prefill the answers of `store` on `engine` and compare the states, position by position."""
    existing = [
        Request(i, store.response(i).prompt_token_ids, response_token_ids=store.response(i).response_token_ids) for i in store.ids()
    ]
    again = answer_into(engine, folder, existing, taps)
    assert again.ids() == store.ids()
    pairs = [(again.read(i), store.read(i, taps)) for i in store.ids()]
    return {"taps": summary([errors(a.taps, b.taps) for a, b in pairs]), "final": summary([errors(a.final, b.final) for a, b in pairs])}


def decode(work: Path, name: str, dtype: str, count: int = 200, **options) -> tuple[bool, dict]:
    """Capture while `count` answers of very unequal length are decoded, then again by a prefill pass on the same engine."""
    begun = time.monotonic()
    engine = start(dtype, **options)
    started, taps = time.monotonic() - begun, options.get("taps", TAPS)
    store = answer_into(engine, work / name, requests(count), taps)
    seconds = time.monotonic() - begun - started
    facts = facts_of(engine)
    prefill = prefilled(engine, work / f"{name}-prefill", store, taps)
    engine.close()
    found = against_reference(store, 200 if count > 100 else count)
    good = holds(found, prefill, dtype) and len(store.ids()) == count
    return good, {"start_s": round(started, 1), "decode_s": round(seconds, 1), **facts, **found, "prefill_against_decode": prefill}


def served(work: Path, model: Path, name: str, dtype: str, **options) -> tuple[bool, dict]:
    """One engine that captures and drafts: what the proposer is given is what the store holds, bit for bit."""
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    own = (2, 4, 5) if "llama" in name else NARROW
    union = tuple(sorted({tap for i in own for tap in (i, i + 1)}))
    head = random_head(work / f"{name}-head", model, own, kind)
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    engine = start(dtype, model=model, taps=union, speculative_config=speculation, num_gpu_blocks_override=4096, **options)
    engine._rpc("spy_open")
    store = answer_into(engine, work / name, requests(64), union)
    engine._rpc("spy_save", str(work / f"{name}.pt"))
    facts, extra = facts_of(engine), {}
    if (work / "compiled" / "responses.jsonl").exists() and model == CHECKPOINT:
        # The same tokens were captured by an engine that had no drafter at all.
        extra["against_an_engine_without_a_drafter"] = prefilled(engine, work / f"{name}-prefill", StateStore(work / "compiled"), union)
    engine.close()
    equal, off = shares_fed(store, torch.load(work / f"{name}.pt"), own)
    good = equal == 1.0 and off == 0.0
    return good, {"rows_bit_equal": equal, "rows_equal_one_layer_off": off, "samples": len(store.ids()), **facts, **extra}


def float8(work: Path) -> tuple[bool, dict]:
    """States rounded to FP8 on the device while answers are decoded, and again while they are prefilled.

    The rounding is the CPU's, byte for byte; what an answer's rows are off by is the engine's rounding and that of FP8:
    e4m3 has 3 bits of mantissa, so each element is off by up to 1/16 of itself and a row by about 1/40 (FP8_ROUNDING).
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = start("bfloat16")
    layout = layout_of(engine, TAPS, FP8)
    rows = [torch.randn(1000, *shape).bfloat16() for shape in ((len(TAPS), layout.hidden_size), (layout.hidden_size,))] + [
        torch.randn(1000)
    ]
    here, there = encode(layout, *rows), encode(layout, *(tensor.to(device) for tensor in rows))
    equal = all(torch.equal(here[name].view(torch.uint8), there[name].cpu().view(torch.uint8)) for name in here)
    store = answer_into(engine, work / "fp8", requests(200), dtype=FP8)
    facts = facts_of(engine)
    existing = [
        Request(i, store.response(i).prompt_token_ids, response_token_ids=store.response(i).response_token_ids) for i in store.ids()
    ]
    again = {kind: answer_into(engine, work / f"fp8-prefill-{kind}", existing, dtype=kind) for kind in (FP8, "bfloat16")}
    engine.close()
    rounding = {
        name: summary([errors(getattr(again[FP8].read(i), name), getattr(again["bfloat16"].read(i), name)) for i in store.ids()])
        for name in ("taps", "final")
    }
    found = against_reference(store)
    limits = LIMITS["bfloat16"]
    good = equal and found["one_layer_off"]["median"] > ONE_LAYER_OFF and len(store.ids()) == 200
    good &= all(
        rounding[name]["median"] < FP8_ROUNDING
        and found[name]["median"] < FP8_ROUNDING + limits[name][0]
        and found[name]["p99"] < FP8_ROUNDING + limits[name][1]
        for name in rounding
    )
    return good, {"encoded_equal": equal, **facts, **found, "rounding": rounding}


def tensor_parallel(work: Path, name: str, eager: bool = True, **arguments) -> tuple[bool, dict]:
    """Two GPUs: a prefill of answers that one GPU decoded gives the same states; then answers of its own against the reference."""
    dtype, first = ("float32", "exact32") if eager else ("bfloat16", "compiled")
    if not (work / first / "responses.jsonl").exists():
        raise SystemExit(f"what one GPU gives has to be there first: {first}")
    engine = start(dtype, eager=eager, tensor_parallel=2, **arguments)
    prefill = prefilled(engine, work / f"{name}-prefill", StateStore(work / first))
    store = answer_into(engine, work / name, requests(64))
    facts = facts_of(engine)
    engine.close()
    found = against_reference(store, 64)
    return holds(found, prefill, dtype), {"dtype": dtype, **facts, "against_one_gpu": prefill, **found}


def llama(work: Path) -> tuple[bool, dict]:
    return served(work, small_llama(work / "llama-model", torch.bfloat16), "llama", "bfloat16", skip_tokenizer_init=True)


STEPS = {
    "exact32": lambda work: decode(work, "exact32", "float32"),
    "compiled": lambda work: decode(work, "compiled", "bfloat16"),
    "fp8": float8,
    "eager": lambda work: decode(work, "eager", "bfloat16", 64, eager=True),
    # The compile cache must be one folder for these three: other taps, other states; the third start loads the first's graphs.
    "taps-a": lambda work: decode(work, "taps-a", "bfloat16", 48, taps=NARROW),
    "taps-b": lambda work: decode(work, "taps-b", "bfloat16", 48, taps=(3, 6, 8)),
    "taps-a-again": lambda work: decode(work, "taps-a-again", "bfloat16", 48, taps=NARROW),
    "served": lambda work: served(work, CHECKPOINT, "served", "bfloat16"),
    "served-llama": llama,
    "tp2": lambda work: tensor_parallel(work, "tp2"),
    "tp2-nccl": lambda work: tensor_parallel(work, "tp2-nccl", disable_custom_all_reduce=True),
    "tp2-experts": lambda work: tensor_parallel(work, "tp2-experts", parallel="tp_ep"),
    "tp2-compiled": lambda work: tensor_parallel(work, "tp2-compiled", eager=False),
    "dp2": lambda work: tensor_parallel(work, "dp2", parallel="dp"),
    "dp2-experts": lambda work: tensor_parallel(work, "dp2-experts", parallel="dp_ep"),
    "dp2-experts-compiled": lambda work: tensor_parallel(work, "dp2-experts-compiled", eager=False, parallel="dp_ep"),
}


if __name__ == "__main__":
    step, work = sys.argv[1], Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    good, found = STEPS[step](work)
    print("RESULT " + json.dumps({"step": step, "holds": good, "seconds": round(time.monotonic() - begun, 1), **found}), flush=True)
    sys.exit(0 if good else 1)
