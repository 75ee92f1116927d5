"""How the verifier's weights come from the disk: vLLM's loaders, and the shards read into the page cache beforehand.

`lazy` (vLLM's default) with the read-ahead is the choice until another one measures faster on a GPU. What 0.16.0
offers beside it: `eager` reads a file whole before its tensors are taken, by every tensor-parallel worker again into
memory of its own, good where mapping is slow (network disks). `threads` maps several files at once, which reads
nothing by itself (see jobs/storage/read_ahead.py). `fastsafetensors` reads each file once for all GPUs and sends the tensors on,
`runai_streamer` reads with threads of its own; both are packages that this bundle does not pin.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jobs.errors import MustFix
from jobs.settings import VerifierSettings
from jobs.storage.read_ahead import ReadAhead
from jobs.verifier.facts import weight_files

PACKAGES = {"fastsafetensors": "fastsafetensors", "runai_streamer": "runai_model_streamer"}


def load_arguments(settings: VerifierSettings) -> dict[str, Any]:
    """The loader's arguments of `vllm.LLM`. Raises MustFix for one that cannot be had here."""
    way, threads = settings.load, settings.load_threads
    refuse_missing_loader(settings)
    return {
        "lazy": {},
        "eager": {"safetensors_load_strategy": "eager"},
        "threads": {"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": threads}},
        "fastsafetensors": {"load_format": "fastsafetensors"},
        "runai_streamer": {"load_format": "runai_streamer", "model_loader_extra_config": {"concurrency": threads}},
    }[way]


def refuse_missing_loader(settings: VerifierSettings) -> None:
    """Raise MustFix where `verifier.load` names a package that is not installed, or one that needs a GPU."""
    package = PACKAGES.get(settings.load)
    if package is None:
        return
    where = f'verifier.load = "{settings.load}"'
    if find_spec(package) is None:
        raise MustFix(
            f"The package {package.replace('_', '-')} is not installed", where=where, remedy='install it into the image, or use "lazy"'
        )
    import torch

    if settings.load == "fastsafetensors" and not torch.cuda.is_available():
        raise MustFix("fastsafetensors loads onto GPUs only, and none is visible", where=where, remedy='use "lazy"')


def read_ahead(model: Path, settings: VerifierSettings) -> ReadAhead | None:
    """Begin to read the weights of `model` into the page cache, in the order they are loaded in; None where it is switched off."""
    return ReadAhead(weight_files(model), settings.load_threads) if settings.read_ahead else None
