"""Each rank updates its share of the weights: the ranks' weights are one and the same bit for bit, equal to one process's to
rounding, and AdamW's moments are put together and cut again for any number of ranks. Real processes over gloo."""

import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train_in_process import PRELOADED

from jobs.draft.ranks import joined
from jobs.draft.update import Update
from jobs.ports import free_port
from jobs.settings import TrainSettings

# Divided by 2, 3 and 4; by 2 and 4; by 3 only; by none of them.
SHAPES = {"matrix": (48, 32), "square": (16, 16), "vector": (33,), "odd": (5, 7)}
STEPS, PARTS, POSITIONS = 6, 12, 30.0


def parameters() -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=g)) for name, shape in SHAPES.items()}


def gradient(step: int, part: int) -> dict[str, Tensor]:
    """What one packed row adds; PARTS of them make a step, whatever the ranks. Step 3 is not finite in one of them."""
    g = torch.Generator().manual_seed(1000 * step + part)
    made = {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}
    if (step, part) == (3, 5):
        made["matrix"][40, 3] = float("nan")
    return made


def _rank(rank: int, world: int, port: int, out: Path, restored: Path | None, steps: range) -> None:
    os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    trained = parameters()
    with joined("cpu", PARTS) as ranks:
        update = Update(trained, TrainSettings(weight_decay=0.01), ranks)
        if restored:
            with torch.no_grad():
                for name, weight in load_file(restored / "weights0").items():
                    trained[name].copy_(weight)
            update.restore(load_file(restored / "moments"), usual=1.0)
        told = []
        for step in steps:
            for part in range(rank, PARTS, world):
                for name, added in gradient(step, part).items():
                    trained[name].grad = added if trained[name].grad is None else trained[name].grad + added
            told.append(torch.stack(update.step(torch.tensor(2.0 * POSITIONS).double(), torch.tensor(POSITIONS).double(), 0.1)))
        moments = update.moments(torch.device("cpu"))
    save_file({name: p.data for name, p in trained.items()}, out / f"weights{rank}")
    save_file({"told": torch.stack(told)}, out / f"told{rank}")
    if rank == 0:
        save_file(moments, out / "moments")


def run(out: Path, world: int, restored: Path | None = None, steps: range = range(STEPS)) -> Path:
    out.mkdir()
    port = free_port()
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    processes = [server.Process(target=_rank, args=(rank, world, port, out, restored, steps)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    for rank in range(1, world):
        for file in ("weights", "told"):
            assert same(load_file(out / f"{file}0"), load_file(out / f"{file}{rank}")), f"rank {rank} has other {file}"
    return out


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Bit for bit; NaN is NaN."""
    return a.keys() == b.keys() and all(a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a)


def assert_close(a: Path, b: Path) -> None:
    for file in ("weights0", "moments", "told0"):
        ours, theirs = load_file(a / file), load_file(b / file)
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(
                ours[name], theirs[name], rtol=1e-4, atol=1e-6, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}"
            )


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    out = run(tmp_path_factory.mktemp("alone") / "run", 1)
    told = load_file(out / "told0")["told"]
    assert told[:, 1].tolist() == [0, 0, 0, 1, 0, 0], "the step that is not finite is left out"
    moments = load_file(out / "moments")
    assert {
        f"{name}/{part}": tuple(shape) if part != "step" else ()
        for name, shape in SHAPES.items()
        for part in ("step", "exp_avg", "exp_avg_sq")
    } == {name: tuple(moment.shape) for name, moment in moments.items()}
    return out


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_makes_the_update_of_one(alone, tmp_path, world):
    made = run(tmp_path / "run", world)
    assert_close(made, alone)
    if world == 3:  # some tensors divided, some not
        again = run(tmp_path / "again", world)
        assert all(same(load_file(made / file), load_file(again / file)) for file in ("weights0", "moments", "told0")), "not the same bits"


def test_moments_go_from_one_number_of_ranks_to_another(alone, tmp_path):
    part = run(tmp_path / "two", 2, steps=range(2))
    part = run(tmp_path / "three", 3, restored=part, steps=range(2, 4))
    rest = run(tmp_path / "one", 1, restored=part, steps=range(4, STEPS))
    for file in ("weights0", "moments"):
        ours, theirs = load_file(rest / file), load_file(alone / file)
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
