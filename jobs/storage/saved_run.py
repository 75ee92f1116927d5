"""A run's own state in a bucket or a folder: what a new machine with an empty disk continues from.

    state.json          the newest state: every file of the run directory as a list of blocks
    owner.json          who saves here at present
    blocks/ab/abcd…     the content, in blocks named by their sha256

Decision: content-addressed blocks (as backup programs do), not one object a file. State shards are
written in place for hours and checkpoints replace each other; so only blocks whose bytes changed are
sent, while the run goes on, a killed save goes on with the blocks that are missing, equal content
(preallocated zeros) is sent once, and each block is checked by its name when it is read. `state.json`
is replaced last and as a whole, so a reader sees the state before or the state after, never a mixture.

A copy of files that are being written is consistent because of the order it is made in: the ledger
before the results it speaks of, `responses.jsonl` before `index.jsonl` before the shards. What a copied
response line needs was on the disk before that line was (see states.py); the rest counts as garbage.

One run, one machine: a saver that finds another owner, or a state that another machine has saved since,
stops, because two machines continuing one run would both be paid for. Each start saves under a token of its
own. The run directory's record holds every token that was used from there, each before a state with it can
stand at the place: a process that dies between the two, or whose answer is lost, must not look like another
machine to the next one.
"""

import hashlib
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jobs.errors import Interrupted, MustFix
from jobs.settings import PushSettings
from jobs.storage.destination import Destination, destination
from jobs.storage.files import files_under, write_json_atomically
from jobs.storage.senders import Grace, Senders, settled

VERSION = 1
STATE, OWNER, BLOCKS = "state.json", "owner.json", "blocks"
RECORD = ".saved.json"  # in the run directory: what was saved last, so that unchanged files are not read again, and `tokens`
# The head has a push of its own, what was set aside stays where it is, and a head as it drafts is written anew at each start.
LEFT_OUT = ("published", "superseded", "speculation")
SETTLED_NS = 2_000_000_000  # far more than the tick of a file system's clock
MOST_THREADS = 8  # each holds one block in memory
STEP = re.compile(r"step-\d+")
BEGUN_MEANS_PAID = ("generate.eval", "generate.train", "train")


class NotOurs(MustFix):
    """Another run, or another machine that continues this one, has the place."""


class _ChangedMeanwhile(Exception):
    """A file became shorter while it was read."""


@dataclass(frozen=True)
class Saved:
    """What one save did; `bytes_sent` are those of blocks that were not there yet."""

    uri: str
    files: int
    bytes: int
    bytes_sent: int
    seconds: float


def place_beside(uri: str) -> str:
    """Where the state of a run is saved that publishes to `uri`: beside the head, so that copying the head copies no states."""
    parts = urlsplit(uri)
    return f"{uri.rstrip('/')}.run" if parts.path.strip("/") else f"{uri.rstrip('/')}/run"


def find(uri: str, settings: PushSettings) -> tuple[str, dict[str, Any]] | None:
    """(where it stands, the state) of the run saved at `uri` or beside the head at `uri`; None where there is none."""
    for candidate in (uri, place_beside(uri)):
        state = _read(destination(candidate, settings), STATE)
        if state:
            if state.get("version") != VERSION:
                raise MustFix(
                    f"The saved run has version {state.get('version')}, this program reads {VERSION}",
                    where=candidate, remedy="continue it with the program that saved it",
                )  # fmt: skip
            return candidate, state
    return None


def refusal(uri: str, settings: PushSettings, run_id: str, record: dict[str, Any]) -> NotOurs | None:
    """Why this run may not be saved at `uri`: another run's paid work is saved there, or another machine continues this one."""
    state = _read(destination(uri, settings), STATE)
    if not state:
        return None
    if state["run_id"] != run_id:
        if state["status"] in ("done", "no_go") or not state["paid"]:
            return None  # nothing that could be continued: it may be replaced
        return NotOurs(
            f"An unfinished run of {state['job']!r} is saved there, of {state['saved']}",
            where=uri, remedy=f"continue it with --resume-from {uri} and an empty --run-dir, choose another push.uri, or remove it",
        )  # fmt: skip
    if state["token"] in _tokens(record):
        return None
    return NotOurs(
        f"This run was continued on another machine ({state['host']}, {state['saved']})",
        where=uri, remedy=f"continue it from there with --resume-from {uri} and an empty --run-dir, or remove what is saved there",
    )  # fmt: skip


def record_of(folder: Path) -> dict[str, Any]:
    """What this run directory was saved as, or restored from, last; without `uri` where no save has ended yet."""
    try:
        return json.loads((folder / RECORD).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}


def _tokens(record: dict[str, Any]) -> list[str]:
    """Under which this run directory was saved or restored, oldest first."""
    return list(dict.fromkeys([*record.get("tokens", ()), *([record["token"]] if "token" in record else [])]))


class RunSaver:
    """Saves one run directory to one place, again and again; one thread at a time calls `save`."""

    def __init__(self, folder: Path, uri: str, settings: PushSettings, *, run_id: str, states: bool = True):
        self.folder, self.uri, self.settings = Path(folder), uri, settings
        self.run_id, self.states = run_id, states
        self.place = destination(uri, settings)
        self._senders = Senders(min(settings.threads, MOST_THREADS), "save")
        self.block_bytes = settings.part_mib << 20
        self.token = uuid.uuid4().hex
        self._tokens: list[str] = []  # those of earlier starts, too, once they are on the disk
        self._claimed = False
        self._there: set[str] = set()  # blocks known to be at the place
        self._turns: dict[str, threading.Lock] = {}  # of blocks that are being looked for or sent
        self._files: dict[str, dict[str, Any]] = {}  # as in state.json
        self._sent = 0
        self._lock = threading.Lock()

    def save(self, should_stop: Callable[[], bool] = lambda: False) -> Saved:
        """Bring the saved state up to this moment. Interrupted leaves the state before; what was sent is not sent again.

        NotOurs where another run's or another machine's state stands; what the destination refuses is a MustFix.
        """
        began = time.monotonic()
        if not self._claimed:
            self._claim()
        self._sent = 0
        files = self._snapshot(should_stop)
        if should_stop():
            raise self._stopped()
        ledger = json.loads((self.folder / "run.json").read_bytes())
        self._require_ownership()
        state = {
            "version": VERSION, "run_id": self.run_id, "token": self.token, "job": ledger["job"], "status": ledger["status"],
            "paid": any("started" in ledger["stages"][name] for name in BEGUN_MEANS_PAID),
            "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "host": socket.gethostname(), "files": files,
        }  # fmt: skip
        self._announce()
        self.place.write_small(STATE, json.dumps(state).encode(), should_stop=should_stop)
        self._files = files
        write_json_atomically(self.folder / RECORD, state | {"uri": self.uri, "tokens": self._tokens})
        named = {block for file in files.values() for block in file["blocks"]}
        for block in self._there - named:  # of checkpoints and shards as they were
            self.place.delete(object_of(block))
        self._there &= named
        size = sum(file["bytes"] for file in files.values())
        return Saved(self.uri, len(files), size, self._sent, time.monotonic() - began)

    # -- whose it is -----------------------------------------------------------------------------------

    def _claim(self) -> None:
        record = record_of(self.folder)
        problem = refusal(self.uri, self.settings, self.run_id, record)
        if problem:
            raise problem
        owner = {"token": self.token, "run_id": self.run_id, "host": socket.gethostname()}
        self.place.write_small(OWNER, json.dumps(owner).encode())
        state = _read(self.place, STATE) or {"files": {}}
        wanted = {block for file in state["files"].values() for block in file["blocks"]}
        self._there = set()
        for name in self.place.names(f"{BLOCKS}/"):
            block = name.rpartition("/")[2]
            # What a killed save had sent and no state names: its files have changed since, it would stay for ever.
            self._there.add(block) if block in wanted else self.place.delete(name)
        known = record["files"] if record.get("uri") == self.uri else {}
        # A record can be older than the state: the blocks of what that state left out are gone now.
        self._files = {name: file for name, file in known.items() if self._there.issuperset(file["blocks"])}
        self._claimed = True  # what broke off on the way here is done again

    def _announce(self) -> None:
        """Put this saver's token on the run directory's disk."""
        if not self._tokens:
            record = record_of(self.folder)
            tokens = [*_tokens(record), self.token]
            write_json_atomically(self.folder / RECORD, record | {"tokens": tokens})
            self._tokens = tokens

    def _require_ownership(self) -> None:
        owner = _read(self.place, OWNER) or {}
        if owner.get("token") != self.token:
            raise NotOurs(
                f"Another machine ({owner.get('host', 'unknown')}) has taken this run over",
                where=self.uri, remedy="let it go on there; this machine is no longer needed",
            )  # fmt: skip

    # -- the copy --------------------------------------------------------------------------------------

    def _snapshot(self, should_stop: Callable[[], bool]) -> dict[str, dict[str, Any]]:
        for _ in range(3):  # a checkpoint may be replaced by a newer one while it is read
            try:
                found: dict[str, dict[str, Any]] = {}
                for phase in self._phases():
                    found |= self._send(phase, should_stop)
                return found
            except (FileNotFoundError, _ChangedMeanwhile):
                continue
        raise Interrupted("The run directory changes faster than it can be saved", where=str(self.folder))

    def _phases(self) -> Iterator[list[Path]]:
        """Lists of files; all of one are read before the next is looked for (see the module)."""
        yield [self.folder / "run.json"]
        for name in ("responses.jsonl", "index.jsonl"):
            yield sorted(self.folder.glob(f"states/*/{name}")) if self.states else []
        early = {self.folder / "run.json", *self.folder.glob("states/*/responses.jsonl"), *self.folder.glob("states/*/index.jsonl")}
        yield [path for path in self._others() if path not in early]

    def _others(self) -> Iterator[Path]:
        steps = [
            path for path in self.folder.glob("checkpoints/step-*") if STEP.fullmatch(path.name) and (path / "checkpoint.json").exists()
        ]
        newest = max(steps, key=lambda path: int(path.name.partition("-")[2]), default=None)
        for path in sorted(path for path, _ in files_under(self.folder)):
            parts = path.relative_to(self.folder).parts
            transient = any(part.startswith(".") or part.endswith((".partial", ".tmp", ".lock")) for part in parts)
            old_step = parts[0] == "checkpoints" and len(parts) > 2 and STEP.fullmatch(parts[1]) and path.parent != newest
            states = parts[0] == "states" and not self.states
            if not (transient or old_step or states or parts[0] in LEFT_OUT):
                yield path

    def _send(self, paths: list[Path], should_stop: Callable[[], bool]) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        failed = threading.Event()

        def send(path: Path, start: int, size: int) -> str:
            try:
                return self._send_block(path, start, size, lambda: failed.is_set() or should_stop())
            except BaseException:
                failed.set()
                raise

        sending: dict[str, tuple[dict[str, Any], list[Future]]] = {}
        try:
            for path in paths:
                name, now, stat = str(path.relative_to(self.folder)), time.time_ns(), path.stat()
                known = self._files.get(name)
                if known and known["settled"] and (known["bytes"], known["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns):
                    found[name] = known
                    continue
                starts = range(0, stat.st_size, self.block_bytes)
                futures = [self._senders.submit(send, path, start, min(self.block_bytes, stat.st_size - start)) for start in starts]
                # Written within the clock's tick of being read, it may be changed once more without a new time.
                at_rest = now - stat.st_mtime_ns > SETTLED_NS
                sending[name] = (
                    {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "settled": at_rest, "block_bytes": self.block_bytes},
                    futures,
                )
        except BaseException:
            failed.set()
            raise
        finally:
            all_futures = [future for _, futures in sending.values() for future in futures]
            all_ended = settled(all_futures, Grace(should_stop))
        if not all_ended:
            raise self._stopped()
        errors = [error for future in all_futures if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, Interrupted)):  # the cause before its consequences
            raise error
        return found | {name: file | {"blocks": [future.result() for future in futures]} for name, (file, futures) in sending.items()}

    def _stopped(self) -> Interrupted:
        return Interrupted("The save was stopped", where=self.uri, remedy="the state saved before still stands")

    def _send_block(self, path: Path, start: int, size: int, should_stop: Callable[[], bool]) -> str:
        """The sha256 of a block that is at the place now."""
        if should_stop():
            raise self._stopped()
        with open(path, "rb") as file:
            data = os.pread(file.fileno(), size, start)
        if len(data) != size:
            raise _ChangedMeanwhile(path)
        block = hashlib.sha256(data).hexdigest()
        with self._lock:
            if block in self._there:
                return block
            turn = self._turns.setdefault(block, threading.Lock())  # several threads may read equal blocks: one sends
        with turn:
            if block in self._there:
                return block
            found = self.place.found(object_of(block))
            if found is None or found[0] != len(data):
                self.place.write_small(object_of(block), data, should_stop=should_stop)
                with self._lock:
                    self._sent += len(data)
            with self._lock:
                self._there.add(block)
                self._turns.pop(block, None)
        return block


def object_of(block: str) -> str:
    return f"{BLOCKS}/{block[:2]}/{block}"


def _read(place: Destination, name: str) -> dict[str, Any] | None:
    try:
        value = json.loads(place.read_small(name) or b"null")
    except ValueError:
        raise MustFix(f"{name} is not JSON", where=place.uri, remedy="name the place of a saved run, or remove it") from None
    return value if isinstance(value, dict) else None
