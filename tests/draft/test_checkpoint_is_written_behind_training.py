"""What is saved is held apart and written on another thread: any safetensors reader reads it, training waits for
nothing but the copy and the checkpoint before, and an error of the write is not lost."""

import threading

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from jobs.draft import snapshot
from jobs.draft.checkpoint import CheckpointWriter
from jobs.errors import MustFix

TENSORS = {
    "weight": torch.randn(37, 5),
    "half": torch.randn(64, 3).bfloat16(),
    "transposed": torch.randn(7, 9).T,
    "offsets": torch.arange(11),
    "mask": torch.arange(13) % 3 == 0,
    "random": torch.get_rng_state(),
    "step": torch.tensor(12.0),
    "nothing": torch.zeros(0, 4),
}


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_any_reader_reads_what_was_written_in_blocks(tmp_path, monkeypatch, block):
    monkeypatch.setattr(snapshot, "BLOCK", block)
    path = tmp_path / "tensors.safetensors"
    checksum = snapshot.write_tensors(path, TENSORS)
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    assert checksum == xxhash.xxh3_128(path.read_bytes()).hexdigest()


def test_copies_do_not_change_with_training():
    trained = {"weight": torch.nn.Parameter(torch.ones(4, 4))}
    held = snapshot.apart(trained, snapshot.place_for(torch.device("cpu"), 64))
    with torch.no_grad():
        trained["weight"].add_(1)
    assert torch.equal(held["weight"], torch.ones(4, 4)) and not held["weight"].requires_grad


@pytest.fixture
def writer(tmp_path):
    made = CheckpointWriter(tmp_path, keep=2)
    yield made
    made.close()


def test_only_the_one_before_of_its_kind_is_waited_for(writer):
    """An evaluation's best weights and a checkpoint may fall on one step; neither makes training wait for the other's disk."""
    disk, written = threading.Event(), []

    def checkpoint(name):
        assert disk.wait(60)
        written.append(name)

    def best(name):
        written.append(name)

    writer.submit(checkpoint, "checkpoint 1")
    writer.submit(best, "best 1")
    assert written == [], "both are on their way, training goes on"
    third = threading.Thread(target=writer.submit, args=(checkpoint, "checkpoint 2"))
    third.start()
    third.join(0.3)
    assert third.is_alive(), "two checkpoints would hold the memory of two"
    disk.set()
    third.join(60)
    writer.wait()
    assert written == ["checkpoint 1", "best 1", "checkpoint 2"], "in the order in which they were handed over"


def test_an_error_of_a_write_is_raised_at_the_next(writer):
    def full_disk():
        raise MustFix("The disk is full")

    def other():
        pass

    writer.submit(full_disk)
    writer._pool.submit(int).result()  # the thread has come past it
    with pytest.raises(MustFix, match="The disk is full"):
        writer.submit(other)
    writer.submit(full_disk)
    with pytest.raises(MustFix, match="The disk is full"):
        writer.wait()
