"""Preflight reads the verifier's own files as the load will, and what it measured is in the ledger and in the plan."""

import json
import shutil
import struct

import pytest
from test_preflight_finds_what_would_fail import context

from jobs.errors import MustFix
from jobs.job_file import load
from jobs.reporting.forecast import forecast
from jobs.reporting.machines import ENGINE_SECONDS, MACHINES, calibrate, for_verifier, with_disk
from jobs.reporting.workload import KIMI_K25
from jobs.settings import VerifierSettings
from jobs.stages import preflight
from jobs.stages.preflight import access, machine
from jobs.verifier.engine import VerifierEngine
from jobs.verifier.facts import weight_files
from jobs.verifier.loading import load_arguments
from jobs.verifier.serve import serve_arguments
from jobs.verifier.tiny import CHECKPOINT


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    """The tiny one with 300 MB more in a second file, so that there is something to measure."""
    folder = tmp_path_factory.mktemp("verifier") / "copy"
    shutil.copytree(CHECKPOINT, folder)
    header = json.dumps({"padding": {"dtype": "U8", "shape": [300_000_000], "data_offsets": [0, 300_000_000]}}).encode()
    with (folder / "padding.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(bytes(1_000_000) * 300)
    return folder


def test_the_rate_is_of_the_verifiers_own_files_and_is_in_the_ledgers_counts(verifier, tmp_path, monkeypatch):
    made = context(tmp_path, f"verifier.model={str(verifier)!r}")
    monkeypatch.setattr(preflight, "CHECKS", {"disk": preflight.CHECKS["disk"]})  # the others have tests of their own
    counts = preflight.run(made)
    measured = json.loads((made.path / "preflight.json").read_text())["measured"]
    assert measured["load"]["read"] > 0 and measured["load"]["bytes"] > 300_000_000
    assert measured["load"]["seconds_at_best"] == pytest.approx(measured["load"]["bytes"] / measured["load"]["read"])
    assert counts["bytes_per_second"] == {
        "disk_written": measured["disk"]["written"],
        "disk_read": measured["disk"]["read"],
        "verifier_read": measured["load"]["read"],
    }
    assert any("GB in" in json.loads(line).get("text", "") for line in (made.path / "events.jsonl").read_text().splitlines())


def test_a_verifier_that_is_read_in_a_moment_is_not_measured(tmp_path):
    assert machine.read_rate(weight_files(CHECKPOINT), 4) is None


def test_a_disk_that_would_take_an_hour_to_load_from_is_a_problem(verifier, tmp_path, monkeypatch):
    made = context(tmp_path, f"verifier.model={str(verifier)!r}")
    monkeypatch.setattr(preflight, "_verifier_bytes", lambda settings: 540e9)
    monkeypatch.setattr(machine, "read_rate", lambda files, threads: 120e6)
    assert [sentence for sentence in preflight._disk(made, {}) if "read at 120 MB/s, the verifier's 540 GB would take 75 min" in sentence]


def ledger(read: float) -> dict:
    settings = load("hero", overrides=["rental.machine=8 x H200"], environment={})
    rates = {"disk_written": 2.0e9, "disk_read": 3.0e9, "verifier_read": read}
    stages = {"preflight": {"state": "done", "seconds": 30.0, "counts": {"checks": 12, "bytes_per_second": rates}}}
    return {
        "status": "running",
        "settings": settings.as_dict(),
        "stages": stages,
        "machine": {"name": "8 x H200"},
        "cost": {"amount": 0.0, "currency": "USD"},
    }


def test_the_plan_of_a_run_takes_the_disk_as_it_was_measured():
    table = for_verifier(MACHINES["8x-h200"].rates, KIMI_K25)
    fast, slow = with_disk(table, ledger(5e9)), with_disk(table, ledger(0.2e9))
    assert (
        fast.load_seconds.low == pytest.approx(KIMI_K25.bytes / 5e9 + ENGINE_SECONDS.low) and fast.load_seconds.low < table.load_seconds.low
    )
    assert fast.load_seconds.high == table.load_seconds.high, "a fast disk does not make the rest of the load fast"
    assert (
        slow.load_seconds.low == pytest.approx(KIMI_K25.bytes / 0.2e9 + ENGINE_SECONDS.low)
        and slow.load_seconds.low > table.load_seconds.high
    )
    assert (fast.disk.low, fast.disk.high) == (2.0e9, 3.0e9)
    assert fast.sources[0].startswith("MEASURED by preflight here") and with_disk(table, {}) is table
    # A run that has only begun calibrates a plan, and `status` forecasts by it.
    assert calibrate(ledger(5e9), table) == fast
    assert forecast(ledger(0.2e9))["seconds_left"]["low"] > forecast(ledger(5e9))["seconds_left"]["low"] + 2000


def test_every_way_to_load_is_vllms_own_and_one_that_lacks_its_package_is_refused(tmp_path):
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    for way in ("lazy", "eager", "threads"):
        arguments = load_arguments(VerifierSettings(load=way, load_threads=3))
        DefaultModelLoader(LoadConfig(**arguments))  # refuses keys it does not know
        served = serve_arguments(CHECKPOINT, VerifierSettings(load=way, load_threads=3), None, 0)
        assert ("--safetensors-load-strategy" in served, "--model-loader-extra-config" in served) == (way == "eager", way == "threads")
    for way in ("fastsafetensors", "runai_streamer"):
        with pytest.raises(MustFix, match="is not installed") as refused:
            VerifierEngine(CHECKPOINT, VerifierSettings(load=way), seed=0)
        assert refused.value.sentence() in list(access.fits(context(tmp_path / way, f"verifier.load={way}")))
