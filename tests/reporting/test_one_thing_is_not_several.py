"""What is counted for people stands in the singular where there is one of it."""

import pytest

from jobs.reporting import figures
from jobs.stages.preflight import gpus
from jobs.wording import counted


@pytest.mark.parametrize(
    ("number", "things", "told"),
    [
        (1, "files", "1 file"),
        (0, "files", "0 files"),
        (1, "repositories", "1 repository"),
        (1, "packed rows", "1 packed row"),
        (1, "processes", "1 process"),
        (1, "pieces", "1 piece"),
        (24_000, "eval answers", "24,000 eval answers"),
        (1.0, "minutes", "1 minute"),
        (0.5, "minutes", "0.5 minutes"),
    ],
)
def test_a_number_of_things(number, things, told):
    assert counted(number, things) == told


def test_the_counts_of_a_stage():
    ledger = {"stages": {"fetch": {"state": "done", "counts": {"repositories": 1, "bytes": 2_000_000, "response_tokens": 1}}}}
    assert figures.main_counts(figures.stage_rows(ledger)[0]) == "1 repository, 2.0 MB, 1 response token"


def test_a_count_that_is_true_or_false_is_not_a_number():
    assert (
        figures.counted_text("stopped_early", True) == "stopped early"
        and figures.counted_text("stopped_early", False) == "not stopped early"
    )


def test_one_gpu():
    box = {"gpus": [{"index": 0, "memory_bytes": 1e9, "free_bytes": 1e9, "capability": "9.0"}], "cuda": "12.8", "architectures": ["sm_90"]}
    told = " ".join(gpus.judge(box, 1, 2e9, None)) + " ".join(gpus.judge(box, 2, 1.0, None))
    assert "on 1 GPU:" in told and "tensor_parallel_size = 2 with 1 GPU visible" in told and "(s)" not in told
