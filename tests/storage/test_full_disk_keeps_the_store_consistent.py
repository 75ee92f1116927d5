"""A full disk is a MustFix with path and free bytes; what was committed stays, and freeing space lets the run go on.

A real small file system: a tmpfs mounted for the test, which needs root and the right to mount.
"""

import os
import subprocess

import pytest
from stored_rows import layout, response, rows, same, write

from jobs.errors import MustFix
from jobs.storage.files import write_atomically
from jobs.storage.states import ResponseLog, StateStore, StateWriter


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs is not allowed here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_in_the_middle_of_an_answer(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(512 * 1024))
    store, form, sample = small_disk / "states", layout(hidden_size=256), 0
    writer = StateWriter(store, form, shard_bytes=64 * 1024, extent_rows=4)
    log = ResponseLog(store)
    with pytest.raises(MustFix, match=r"The disk is full: [\d,]+ bytes are free \(.*states.*\): free space") as failure:
        for sample in range(1000):
            write(writer, log, sample, 12, hidden_size=256)
    assert failure.value.exit_code == 78
    committed = [response(done, 12).id for done in range(sample)]
    assert committed and StateStore(store).ids() == committed
    assert StateStore(store).verify().problems == []

    ballast.unlink()  # the same process goes on with the same sample
    write(writer, log, sample, 12, hidden_size=256)
    writer.close()
    log.close()
    reader = StateStore(store)
    assert reader.ids() == [*committed, response(sample, 12).id] and reader.verify().problems == []
    assert same(reader.read(response(sample, 12).id).taps, rows(sample, 0, 11, 256)[0])

    with StateWriter(store, form, shard_bytes=64 * 1024, extent_rows=4) as again, ResponseLog(store) as log:
        write(again, log, 999, 12, hidden_size=256)
    assert StateStore(store).verify().problems == []


def test_a_full_disk_behind_the_callers_back(small_disk):
    """A write in the thread fails: a later call says so, what was told durable is whole, and the next start goes on."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(512 * 1024))
    store, form, told = small_disk / "states", layout(hidden_size=256), []
    writer = StateWriter(store, form, shard_bytes=64 * 1024, extent_rows=4)
    writer.write_behind()
    with ResponseLog(store) as log:
        with pytest.raises(MustFix, match=r"The disk is full: [\d,]+ bytes are free \(.*states.*\): free space"):
            for sample in range(1000):
                answer = response(sample, 12)
                for first in (0, 3, 6, 9):
                    writer.append(answer.id, first, *rows(sample, first, min(3, 11 - first), 256))
                writer.finish(answer.id, 12)
                writer.sync_then(lambda answer=answer: told.append(answer))
                writer.sync()
        assert isinstance(writer.failure, MustFix)
        with pytest.raises(MustFix, match="The disk is full"):
            writer.close()
        ballast.unlink()
        for answer in told:
            log.append(answer)
    kept = [answer.id for answer in told]
    assert kept and StateStore(store).ids() == kept and StateStore(store).verify().problems == []
    with StateWriter(store, form, shard_bytes=64 * 1024, extent_rows=4) as again, ResponseLog(store) as log:
        write(again, log, 999, 12, hidden_size=256)  # into rows that nobody committed
    assert StateStore(store).verify().problems == []


def test_a_full_disk_takes_a_half_written_line_back(small_disk):
    with ResponseLog(small_disk) as log:
        log.append(response(1, 10))
        before = (small_disk / "responses.jsonl").read_bytes()
        with pytest.raises(MustFix, match="The disk is full"):
            log.append(response(2, 300_000))
        assert (small_disk / "responses.jsonl").read_bytes() == before
        log.append(response(3, 10))
        assert [answer.id for answer in log] == ["prompt-001#0", "prompt-003#0"]


def test_an_atomic_write_on_a_full_disk_leaves_the_old_file(small_disk):
    path = small_disk / "run.json"
    write_atomically(path, b"old")
    with pytest.raises(MustFix, match=r"The disk is full: .*run.json"):
        write_atomically(path, bytes(2 << 20))
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in small_disk.iterdir()] == ["run.json"]
