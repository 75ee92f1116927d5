"""vLLM calls the entry point in every process it starts, so it may neither import nor take time, and may be called again."""

from importlib.metadata import entry_points

from probing import run_probe


def test_applying_every_shim_imports_nothing_heavy():
    seen = run_probe("start_up")
    assert seen["heavy"] == []
    assert seen["seconds"] < 2


def test_vllm_finds_the_entry_point():
    (point,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "eagle3_job_compat"]
    from compat import apply_in_vllm

    assert point.load() is apply_in_vllm
