"""One run of the real vLLM on CPU in fp32, greedy, end of answer ignored, in a process of its own.

usage: speculation_on_cpu.py PROMPTS.json OUT TOKENS [SPECULATIVE_CONFIG]

PROMPTS is a list of id lists. Without a speculative config the plain run captures states: OUT/states is a
store of TOKENS answered tokens a prompt. With one (JSON, as vLLM takes it) OUT/answers.json holds the
answers and OUT/counters.json the engine's own speculation counters.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="WARNING")

import torch

torch.set_num_threads(1)

from jobs.settings import StatesSettings, VerifierSettings
from jobs.storage.states import Response, ResponseLog, StateLayout
from jobs.verifier.engine import Finished, Request, VerifierEngine
from jobs.verifier.tiny import CHECKPOINT

TAPS = (2, 3, 5, 6, 7, 8)
SETTINGS = VerifierSettings(dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=512, enforce_eager=True)


def main(prompts: list[list[int]], out: Path, tokens: int, speculative: dict | None) -> None:
    wanted = [Request(f"p{i:02d}#0", prompt, max_tokens=tokens, ignore_eos=True) for i, prompt in enumerate(prompts)]
    if speculative is None:
        capture(wanted, out)
    else:
        speculate(wanted, out, speculative)


def capture(wanted: list[Request], out: Path) -> None:
    engine = VerifierEngine(CHECKPOINT, SETTINGS, seed=0, capture_taps=TAPS)
    layout = StateLayout(TAPS, engine.facts.hidden_size, "float32", "tiny", engine.facts.revision, "0" * 64)
    engine.open_store(out / "states", layout, StatesSettings(shard_mib=16))
    with ResponseLog(out / "states") as log:

        def commit(finished: Finished) -> tuple:
            assert finished.dropped is None, finished.dropped
            log.append(Response(finished.request.id, finished.request.prompt_token_ids, finished.response_token_ids, "length", {}, "test", False))
            return ()

        engine.run(wanted, commit)
    engine.close()


def speculate(wanted: list[Request], out: Path, speculative: dict) -> None:
    engine = VerifierEngine(CHECKPOINT, SETTINGS, seed=0, engine_arguments={"speculative_config": speculative, "disable_log_stats": False})
    answers: dict[str, list[int]] = {}

    def keep(finished: Finished) -> tuple:
        answers[finished.request.id] = finished.response_token_ids
        return ()

    engine.run(wanted, keep)
    counters = {m.name.removeprefix("vllm:spec_decode_"): getattr(m, "value", getattr(m, "values", None)) for m in engine._llm.get_metrics() if "spec_decode" in m.name}
    (out / "counters.json").write_text(json.dumps(counters))
    (out / "answers.json").write_text(json.dumps(answers))
    engine.close()


if __name__ == "__main__":
    _, prompts, out, tokens, *rest = sys.argv
    main(json.loads(Path(prompts).read_text()), Path(out), int(tokens), json.loads(rest[0]) if rest else None)
