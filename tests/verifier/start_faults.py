"""Workers of vLLM that do not load, and a process that starts an engine with them.

argv: folder of the verifier, a JSON object of further verifier settings, the class of the worker (`-` for vLLM's own).
Ends as `eagle3-job` does: with the error's exit code and its sentence on standard error, behind SAID.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

SAID = "eagle3-job: "

try:
    from vllm.v1.worker.cpu_worker import CPUWorker
except ImportError:  # GPU build, or none
    CPUWorker = object


class OutOfMemory(CPUWorker):
    """The second device has too little; the first would wait for it for ever."""

    def load_model(self) -> None:
        import torch

        if self.rank == 0:
            time.sleep(3600)
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.19 GiB. GPU 1 has a total capacity of 79.25 GiB of which 1.1 GiB is free.\nSee documentation for Memory Management"
        )


class Killed(CPUWorker):
    def load_model(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(CPUWorker):
    """As in a collective that never ends: no signal of Python's is looked at."""

    def load_model(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        time.sleep(3600)


def main(folder: str, settings: str, worker: str) -> int:
    from jobs.errors import JobError
    from jobs.settings import VerifierSettings
    from jobs.verifier.engine import VerifierEngine

    common = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64, "enforce_eager": True}
    arguments = {} if worker == "-" else {"worker_cls": f"start_faults.{worker}"}
    try:
        VerifierEngine(Path(folder), VerifierSettings(**common | json.loads(settings)), seed=0, engine_arguments=arguments).close()
    except JobError as error:
        print(SAID + error.sentence(), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
