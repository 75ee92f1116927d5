"""One process and two (gloo) see the same samples in the same global batches and reach the same loss and
weights to rounding; more processes than packed rows a step are refused."""

import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from synthetic_states import make_store
from train_in_process import lines, start, wait

from jobs.draft import checkpoint
from jobs.ports import free_port


def run(states: Path, folder: Path, world: int, kill_at: int | None = None, **changes) -> tuple[list[int], str]:
    """(exit codes, standard error of all) of as many processes as torchrun would start; kill_at: SIGKILL for all of
    them as soon as a checkpoint of that step or a later one is whole (it is written behind the training)."""
    port = free_port()
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        start(states, folder, environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **changes) for rank in range(world)
    ]
    while kill_at and all(p.is_alive() for p in processes) and checkpointed(folder) < kill_at:
        time.sleep(0.01)
    for process in processes if kill_at else ():
        process.kill()
    ends = [wait(process, folder) for process in processes]
    return [code for code, _ in ends], ends[-1][1]


def checkpointed(folder: Path) -> int:
    """The last step of which a whole checkpoint lies in `folder`, 0 if there is none."""
    return max((int(match[1]) for path in folder.glob("step-*") if (match := checkpoint.NAME.fullmatch(path.name))), default=0)


def figures(folder: Path) -> list[dict]:
    return [line for line in lines(folder) if "loss" in line]


@pytest.mark.slow
def test_same_loss_and_weights(tmp_path):
    states = tmp_path / "states"
    make_store(states, [(4 + i % 7, 12 + (i * 5) % 30) for i in range(31)])
    # Three packed rows a step: one rank gets two of them, the other one and a row of padding.
    for world in (1, 2):
        codes, error = run(states, tmp_path / f"world{world}", world, accumulate=3, epochs=2)
        assert codes == [0] * world, error
    one, two = figures(tmp_path / "world1"), figures(tmp_path / "world2")
    assert [line["step"] for line in one] == [line["step"] for line in two] and len(one) >= 6
    for a, b in zip(one, two, strict=True):
        assert a["loss_positions"] == b["loss_positions"] and a["trained_tokens"] == b["trained_tokens"]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4), a["step"]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3), a["step"]
    weights, other = (load_file(str(tmp_path / f"world{world}.safetensors")) for world in (1, 2))
    for name in weights:
        torch.testing.assert_close(weights[name], other[name], rtol=1e-3, atol=2e-4, msg=name)


def test_a_machine_without_the_states_is_named_by_all(tmp_path):
    states = tmp_path / "states"
    make_store(states, [(4, 12)] * 4)
    codes, error = run(states, tmp_path / "run", 2, elsewhere=str(tmp_path / "nothing"))
    assert codes == [78, 78]
    for said in (error, Path(f"{tmp_path / 'run'}.err").read_text()):
        assert "rank 1 on" in said and str(tmp_path / "nothing") in said, said


@pytest.mark.slow
def test_a_killed_training_goes_on_with_another_number_of_processes(tmp_path):
    """AdamW's moments lie in shares on the ranks and whole in a checkpoint, so any number can take them over."""
    states = tmp_path / "states"
    make_store(states, [(4 + i % 7, 12 + (i * 5) % 30) for i in range(31)])
    codes, error = run(states, tmp_path / "alone", 1, accumulate=4, epochs=6)
    assert codes == [0], error
    for world, stop in ((2, 4), (4, 8), (1, None)):
        codes, error = run(states, tmp_path / "run", world, accumulate=4, epochs=6, checkpoint_every=2, kill_at=stop)
        assert codes == ([0] if stop is None else [-signal.SIGKILL] * world), error
    assert sum("continues" in line.get("note", "") for line in lines(tmp_path / "run")) == 2
    one, changing = ({line["step"]: line for line in figures(tmp_path / name)} for name in ("alone", "run"))
    assert one.keys() == changing.keys()
    for step, line in one.items():
        assert line["loss"] == pytest.approx(changing[step]["loss"], rel=1e-4), step
    weights, other = (load_file(str(tmp_path / f"{name}.safetensors")) for name in ("alone", "run"))
    for name in weights:
        torch.testing.assert_close(weights[name], other[name], rtol=1e-3, atol=2e-4, msg=name)


def test_more_ranks_than_rows_are_refused(tmp_path):
    states = tmp_path / "states"
    make_store(states, [(4, 12)] * 4)
    codes, error = run(states, tmp_path / "run", 2, accumulate=1)
    assert codes == [78, 78]
    assert "2 ranks cannot share 1 packed row a step (train.accumulate)" in error
    codes, error = run(states, tmp_path / "run", 2, accumulate=2, epochs=1)
    assert codes == [78, 78]
    assert "2 ranks cannot share 1 packed row, all that there is (train.processes)" in error
