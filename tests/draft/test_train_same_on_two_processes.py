"""One process and two (gloo) see the same samples in the same global batches and reach the same loss and
weights to rounding; more processes than packed rows a step are refused."""

import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from synthetic_states import make_store
from train_in_process import lines, start, wait


def run(states: Path, folder: Path, world: int, **changes) -> tuple[list[int], str]:
    """(exit codes, standard error of all) of as many processes as torchrun would start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        start(states, folder, environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **changes)
        for rank in range(world)
    ]
    ends = [wait(process, folder) for process in processes]
    return [code for code, _ in ends], ends[-1][1]


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


def test_more_ranks_than_rows_are_refused(tmp_path):
    states = tmp_path / "states"
    make_store(states, [(4, 12)] * 4)
    codes, error = run(states, tmp_path / "run", 2, accumulate=1)
    assert codes == [78, 78]
    assert "2 ranks cannot share 1 packed rows a step (train.accumulate)" in error
