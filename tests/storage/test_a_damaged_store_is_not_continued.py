"""A run continues no store whose shard or index is damaged: one sentence, exit code 78, nothing touched; restored, it goes on."""

import shutil
from pathlib import Path

import pytest
import torch

from jobs.errors import MustFix
from jobs.storage.states import Response, ResponseLog, StateLayout, StateStore, StateWriter

LAYOUT = StateLayout((2, 5, 7), 64, "float32", "tiny", "r", "0" * 64)
TOKENS, SAMPLES = 60, 6


def writer(folder: Path) -> StateWriter:
    return StateWriter(folder, LAYOUT, shard_bytes=1 << 18, extent_rows=16)


def add(folder: Path, samples: range) -> None:
    opened, generator = writer(folder), torch.Generator().manual_seed(0)
    try:
        for i in samples:
            rows = TOKENS - 1
            opened.append(
                f"s{i}#0", 0, torch.randn(rows, 3, 64, generator=generator), torch.randn(rows, 64, generator=generator), torch.zeros(rows)
            )
            opened.finish(f"s{i}#0", TOKENS)
        opened.sync()
        with ResponseLog(folder) as log:
            for i in samples:
                log.append(Response(f"s{i}#0", [1] * 20, [2] * 40, "stop", {}, "test", False))
    finally:
        opened.close()


def cut(folder: Path) -> Path:
    shard = folder / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    return shard


def gone(folder: Path) -> Path:
    (folder / "shard-00001.safetensors").unlink()
    return folder / "shard-00001.safetensors"


def flipped(path: Path, at: int) -> Path:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)
    return path


DAMAGE = {
    "a shard that was cut": (cut, "length does not fit its header"),
    "a shard that is gone": (gone, "shard of the state store is missing"),
    "a shard's header": (lambda folder: flipped(folder / "shard-00000.safetensors", 20), "header is damaged"),
    "a line in the middle of the index": (lambda folder: flipped(folder / "index.jsonl", 150), "index.jsonl is damaged"),
    "an answer in the middle": (lambda folder: flipped(folder / "responses.jsonl", 150), "responses.jsonl is not a response"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_it_is_refused_and_goes_on_when_the_file_is_restored(kind, tmp_path):
    damage, message = DAMAGE[kind]
    folder, sound = tmp_path / "states", tmp_path / "sound"
    add(folder, range(SAMPLES))
    shutil.copytree(folder, sound)
    hurt = damage(folder)
    left = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(MustFix, match=message) as refused:
        add(folder, range(SAMPLES, SAMPLES + 1))
    assert refused.value.exit_code == 78 and str(folder) in refused.value.sentence() and "restore" in refused.value.sentence()
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == left, "the refusal touched the store"
    shutil.copy(sound / hurt.name, hurt)
    add(folder, range(SAMPLES, SAMPLES + 1))
    store = StateStore(folder)
    assert len(store.ids()) == SAMPLES + 1 and store.verify().problems == []
    before = StateStore(sound)
    for sample_id in before.ids():
        assert torch.equal(store.read(sample_id).taps, before.read(sample_id).taps)


def test_rows_that_rotted_are_found_by_verify_not_by_reading_terabytes_at_each_start(tmp_path):
    add(tmp_path, range(SAMPLES))
    shard = tmp_path / "shard-00000.safetensors"
    flipped(shard, shard.stat().st_size // 3)
    add(tmp_path, range(SAMPLES, SAMPLES + 1))
    (problem,) = StateStore(tmp_path).verify().problems
    assert problem.what == "the checksum of the rows is wrong" and problem.shard == shard.name
