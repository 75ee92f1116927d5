"""Each look at vLLM is a process of its own (`probes.py`): patches of a module cannot be taken back."""

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ON_CPU = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_MLA_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def run_probe(name: str, *arguments: object, shims: bool = True, path: Path | None = None, timeout: int = 900, **environment: str):
    """What `probes.py NAME` prints as its last line, from JSON. Without `shims` vLLM loads no plugin, so nothing is patched."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("these processes run vLLM's CPU platform, which only the vllm-cpu distribution has")
    environ = os.environ | ON_CPU | environment
    if not shims:
        environ["VLLM_PLUGINS"] = "none"
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    command = [sys.executable, str(HERE / "probes.py"), name, *map(str, arguments)]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, f"{name}: {result.stdout[-2000:]}\n{result.stderr[-6000:]}"
    return json.loads(result.stdout.strip().splitlines()[-1])
