"""Looks that need a running engine (in this process, fp32, CPU)."""

import functools
import gc
import json
from pathlib import Path

import torch
from deepseek_reference import Reference, largest_error

from jobs.verifier.tiny import CHECKPOINT

torch.set_num_threads(1)


def start(model: Path | str = CHECKPOINT, **changes):
    from vllm import LLM

    arguments = {"trust_remote_code": True, "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8, "enforce_eager": True}
    arguments |= {"dtype": "float32", "enable_prefix_caching": False, "disable_log_stats": False}
    if "limit_mm_per_prompt" not in changes:
        arguments["limit_mm_per_prompt"] = {"vision_chunk": 0}
    return LLM(str(model), **(arguments | changes))


def answer(llm, prompts: list[list[int]], tokens: int, temperature: float = 0.0) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prompts(vocab: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def answer_watched(llm, asked: list[list[int]], tokens: int):
    """Answers, and {(prompt number, position): (aux [T, H] or None, final [H])} as the runner holds them between its two calls."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    rows: dict = {}
    end_step = runner.sample_tokens

    def sample_tokens(*arguments):
        state, batch, starts = runner.execute_model_state, runner.input_batch, runner.query_start_loc.np
        for place in range(batch.num_reqs if state is not None else 0):
            number = len({r for r, _ in rows} | {batch.req_ids[place]})
            assert number <= len(asked)
            for row in range(starts[place], starts[place + 1]):
                position = int(batch.num_computed_tokens_cpu[place]) + int(row - starts[place])
                aux = state.aux_hidden_states
                stacked = None if aux is None else torch.stack([layer[row] for layer in aux])  # [T, H]
                rows[(batch.req_ids[place], position)] = (stacked, state.hidden_states[row].clone())
        return end_step(*arguments)

    runner.sample_tokens = sample_tokens
    answers = answer(llm, asked, tokens)
    runner.sample_tokens = end_step
    # vLLM adds a random suffix to its request ids; their order is the order of the prompts.
    names = sorted({name for name, _ in rows}, key=lambda name: int(name.split("-")[0]))
    return answers, {(names.index(name), position): value for (name, position), value in rows.items()}


def worst_row(rows: dict, sequences: list[list[int]], taps: list[int], states) -> float:
    """Largest relative error of any tap or final state against `states(ids, taps) -> taps [n, T, H], final [n, H]`."""
    worst = 0.0
    for number, ids in enumerate(sequences):
        want_taps, want_final = states(ids, taps)
        got = [rows[(number, position)] for position in range(len(ids) - 1)]
        worst = max(worst, largest_error(torch.stack([aux for aux, _ in got]), want_taps[:-1]))
        worst = max(worst, largest_error(torch.stack([final for _, final in got]), want_final[:-1]))
    return worst


def states_of_reference(reference: Reference):
    """Reference.states, which knows the INPUT of layers 0 to L-1, with id L (the output of the last layer) too."""
    layers = reference.model.model.layers
    last = len(layers)

    def states(ids: list[int], taps: list[int]):
        seen: dict[str, torch.Tensor] = {}
        hook = layers[-1].register_forward_hook(
            lambda module, args, output: seen.update(last=output[0] if isinstance(output, tuple) else output)
        )
        inner, final = reference.states(ids, tuple(tap for tap in taps if tap < last))
        hook.remove()
        outer = seen["last"].reshape(len(ids), 1, -1)
        return (torch.cat([inner, outer], dim=1) if last in taps else inner), final

    return states


def taps_of_kimi(wanted: list[int]) -> dict:
    """Chunked prefill and decode of three prompts with the taps `wanted` given out, against transformers."""
    llm = start(additional_config={"eagle3_job_taps": wanted})
    asked = prompts(1500, 10, 100, 33)
    answers, rows = answer_watched(llm, asked, 8)
    states = states_of_reference(Reference(CHECKPOINT))
    return {"worst": worst_row(rows, [p + a for p, a in zip(asked, answers, strict=True)], wanted, states), "rows": len(rows)}


def taps_without_shims() -> dict:
    llm = start(additional_config={"eagle3_job_taps": [2, 5, 7]})
    _, rows = answer_watched(llm, prompts(1500, 10), 2)
    return {"aux": [aux is not None for aux, _ in rows.values()]}


def taps_of_llama(folder: str) -> dict:
    """A target that vLLM itself gives the interface: same key, same result; ids it cannot give are refused."""
    from probes import outcome
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 256,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2, attn_implementation="eager")).float().eval()
    model.save_pretrained(folder)
    from tokenizers import Tokenizer, models

    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({f"t{i}": i for i in range(256)}, unk_token="t0"))).save_pretrained(
        folder
    )
    taps, asked = [1, 3, 5], prompts(256, 9, 70)
    llm = start(folder, limit_mm_per_prompt=None, additional_config={"eagle3_job_taps": taps})
    answers, rows = answer_watched(llm, asked, 5)

    @torch.no_grad()
    def states(ids, wanted):
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states  # input of each layer, then after the norm
        return torch.stack([hidden[tap][0] for tap in wanted], dim=1), hidden[-1][0]

    worst = worst_row(rows, [p + a for p, a in zip(asked, answers, strict=True)], taps, states)
    del llm
    gc.collect()
    return {
        "worst": worst,
        "outside": outcome(lambda: start(folder, limit_mm_per_prompt=None, additional_config={"eagle3_job_taps": [0, 3]})),
    }


def speculate(folder: str) -> dict:
    """Plain and speculative greedy answers of the successor verifier, with the engine's counters; then with capture as well."""
    import successor
    from probes import outcome

    verifier, head = successor.make(Path(folder))
    asked = [[100, 3, 40], [7, 9, 11, 201], [500, 301], [64]]
    plain = answer(start(verifier), asked, 40)
    gc.collect()
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    llm = start(verifier, speculative_config=speculation)
    speculative = answer(llm, asked, 40)
    counters = {
        metric.name.removeprefix("vllm:spec_decode_"): getattr(metric, "value", getattr(metric, "values", None))
        for metric in llm.get_metrics()
        if "spec" in metric.name
    }
    sampling = outcome(functools.partial(answer, llm, asked, 4, temperature=1.0))
    del llm
    gc.collect()
    return {
        "plain": plain,
        "speculative": speculative,
        "last": [prompt[-1] for prompt in asked],
        "counters": counters,
        "sampling": sampling,
    }


def speculate_and_capture(folder: str) -> dict:
    """The trained tiny verifier with a random head (other taps than the captured ones): same answers, right states."""
    import successor

    heads = Path(folder)
    heads.mkdir(parents=True, exist_ok=True)
    embedding = Reference(CHECKPOINT).model.model.embed_tokens.weight.detach()
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (torch.randn(w.shape, generator=generator) * 0.1 if w.is_floating_point() and w.ndim == 2 else w)
        for name, w in successor.head_weights(embedding, generator).items()
    }
    from safetensors.torch import save_file

    save_file(weights, heads / "model.safetensors", metadata={"format": "pt"})
    (heads / "config.json").write_text(json.dumps(successor.head_config(embedding) | {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}))
    asked, taps = prompts(1500, 10, 100, 33), [2, 5, 7]
    plain = answer(start(), asked, 12)
    gc.collect()
    llm = start(
        speculative_config={"method": "eagle3", "model": str(heads), "num_speculative_tokens": 3},
        additional_config={"eagle3_job_taps": taps},
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    answers, rows = answer_watched(llm, asked, 12)
    captured = {key: (aux[runner.eagle3_job_capture_places], final) for key, (aux, final) in rows.items()}
    worst = worst_row(captured, [p + a for p, a in zip(asked, answers, strict=True)], taps, Reference(CHECKPOINT).states)
    return {"equal": plain == answers, "put_out": len(next(iter(rows.values()))[0]), "worst": worst}


def speculation_without_its_shim(folder: str) -> dict:
    """Every shim but the one for the CPU runner."""
    import successor
    from probes import outcome

    import compat
    from compat.registry import shims

    compat.apply([shim.name for shim in shims() if shim.name != "cpu_speculation"])
    verifier, head = successor.make(Path(folder))
    other = json.loads((head / "config.json").read_text()) | {"num_key_value_heads": 2}
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, "disable_padded_drafter_batch": True}
    failure = outcome(lambda: start(verifier, speculative_config=speculation))
    compat.apply(["cpu_speculation"])
    (head / "config.json").write_text(json.dumps(other))
    return {"failure": failure, "other_heads": outcome(lambda: start(verifier, speculative_config=speculation))}


def taps_of_both(folder: str) -> dict:
    kimi = taps_of_kimi([0, 2, 3, 5, 7, 10])  # 0 the embedding, 10 the last layer's output
    gc.collect()
    return {"kimi": kimi, "llama": taps_of_llama(folder)}


def speculation(folder: str) -> dict:
    known = speculate(f"{folder}/successor")
    return {"known": known, "random": speculate_and_capture(f"{folder}/random")}
