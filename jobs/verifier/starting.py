"""The start of an engine: a load of half a terabyte that may fail in another process, or never end.

vLLM waits for its cores without a limit, so `verifier.start_minutes` is one. Whatever a start ends with, none of its
processes stays behind: they hold the GPUs that the next start needs.
"""

from pathlib import Path
from typing import Any

from jobs.errors import JobError, TryAgain
from jobs.verifier.cores import OneCore, Replicas
from jobs.verifier.orphans import Started
from jobs.verifier.start_failures import Listening, Raised, judged, log
from jobs.verifier.watchdog import Watchdog


def start(arguments: dict[str, Any], model: Path, minutes: float) -> OneCore | Replicas:
    """The engine with these arguments of `vllm.LLM`.

    Raises MustFix for what would fail again (memory, settings, a checkpoint that vLLM cannot read), TryAgain for what may
    pass and after `minutes`; the caller's own JobError as it is.
    """
    started, listening = Started(), Listening()
    late = TryAgain(
        f"The verifier engine was not up after {minutes:g} minutes", where=f"{model}, verifier.start_minutes",
        remedy=f"run the same command again, with more minutes if the disk needs them; what was loaded last is in {log()}",
    )  # fmt: skip
    watchdog = Watchdog(minutes * 60, lambda: 0, error=late, started=started)
    try:
        with listening, watchdog:
            return Replicas(arguments) if "data_parallel_size" in arguments else OneCore(arguments)
    except BaseException as error:
        started.end()
        if isinstance(error, JobError) or not isinstance(error, Exception):
            raise
        if watchdog.struck:  # vLLM took the interruption for a failure of its own
            raise late from error
        noted = listening.first()
        raise judged(noted or Raised.of(error), model, noted=noted is not None) from error
