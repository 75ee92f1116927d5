"""`train` starts the other processes of a step itself: same figures and weights as alone, and none outlives it."""

import multiprocessing
import os
import signal
import time

import pytest
import torch
from short_training import new_head, train_shortly, twelve_samples
from synthetic_states import TAPS, Language, small_config

from jobs.draft import team
from jobs.draft.data import cut_store
from jobs.draft.packing import Plan
from jobs.errors import Interrupted, MustFix, TryAgain
from jobs.settings import TrainSettings
from jobs.storage.states import Response, ResponseLog, StateLayout, StateStore, StateWriter


def run(folder, store, language, should_stop=lambda lines: False, **changes):
    head, lines = new_head(language), []
    result = train_shortly(
        head, folder, store, language, evaluate=lambda _: {"acceptance": 2.0}, should_stop=lambda: should_stop(lines), report=lines.append,
        **dict(accumulate=2, evaluate_every=3, checkpoint_every=4) | changes,
    )  # fmt: skip
    return head, result, [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return twelve_samples(tmp_path_factory.mktemp("states"))


@pytest.mark.slow
def test_two_processes_train_what_one_trains_and_stop_as_one(tmp_path, data):
    alone, _, one = run(tmp_path / "one", *data, processes=1, keep_best=False)
    with pytest.raises(Interrupted):
        run(
            tmp_path / "two", *data, processes=2, keep_best=False, should_stop=lambda lines: any(line.get("step", 0) >= 5 for line in lines)
        )
    assert not multiprocessing.active_children()
    both, result, two = run(tmp_path / "two", *data, processes=2, keep_best=False)
    assert result.resumed_from >= 5 and result.steps == 12
    for line in two:
        assert line["loss"] == pytest.approx(one[line["step"] - 1]["loss"], rel=1e-4)
    for (name, a), b in zip(alone.named_parameters(), both.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4, msg=name)
    assert not multiprocessing.active_children() and "RANK" not in os.environ


@pytest.mark.slow
def test_a_process_that_dies_ends_the_training_to_be_run_again(tmp_path, data):
    def kill_the_other(lines) -> bool:
        if any(line.get("step", 0) == 2 for line in lines) and (others := multiprocessing.active_children()):
            os.kill(others[0].pid, signal.SIGKILL)
            time.sleep(0.2)
        return False

    with pytest.raises(TryAgain, match="training process 1 of 2 ended with exit code -9"):
        run(tmp_path, *data, processes=2, should_stop=kill_the_other)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_what_only_another_process_cannot_read_is_said_once_as_its_own_error(tmp_path):
    language, layout = Language.make(), StateLayout(TAPS, 32, "float32", "synthetic", "0" * 40, "0" * 64)
    folder, generator = tmp_path / "states", torch.Generator().manual_seed(0)
    with ResponseLog(folder) as log:
        writer = StateWriter(folder, layout, shard_bytes=64 * layout.row_bytes)  # a shard a sample
        for number in range(12):
            ids = language.write(65, generator)
            writer.append(f"s{number:02d}#0", 0, *language.states(ids, generator))
            writer.finish(f"s{number:02d}#0", 65)
            log.append(Response(f"s{number:02d}#0", ids[:5], ids[5:], "length", {}, "synthetic", False))
        writer.close()
    store = StateStore(folder)
    plan = Plan(cut_store(store, store.ids(), small_config(), 64), rows=64, accumulate=2, epochs=1, max_steps=None, seed=0)
    last = plan.rank_rows(plan.steps - 1, 1, 2)[0][0].sample_id
    gone = folder / f"shard-{int(last[1:3]):05d}.safetensors"
    gone.unlink()
    with pytest.raises(MustFix, match="training process 1 of 2: A shard of the state store is missing") as caught:
        run(tmp_path / "run", store, language, processes=2, epochs=1)
    assert caught.value.where == str(gone) and caught.value.remedy == "restore it"
    assert not multiprocessing.active_children()


def test_as_many_processes_as_the_rows_of_a_step_can_be_shared_over(monkeypatch):
    assert team.size(TrainSettings(device="cpu", accumulate=8)) == 1
    assert team.size(TrainSettings(device="cpu", accumulate=8, processes=3)) == 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpus, accumulate, wanted in ((8, 8, 8), (8, 16, 8), (8, 4, 4), (8, 12, 6), (8, 1, 1), (2, 8, 2)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert team.size(TrainSettings(accumulate=accumulate)) == wanted
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert team.size(TrainSettings(accumulate=16)) == 1, "torchrun has started them"


def test_more_processes_than_rows_are_refused(tmp_path, data):
    with pytest.raises(MustFix, match=r"3 ranks cannot share 2 packed rows a step .train.accumulate"):
        run(tmp_path, *data, processes=3)
