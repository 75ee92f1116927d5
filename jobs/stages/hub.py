"""One repository from the Hugging Face hub, in a process of its own under a watchdog.

Downloads of 500 GB are known to hang for ever in a socket that never fails. The parent watches the
folder grow; when it has not for `stall_seconds`, the child is killed and started again, which
continues from the partial files.
"""

import contextlib
import errno
import json
import os
import re
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.context import Context
from jobs.errors import MustFix, TryAgain
from jobs.settings import PromptsSettings
from jobs.stages import standard
from jobs.storage.files import files_under
from jobs.wording import counted

COMMIT = re.compile(r"[0-9a-f]{40}")
# Weights in other formats and demo material: never read, and often as large as the weights.
IGNORED = ("*.bin.index.json", "*.gguf", "*.onnx", "*.pth", "original/*", "figures/*", "*.png", "*.gif", "*.mp4")
STALL_SECONDS = 120
# What a repository says about itself beside its weights: configurations, the weights' index, tokenizer and its code, chat template.
DESCRIBING = ("*.json", "*.jinja", "*.py", "*.txt", "*.model", "*.tiktoken")
LARGEST_DESCRIBING = 64 << 20  # bytes of one such file; a larger one of these names is data
HEADER_BYTES = 128 << 10  # asked for first: the header of most safetensors files
LARGEST_HEADER = 100_000_000  # safetensors' own limit
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
        raise MustFix(
            f"{name} is not in the cache and the hub is switched off",
            where="HF_HUB_OFFLINE",
            remedy="unset it for the first start, or give a local folder",
        ) from error
    except GatedRepoError as error:
        raise MustFix(
            f"{name} is gated for this account", where="HF_TOKEN", remedy="accept its licence on the hub and give a token that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise MustFix(f"{name} has no revision {revision}", where="hub", remedy="name a commit of that repository") from error
    except RepositoryNotFoundError as error:
        raise MustFix(
            f"{name} is not on the hub, or this token may not see it", where="HF_TOKEN", remedy="correct the name or the token"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        if isinstance(error, PermissionError) or error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            raise MustFix(
                f"{name} cannot be written to the hub's cache ({error.strerror})",
                where=cache_folder(),
                remedy="make it writable and large enough, or name another folder in HF_HUB_CACHE",
            ) from error
        refusal = _refusal(name, _status(error))
        if refusal is not None:
            raise refusal from error
        raise TryAgain(
            f"The hub does not answer for {name} ({type(error).__name__})",
            where="hub",
            remedy="run the same command again, or give a local folder",
        ) from error


def _status(error: BaseException | None) -> int | None:
    """HTTP status of what the hub answered, or None; its client wraps an answer in errors that have none."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return status
        error = error.__cause__
    return None


def _refusal(name: str, status: int | None) -> MustFix | None:
    """What the same question would be answered again, whatever the time; None for what may pass."""
    if status == 401:
        return MustFix(
            f"The hub refuses the token (HTTP 401, asked for {name})",
            where="HF_TOKEN",
            remedy="give a valid token, or none for a public repository",
        )
    if status == 403:
        return MustFix(
            f"This token may not read {name} (HTTP 403)", where="HF_TOKEN",
            remedy="accept the licence on the hub if the repository is gated, and give a token with read permission for it",
        )  # fmt: skip
    if status is not None and 400 <= status < 500 and status not in (408, 429):
        return MustFix(f"The hub refuses {name} (HTTP {status})", where="hub", remedy="correct the name, and HF_ENDPOINT if it is set")
    return None


def _refuse_unreadable(name: str, kind: str = "model") -> None:
    """Raise unless this token may read the files: the list of a gated repository's is shown to everybody."""
    from huggingface_hub import HfApi

    with _explained(name):
        HfApi().auth_check(name, repo_type=kind)


def check(name: str, revision: str | None, kind: str = "model") -> int:
    """Bytes still to be fetched; raises unless the revision is in the cache already or can be read with this token."""
    from huggingface_hub.file_download import repo_folder_name

    if kind == "model" and revision is not None and cached(name, revision) is not None:
        return 0
    info = _info(name, revision, kind)
    _refuse_unreadable(name, kind)
    begun = sum(found.st_size for _, found in files_under(Path(cache_folder()) / repo_folder_name(repo_id=name, repo_type=kind)))
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


def description(name: str, revision: str) -> tuple[Path, dict[str, int]]:
    """(folder in the hub's cache, bytes of each file of the revision): all but the weights is in the folder, megabytes.

    Raises MustFix, TryAgain. The folder is that of the whole revision, which `download` completes.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import filter_repo_objects

    listed = sizes(name, revision)
    _refuse_unreadable(name)
    wanted = [
        file
        for file in filter_repo_objects(listed, allow_patterns=list(DESCRIBING), ignore_patterns=["original/*"])
        if listed[file] <= LARGEST_DESCRIBING
    ]
    if not wanted:
        raise MustFix(f"{name} holds no config.json", where="hub", remedy="name the repository of a checkpoint")
    with _explained(name, revision):
        places = {file: Path(hf_hub_download(name, file, revision=revision)) for file in wanted}
    return places[wanted[0]].parents[wanted[0].count("/")], listed


def header(name: str, revision: str, file: str) -> bytes:
    """The beginning of a safetensors file up to its tensors: their names, types and places. Raises MustFix, TryAgain."""
    data = _range(name, revision, file, 0, HEADER_BYTES)
    (length,) = struct.unpack("<Q", data[:8].ljust(8, b"\0"))
    if length > LARGEST_HEADER:
        raise MustFix(f"{file} of {name} is no safetensors file", where="hub", remedy="name a repository with whole weights")
    end = 8 + length
    return data[:end] if end <= HEADER_BYTES else data + _range(name, revision, file, len(data), end)


def _range(name: str, revision: str, file: str, begin: int, end: int) -> bytes:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    with _explained(name, revision):
        # Streamed and cut, because a server may leave Range aside and send gigabytes.
        asked = build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        with get_session().get(hf_hub_url(name, file, revision=revision), headers=asked, stream=True, timeout=30) as answer:
            hf_raise_for_status(answer)
            skipped, data = begin if answer.status_code == 200 else 0, b""
            for piece in answer.iter_content(HEADER_BYTES):
                data += piece
                if len(data) >= skipped + end - begin:
                    break
            return data[skipped : skipped + end - begin]


def download(context: Context, model: str, revision: str, *, stall_seconds: float = STALL_SECONDS) -> Path:
    """Folder of the whole revision in the hub's cache; continues partial files. Raises TryAgain, MustFix."""
    local = cached(model, revision)
    if local is not None:
        return local
    expected = sizes(model, revision)
    _refuse_unreadable(model)
    context.note(f"fetch: {model}@{revision[:8]}, {counted(len(expected), 'files')}, {sum(expected.values()) / 1e9:.1f} GB")
    for attempt in range(1, ATTEMPTS + 1):
        child = subprocess.Popen([sys.executable, "-m", "jobs.stages.hub", model, revision], stdout=subprocess.PIPE, text=True)
        try:
            answer = _watch(context, child, sum(expected.values()), stall_seconds)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        if child.returncode == 0 and answer:
            folder = Path(json.loads(answer.strip().splitlines()[-1])["path"])
            if _is_whole(folder, expected):
                (folder / ".eagle3-whole").touch()
                return folder
        with contextlib.suppress(TryAgain):  # a token that was withdrawn meanwhile is refused at every attempt
            _refuse_unreadable(model)
        context.note(f"fetch: {model}, attempt {attempt} of {ATTEMPTS} ended without the whole repository; continuing")
        time.sleep(min(30, 2**attempt) if stall_seconds >= 10 else 0)
    raise TryAgain(
        f"{model} could not be downloaded in {ATTEMPTS} attempts", where="hub", remedy="run the same command again, it continues"
    )


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


def _is_whole(folder: Path, expected: dict[str, int]) -> bool:
    """Whether every file is there: where the hub does not answer, its client gives a half-filled folder for the whole one."""
    from huggingface_hub.utils import filter_repo_objects

    files = [(folder / name, expected[name]) for name in filter_repo_objects(expected, ignore_patterns=list(IGNORED))]
    return all(file.is_file() and size in (0, file.stat().st_size) for file, size in files)  # 0: the hub does not say


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


def address() -> str:
    """The hub's, as HF_ENDPOINT or the hub's client gives it."""
    from huggingface_hub.constants import ENDPOINT

    return ENDPOINT


def cache_folder() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return HF_HUB_CACHE


def cache_size() -> int:
    """Bytes in the hub's cache, whatever they belong to."""
    return sum(found.st_size for _, found in files_under(Path(cache_folder())))


def _download_here(model: str, revision: str) -> None:
    from huggingface_hub import snapshot_download

    print(json.dumps({"path": snapshot_download(model, revision=revision, ignore_patterns=list(IGNORED))}))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    _download_here(*sys.argv[1:3])
