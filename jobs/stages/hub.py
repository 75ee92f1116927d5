"""One repository from the Hugging Face hub, in a process of its own under a watchdog.

Downloads of 500 GB are known to hang for ever in a socket that never fails. The parent watches the
folder grow; when it has not for `stall_seconds`, the child is killed and started again, which
continues from the partial files.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.errors import MustFix, TryAgain
from jobs.run import Context
from jobs.settings import PromptsSettings
from jobs.stages import standard

COMMIT = re.compile(r"[0-9a-f]{40}")
# Weights in other formats and demo material: never read, and often as large as the weights.
IGNORED = ("*.bin.index.json", "*.gguf", "*.onnx", "*.pth", "original/*", "figures/*", "*.png", "*.gif", "*.mp4")
STALL_SECONDS = 120
ATTEMPTS = 5
# A child that has not begun is importing, not hanging: on a busy machine that takes its time.
START_SECONDS = 30


def is_hub_id(model: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", model)) and not Path(model).exists()


def prompt_repositories(prompts: PromptsSettings) -> list[tuple[str, str | None]]:
    """(data set, revision) of every prompt source that is a repository of the hub."""
    parts = [*prompts.mix, *filter(None, map(standard.source_of, prompts.standard))]
    named = [(prompts.source, prompts.revision), (prompts.eval_source, None), *((part.source, part.revision) for part in parts)]
    return [(source, revision) for source, revision in named if source and not source.endswith(".jsonl") and is_hub_id(source)]


def require_commit(name: str, revision: str | None, key: str) -> str | None:
    """A revision is a commit or left open; a branch may change under a run."""
    if revision is not None and not COMMIT.fullmatch(revision):
        raise MustFix(
            f"{name} is pinned to {revision!r}, which is no commit", where=key,
            remedy="set it to a commit of 40 hex digits, or leave it out: the newest one is then taken once and recorded",
        )  # fmt: skip
    return revision


def resolve(name: str, revision: str | None, kind: str = "model") -> str:
    """The commit of a repository: the given one, or the newest now. Raises MustFix, TryAgain."""
    return revision or str(_info(name, None, kind).sha)


def sizes(model: str, revision: str | None) -> dict[str, int]:
    """Bytes of each file of the revision, from the hub's index; nothing is downloaded."""
    return {file.rfilename: file.size or 0 for file in _info(model, revision, "model").siblings or []}


def _info(name: str, revision: str | None, kind: str):
    from huggingface_hub import HfApi

    with _explained(name, revision):
        return HfApi().repo_info(name, repo_type=kind, revision=revision, files_metadata=True, timeout=30)


@contextlib.contextmanager
def _explained(name: str, revision: str | None = None) -> Iterator[None]:
    """What the hub refuses in one sentence: MustFix or TryAgain."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except OfflineModeIsEnabled as error:
        raise MustFix(f"{name} is not in the cache and the hub is switched off", where="HF_HUB_OFFLINE", remedy="unset it for the first start, or give a local folder") from error
    except GatedRepoError as error:
        raise MustFix(f"{name} is gated for this account", where="HF_TOKEN", remedy="accept its terms on the hub and give a token that may read it") from error
    except RevisionNotFoundError as error:
        raise MustFix(f"{name} has no revision {revision}", where="hub", remedy="name a commit of that repository") from error
    except RepositoryNotFoundError as error:
        raise MustFix(f"{name} is not on the hub, or this token may not see it", where="HF_TOKEN", remedy="correct the name or the token") from error
    except (HfHubHTTPError, OSError) as error:
        raise TryAgain(f"The hub does not answer for {name} ({type(error).__name__})", where="hub", remedy="run the same command again, or give a local folder") from error


def check(name: str, revision: str | None, kind: str = "model") -> int:
    """Bytes still to be fetched; raises unless the revision is in the cache already or can be read with this token.

    The hub shows the file list of a gated repository to everybody, so access is asked for by itself.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.file_download import repo_folder_name

    if kind == "model" and revision is not None and cached(name, revision) is not None:
        return 0
    info = _info(name, revision, kind)
    with _explained(name):
        HfApi().auth_check(name, repo_type=kind)
    begun = sum(f.stat().st_size for f in (Path(cache_folder()) / repo_folder_name(repo_id=name, repo_type=kind)).rglob("*") if f.is_file() and not f.is_symlink())
    return max(0, sum(file.size or 0 for file in info.siblings or []) - begun)


def config(name: str, revision: str | None) -> dict[str, Any] | None:
    """config.json of a repository, a few kilobytes, asked for once; None where it cannot be had, which `check` explains."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    local = cached(name, revision) if revision else None
    try:
        if local is not None:
            return json.loads((local / "config.json").read_text())
        if constants.HF_HUB_OFFLINE:
            return None
        url = f"{constants.ENDPOINT}/{name}/resolve/{revision or 'main'}/config.json"
        with urllib.request.urlopen(urllib.request.Request(url, headers=build_hf_headers()), timeout=10) as answer:
            return json.loads(answer.read())
    except (OSError, ValueError):
        return None


def download(context: Context, model: str, revision: str, *, stall_seconds: float = STALL_SECONDS) -> Path:
    """Folder of the whole revision in the hub's cache; continues partial files. Raises TryAgain, MustFix."""
    local = cached(model, revision)
    if local is not None:
        return local
    expected = sizes(model, revision)
    context.note(f"fetch: {model}@{revision[:8]}, {len(expected)} files, {sum(expected.values()) / 1e9:.1f} GB")
    for attempt in range(1, ATTEMPTS + 1):
        child = subprocess.Popen([sys.executable, "-m", "jobs.stages.hub", model, revision], stdout=subprocess.PIPE, text=True)
        try:
            answer = _watch(context, child, sum(expected.values()), stall_seconds)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if child.returncode == 0 and answer:
            return Path(json.loads(answer.strip().splitlines()[-1])["path"])
        context.note(f"fetch: {model}, attempt {attempt} of {ATTEMPTS} ended without the whole repository; continuing")
        time.sleep(min(30, 2**attempt) if stall_seconds >= 10 else 0)
    raise TryAgain(f"{model} could not be downloaded in {ATTEMPTS} attempts", where="hub", remedy="run the same command again, it continues")


def cached(model: str, revision: str) -> Path | None:
    """Folder of a revision that is whole in the hub's cache, else None; asks no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    # The hub's cache makes the snapshot folder before the last file is there: only our own mark says it is whole.
    try:
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, OSError):
        return None
    return folder if (folder / ".eagle3-whole").exists() else None


def _watch(context: Context, child: subprocess.Popen, total: int, stall_seconds: float) -> str:
    last, since = cache_size(), time.monotonic() + START_SECONDS
    while child.poll() is None:
        context.should_stop.raise_if_set()
        size = cache_size()
        if size != last:
            last, since = size, time.monotonic()
            context.progress(size / 1e9, total / 1e9, "GB")
        elif time.monotonic() - since > stall_seconds:
            context.note(f"fetch: no byte for {stall_seconds:.0f} s, the download is started again")
            child.kill()
            child.wait()
            return ""
        time.sleep(0.2 if total < 1e9 else 5)
    return child.stdout.read() if child.stdout else ""


def cache_folder() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return HF_HUB_CACHE


def cache_size() -> int:
    """Bytes in the hub's cache, whatever they belong to."""
    return sum(f.stat().st_size for f in Path(cache_folder()).rglob("*") if f.is_file() and not f.is_symlink())


def _download_here(model: str, revision: str) -> None:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(model, revision=revision, ignore_patterns=list(IGNORED)))
    (folder / ".eagle3-whole").touch()
    print(json.dumps({"path": str(folder)}))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    _download_here(*sys.argv[1:3])
