"""What a person sees while it trains: use of the machine, memory, time left, and a disk that cannot keep up."""

import time

import pytest
import torch
from short_training import new_head
from synthetic_states import Language, draft_ids, make_store, one_core, small_config  # noqa: F401 - a fixture
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_train_refuses_and_skips import run
from train_in_process import lines, start, wait

from jobs.draft.arithmetic import flop_of_a_token
from jobs.draft.model import HeadConfig
from jobs.draft.progress import Reporter, Window
from jobs.ports import free_port
from jobs.storage.states import StateStore

pytestmark = pytest.mark.usefixtures("one_core")


def test_every_line_has_the_machine_and_the_time_left(tmp_path):
    language = Language.make()
    store = make_store(tmp_path / "states", [(4, 60)] * 12, language=language)
    _, lines = run(tmp_path, store, new_head(language), language)
    logged = [line for line in lines if "loss" in line]
    for line in logged:
        assert 0 < line["mfu"] < 1 and 0.05 < line["memory_gib"] < 24, line
        assert line["tokens_per_second"] > 0 and line["grad_norm"] > 0 and line["learning_rate"] > 0
        # 63 rows of 4 states of 32 numbers in fp32 a step, whatever a step takes.
        assert line["read_bytes_per_second"] / line["tokens_per_second"] == pytest.approx(4 * 32 * 4)
        assert line["eta_seconds"] == 0 if line["step"] == line["steps"] else line["eta_seconds"] > 0
        assert len(line["accuracy_by_step"]) == 3 and all(0 <= share <= 1 for share in line["accuracy_by_step"])
        assert 0 <= line["data_wait"] < 1 and 0 <= line["checkpoint_wait"] < 1


def test_tensorboard_holds_what_the_lines_hold(tmp_path):
    language = Language.make()
    store = make_store(tmp_path / "states", [(4, 60)] * 6, language=language)
    _, lines = run(tmp_path, store, new_head(language), language)
    logged = {line["step"]: line for line in lines if "loss" in line}
    board = EventAccumulator(str(tmp_path / "checkpoints/tensorboard"))
    board.Reload()
    for name in (
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_second",
        "mfu",
        "memory_gib",
        "data_wait",
        "eta_seconds",
        "acceptance_estimate",
    ):
        assert {event.step: event.value for event in board.Scalars(f"train/{name}")} == pytest.approx(
            {step: line[name] for step, line in logged.items()}, rel=1e-6
        ), name
    for position in range(3):
        told = {event.step: event.value for event in board.Scalars(f"train/accuracy_by_step/{position}")}
        assert told == pytest.approx({step: line["accuracy_by_step"][position] for step, line in logged.items()}, rel=1e-6)


class SlowDisk(StateStore):
    """A store on a disk that takes 0.2 s for a sample: slower than a step on any machine."""

    def copy(self, *arguments, **options):
        time.sleep(0.2)
        return super().copy(*arguments, **options)


def test_a_disk_that_cannot_deliver_is_named_once_with_both_rates(tmp_path):
    language = Language.make()
    make_store(tmp_path / "states", [(4, 12)] * 60, language=language)
    _, lines = run(tmp_path, SlowDisk(tmp_path / "states"), new_head(language), language, tokens_per_step=120, epochs=1)
    told = [line["note"] for line in lines if "the disk delivers" in line.get("note", "")]
    assert len(told) == 1 and "the step would take" in told[0], told


@pytest.mark.parametrize("slow", [0, 1])
def test_the_rank_that_waits_longest_is_named_with_what_all_ranks_read(tmp_path, slow):
    """The step waits for it, whichever it is; the first rank alone, whose lines these are, would know of its own wait only."""
    make_store(tmp_path / "states", [(4, 60)] * 32)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | ({"SLOW_READS": "0.5"} if rank == slow else {}) for rank in range(2)]
    processes = [start(tmp_path / "states", tmp_path / "run", environment=place, epochs=1, log_every=4) for place in places]
    for process in processes:
        code, error = wait(process, tmp_path / "run")
        assert code == 0, error
    told = lines(tmp_path / "run")
    logged = [line for line in told if "loss" in line]
    assert len(logged) == 4
    for line in logged:
        assert line["data_wait"] > 0.1 and line["data_wait_rank"] == slow, line
        assert line["read_bytes_per_second"] / line["tokens_per_second"] == pytest.approx(4 * 32 * 4)
    notes = [line["note"] for line in told if "the disk delivers" in line.get("note", "")]
    assert (
        len(notes) == 1
        and f", rank {slow} the longest: the disk delivers " in notes[0]
        and " GB/s to all ranks, the step would take " in notes[0]
    ), notes


def test_only_a_wait_over_two_per_cent_is_named(tmp_path):
    """Not measured on a run: on a busy machine any thread may come late."""
    lines: list[dict] = []
    reporter = Reporter(lines.append, tmp_path)
    reporter.name_a_slow_disk({"data_wait": 0.019, "read_bytes_per_second": 3e9})
    assert not lines
    for _ in range(2):
        reporter.name_a_slow_disk({"data_wait": 0.25, "read_bytes_per_second": 3e9})
    reporter.close()
    assert len(lines) == 1 and "25% of the time: the disk delivers 3.00 GB/s, the step would take 4.00 GB/s" in lines[0]["note"]


def test_a_rank_that_waited_longer_than_the_first_ones_clock_ran_waited_all_the_time(tmp_path):
    lines: list[dict] = []
    window, reporter = Window(3, 1.0, torch.device("cpu")), Reporter(lines.append, tmp_path)
    window.add(torch.zeros(4, 3), 1, 1, 1.0, torch.tensor([[0.0, 3600.0], [1e6, 2e6]], dtype=torch.float64))
    figures = window.line(2, None)
    assert (figures["data_wait"], figures["data_wait_rank"]) == (1.0, 1)
    reporter.name_a_slow_disk(figures)
    reporter.close()
    assert "100% of the time, rank 1 the longest" in lines[0]["note"]


def test_arithmetic_of_the_real_head():
    """20.05 GFLOP a token, the figure the peers' measurements were made with."""
    real = HeadConfig(163_840, 32_000, 7168, 18_432, 64, 64, 128, 1e-5, 1e6, None, (2, 30, 58), False)
    assert flop_of_a_token(real, 3) == pytest.approx(20.05e9, rel=1e-3)
