"""A verifier that is still on the hub, as a folder of which the same can be asked as of a downloaded one.

Decision: half a terabyte is downloaded only for a verifier that fits. What a repository says about itself are
megabytes; they are fetched first, into the cache they belong in. The weights beside them are stood in for by sparse
files of their size, with their header where their tensors are asked for: memory, taps, vocabulary, tokenizer and
tensor names are then judged by the code that judges a local checkpoint, and not by a second copy of it.
"""

import contextlib
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jobs.context import Context
from jobs.errors import MustFix, TryAgain
from jobs.stages import hub
from jobs.verifier.facts import INDEX

SECONDS = 60.0  # for megabytes; a hub that takes longer would take days for the weights
HEADERS_AT_ONCE = 8


@dataclass(frozen=True)
class Described:
    """What the hub says of one revision: the folder of its small files, bytes of each weights file, headers of some."""

    folder: Path
    weights: dict[str, int]
    headers: dict[str, bytes]


@contextlib.contextmanager
def stand_in(context: Context, revision: str | None) -> Iterator[Path]:
    """The folder, gone after the block. revision: a commit, None takes the newest. Raises MustFix, TryAgain."""
    wanted = context.settings.verifier
    # `dp` splits the experts alone, so it is their bytes that count; without an index the headers are all that names tensors.
    everything = wanted.parallel.startswith("dp")
    revision = hub.require_commit(wanted.model, revision, "verifier.revision")
    commit, described = _within(SECONDS, wanted.model, lambda: _ask(wanted.model, revision, everything))
    with tempfile.TemporaryDirectory(prefix="eagle3-verifier-") as root:
        folder = Path(root, "snapshots", commit)  # as in the hub's cache: the last part is taken for the revision
        folder.mkdir(parents=True)
        for file in filter(Path.is_file, described.folder.rglob("*")):
            name = str(file.relative_to(described.folder))
            if name not in described.weights:  # an earlier download may have begun
                _place(folder / name).symlink_to(file.resolve())
        for name, size in described.weights.items():
            with _place(folder / name).open("xb") as weights:
                weights.truncate(size)
                weights.write(described.headers.get(name, b""))
        yield folder


def _place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _ask(model: str, revision: str | None, everything: bool) -> tuple[str, Described]:
    commit = hub.resolve(model, revision)
    folder, listed = hub.description(model, commit)
    if INDEX in listed:
        try:
            named = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise MustFix(
                f"{INDEX} of {model} names no weights ({type(error).__name__})",
                where=f"verifier.model, {commit[:8]}",
                remedy="name a repository with whole weights",
            ) from error
    else:
        named = sorted(name for name in listed if name.endswith(".safetensors") and "/" not in name)
    missing = [name for name in named if name not in listed]
    if missing or not named:
        raise MustFix(
            f"{model} lacks the weights {missing[0] if missing else '*.safetensors'}",
            where=f"verifier.model, {commit[:8]}",
            remedy="name a repository with whole weights",
        )
    asked = named if everything or INDEX not in listed else []
    with ThreadPoolExecutor(HEADERS_AT_ONCE) as pool:
        headers = dict(zip(asked, pool.map(lambda name: hub.header(model, commit, name), asked), strict=True))
    return commit, Described(folder, {name: listed[name] for name in named}, headers)


def _within(seconds: float, model: str, work: Callable[[], tuple[str, Described]]) -> tuple[str, Described]:
    """The result of `work`, which is left to itself after so many seconds: the hub is known to stop in the middle of an answer."""
    done: Future[tuple[str, Described]] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="preflight-verifier").start()
    try:
        return done.result(seconds)
    except TimeoutError:
        raise TryAgain(
            f"The hub did not describe {model} within {seconds:.0f} s",
            where="hub",
            remedy="run the same command again, or give a local folder",
        ) from None
