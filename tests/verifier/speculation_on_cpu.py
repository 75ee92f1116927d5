"""Runs of the real vLLM on CPU in fp32, greedy, end of answer ignored, in one process of their own.

Each line of standard input is one run, answered by a line on standard output: a JSON object with `prompts`
(id lists), `out` (a folder), `tokens` and `speculative` (null, or a config as vLLM takes it). Without one the
plain run captures states: out/states is a store of `tokens` answered tokens a prompt. With one,
out/answers.json holds the answers, out/counters.json the engine's own speculation counters and
out/seconds.json the processor and wall seconds of the answers, the start not counted.

One process for all of them: of the 25 s of processor time that a start takes, 22 are spent once a process.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="WARNING")

import torch

from jobs.settings import StatesSettings, VerifierSettings
from jobs.storage.states import Response, ResponseLog, StateLayout
from jobs.verifier.engine import Finished, Request, VerifierEngine
from jobs.verifier.tiny import CHECKPOINT

TAPS = (2, 3, 5, 6, 7, 8)
SETTINGS = VerifierSettings(dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=512, enforce_eager=True)


def run(prompts: list[list[int]], out: Path, tokens: int, speculative: dict | None) -> None:
    out.mkdir()
    wanted = [Request(f"p{i:02d}#0", prompt, max_tokens=tokens, ignore_eos=True) for i, prompt in enumerate(prompts)]
    if speculative is None:
        capture(wanted, out)
    else:
        speculate(wanted, out, speculative)


def started(**arguments) -> VerifierEngine:
    engine = VerifierEngine(CHECKPOINT, SETTINGS, seed=0, **arguments)
    # vLLM's second start in a process takes a thread a core, whatever OMP_NUM_THREADS says: on a busy machine four times slower.
    torch.set_num_threads(1)
    return engine


def capture(wanted: list[Request], out: Path) -> None:
    engine = started(capture_taps=TAPS)
    layout = StateLayout(TAPS, engine.facts.hidden_size, "float32", "tiny", engine.facts.revision, "0" * 64)
    engine.open_store(out / "states", layout, StatesSettings(shard_mib=16))
    with ResponseLog(out / "states") as log:

        def commit(finished: Finished) -> tuple:
            assert finished.dropped is None, finished.dropped
            log.append(
                Response(finished.request.id, finished.request.prompt_token_ids, finished.response_token_ids, "length", {}, "test", False)
            )
            return ()

        engine.run(wanted, commit)
    engine.close()


def speculate(wanted: list[Request], out: Path, speculative: dict) -> None:
    engine = started(engine_arguments={"speculative_config": speculative, "disable_log_stats": False})
    answers: dict[str, list[int]] = {}

    def keep(finished: Finished) -> tuple:
        answers[finished.request.id] = finished.response_token_ids
        return ()

    wall, processor = time.perf_counter(), time.process_time()
    engine.run(wanted, keep)
    (out / "seconds.json").write_text(json.dumps({"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}))
    metrics = engine._llm.get_metrics()
    counters = {
        m.name.removeprefix("vllm:spec_decode_"): getattr(m, "value", getattr(m, "values", None))
        for m in metrics
        if "spec_decode" in m.name
    }
    (out / "counters.json").write_text(json.dumps(counters))
    (out / "answers.json").write_text(json.dumps(answers))
    engine.close()


if __name__ == "__main__":
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints, and so does Gloo from C++
    for line in sys.stdin:
        wanted = json.loads(line)
        run(wanted["prompts"], Path(wanted["out"]), wanted["tokens"], wanted["speculative"])
        print("done", file=answers_to, flush=True)
