"""Why an engine did not start, and whether to run again helps.

Where the engine core is a process of its own, the driver only gets "Engine core initialization failed. See root cause
above": the core and its workers log the exception and are gone. So their two loggers get one more handler, which notes
what was raised, by type, in a file that the driver reads. A logging configuration (VLLM_LOGGING_CONFIG_PATH, not part
of vLLM's compile-cache key) is how it reaches a process that is spawned, a handler in the driver one that is forked.

The first exception is the cause: what the others raise, since a peer is gone, comes after it.

Nothing of vLLM is imported with this file: vLLM imports it while it sets up its logging.
"""

import atexit
import contextlib
import copy
import errno
import json
import logging
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.errors import EXIT_MUST_FIX, JobError, MustFix, TryAgain

# They log what ends a core or a worker: `vllm/v1/engine/core.py`, `vllm/v1/executor/multiproc_executor.py` of 0.16.0.
LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
CONFIGURATION = "VLLM_LOGGING_CONFIG_PATH"
LONGEST = 400  # characters of an exception's own words in a sentence
# Advice in words of vLLM's command line, links, and pydantic's appendix: what this project says instead is the remedy.
ADVICE = re.compile(
    r" (?:Try (?:increasing|decreasing|lowering)|Please try|See https?:|\[type=|For further information visit|Decrease GPU memory|GPU \d+ has a total)"
)

OUT_OF_MEMORY = ("out of memory", "can't allocate memory")  # the second is torch's allocator on CPU
SMALL_CACHE = (
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "not enough GPU memory available to serve",
)
OCCUPIED = "is less than desired GPU memory utilization"
# The driver and the core say so of a process that they wait for; where nothing else was noted, it was killed or crashed.
CONSEQUENCES = ("See root cause above", "See stack trace for root cause", "check the stack trace above for the root cause")
# An assertion of vLLM's that fails where another process gave memory back in the wrong second.
PASSING = "Error in memory profiling"
# What a second start of the same settings, checkpoint and packages would raise again.
LASTING = {
    "ValueError", "NotImplementedError", "AssertionError", "ImportError", "LookupError", "TypeError", "AttributeError", "FileNotFoundError", "PermissionError",
}  # fmt: skip


@dataclass(frozen=True)
class Raised:
    """An exception of this process or of another. kinds: names of its class and its bases; job: of a JobError, what it is made of."""

    kinds: tuple[str, ...]
    text: str
    errno: int | None = None
    job: dict[str, Any] | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Raised":
        job = error.as_dict() | {"exit_code": error.exit_code} if isinstance(error, JobError) else None
        return cls(tuple(kind.__name__ for kind in type(error).__mro__), str(error), getattr(error, "errno", None), job)

    def words(self) -> str:
        """In one line, without vLLM's advice."""
        said = ADVICE.split(" ".join(self.text.split()))[0].rstrip(" .").replace(". ", "; ") or "no message"
        return said if len(said) <= LONGEST else said[:LONGEST] + "…"


class Notes(logging.Handler):
    """Notes the exceptions of ERROR records, one JSON line each, in the file at `path`. Never fails, and never writes anything else."""

    def __init__(self, path: str):
        super().__init__(logging.ERROR)
        self.path = path

    def emit(self, record: logging.LogRecord) -> None:
        if not record.exc_info or record.exc_info[1] is None:
            return
        with contextlib.suppress(Exception):
            line = json.dumps(asdict(Raised.of(record.exc_info[1]))) + "\n"
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND)  # not made here: a worker may outlive it
            try:
                os.write(file, line.encode())  # one write, or the lines of several workers would mix
            finally:
                os.close(file)


class Listening:
    """While it is entered, processes that vLLM starts note what they raise; `first` is the earliest of it.

    Nothing is noted where the person has a logging configuration of their own, or none.
    """

    def __init__(self) -> None:
        # Kept until this process ends: a compiler's process that a worker starts late reads the configuration too.
        self._folder = Path(tempfile.mkdtemp(prefix="eagle3-job-start-"))
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        self._notes = self._folder / "raised.jsonl"
        self._notes.touch()
        self._handler = Notes(str(self._notes))
        self._set = False

    def __enter__(self) -> "Listening":
        from vllm import envs
        from vllm.logger import DEFAULT_LOGGING_CONFIG

        if envs.VLLM_CONFIGURE_LOGGING and CONFIGURATION not in os.environ:
            configuration = copy.deepcopy(DEFAULT_LOGGING_CONFIG)
            configuration["handlers"]["raised"] = {"class": f"{Notes.__module__}.{Notes.__qualname__}", "path": str(self._notes)}
            configuration["loggers"] |= {name: {"handlers": ["raised"]} for name in LOGGERS}
            path = self._folder / "logging.json"
            path.write_text(json.dumps(configuration))
            os.environ[CONFIGURATION], self._set = str(path), True
        for name in LOGGERS:
            logging.getLogger(name).addHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self._handler)
        if self._set:
            del os.environ[CONFIGURATION]

    def first(self) -> Raised | None:
        for line in self._notes.read_text().splitlines():
            with contextlib.suppress(ValueError, TypeError):
                noted = json.loads(line)
                return Raised(**noted | {"kinds": tuple(noted["kinds"])})
        return None


def judged(raised: Raised, model: Path, *, noted: bool) -> JobError:
    """What the person is told about a start that ended with `raised`: MustFix where the same settings would raise it again, else TryAgain.

    noted: it comes from another process, whose traceback is in the log.
    """
    words, name, where = raised.words(), raised.kinds[0], str(model)
    traceback = f"its traceback is in {log()}" if noted else ""
    if raised.job:
        kind = MustFix if raised.job["exit_code"] == EXIT_MUST_FIX else TryAgain
        return kind(raised.job["message"], where=raised.job["where"], remedy=raised.job["remedy"])
    if refused := _known(raised, words, where):
        return refused
    if PASSING not in raised.text and LASTING & set(raised.kinds):
        what = words if "ValueError" in raised.kinds else f"{name}: {words}"
        return MustFix(
            f"vLLM refuses the verifier: {what}",
            where=where,
            remedy="; ".join(filter(None, ["correct the settings under [verifier]", traceback])),
        )
    again = "run the same command again"
    if any(mark in raised.text for mark in CONSEQUENCES):
        return TryAgain(
            "The verifier engine did not start: one of its processes ended and did not say why", where=where,
            remedy=f"{again}; if it ends so twice, read what was written last in {log()}",
        )  # fmt: skip
    return TryAgain(f"The verifier engine did not start: {name}: {words}", where=where, remedy="; ".join(filter(None, [again, traceback])))


def _known(raised: Raised, words: str, where: str) -> MustFix | None:
    """What is known by more than its type, with a remedy of its own."""
    if {"OutOfMemoryError", "MemoryError"} & set(raised.kinds) or any(mark in raised.text for mark in OUT_OF_MEMORY):
        return MustFix(
            f"The verifier does not fit: {words}",
            where=where,
            remedy="use more GPUs (verifier.tensor_parallel_size) or a smaller verifier.max_model_len",
        )
    if any(mark in raised.text for mark in SMALL_CACHE):
        return MustFix(
            f"The KV cache cannot hold one request of verifier.max_model_len tokens: {words}", where=where,
            remedy="lower verifier.max_model_len, use more GPUs (verifier.tensor_parallel_size), or raise verifier.gpu_memory_utilization (verifier.kv_cache_gib on CPU)",
        )  # fmt: skip
    if OCCUPIED in raised.text:
        return MustFix(
            f"The GPUs are not free: {words}",
            where=where,
            remedy="end what else runs there (nvidia-smi names it) or lower verifier.gpu_memory_utilization",
        )
    if raised.errno == errno.ENOSPC or "No space left on device" in raised.text:
        return MustFix(
            f"A disk is full: {words}", where=where, remedy="free space in the cache folders and in /dev/shm (docker's --shm-size)"
        )
    return None


def log() -> str:
    """Where this process and those below it write to: the path of a file, or `standard error`."""
    with contextlib.suppress(OSError):
        path = Path(os.readlink("/proc/self/fd/2"))
        if path.is_file():
            return str(path)
    return "standard error"
