"""A crash at any moment loses at most what was not committed, and never mixes rows.

Two kinds of crash: images of the folder as a power cut may leave it (every unsynced byte optional),
made by hypothesis, and real SIGKILLs of a real writing process.
"""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_rows import layout, response, rows, same, write

from jobs.errors import MustFix
from jobs.storage.extents import read_index
from jobs.storage.states import ResponseLog, StateLayout, StateStore, StateWriter

SHARD_ROWS = 13


def open_store(folder: Path, form: StateLayout) -> tuple[StateWriter, ResponseLog]:
    writer = StateWriter(folder, form, shard_bytes=4096 + form.row_bytes * SHARD_ROWS, extent_rows=4)
    return writer, ResponseLog(folder)


class Model:
    """What should be in the store: the newest version of each row of a sample being written, and the committed ones."""

    def __init__(self):
        self.open: dict[int, dict[int, int]] = {}  # sample -> position -> version
        self.committed: dict[int, list[int]] = {}  # sample -> versions of positions 0 to n - 2
        self.next_sample = 0

    def check(self, folder: Path) -> None:
        store = StateStore(folder)
        assert store.ids() == sorted(response(sample, 2).id for sample in self.committed)
        assert store.verify().problems == []
        for sample, versions in self.committed.items():
            read = store.read(response(sample, 2).id)
            expected = [rows(sample, position, 1, version=version) for position, version in enumerate(versions)]
            for got, parts in zip((read.taps, read.final, read.logprob), zip(*expected, strict=True), strict=True):
                assert same(got, torch.cat(parts))


def crash_image(folder: Path, to: Path, synced: dict[str, int], draw) -> None:
    """A copy of the folder as a power cut may leave it: logs cut anywhere behind their last fsync, and
    the rows of extents that were never synced overwritten."""
    shutil.copytree(folder, to)
    index, form = to / "index.jsonl", StateLayout.load(to)
    unsynced = list(read_index(index))[synced["extents"] :]
    for extent in unsynced:
        if draw(st.booleans()):
            with open(to / f"shard-{extent.shard:05d}.safetensors", "r+b") as file:
                logprob = 4096 + 4 * extent.row  # the first tensor of a float32 store
                file.seek(logprob)
                file.write(b"\xaa" * 4 * extent.rows)
    size = index.stat().st_size
    os.truncate(index, draw(st.integers(min(synced["index"], size), size)))
    if draw(st.booleans()):
        with open(to / "responses.jsonl", "ab") as file:  # the line that was being written
            file.write(b'{"id":"prompt-999#0","prompt_token_ids":[1,2'[: draw(st.integers(1, 40))])
    assert form.hidden_size == 8


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_order_of_appends_and_any_crash_point(data, tmp_path_factory):
    form, model, number = layout(), Model(), 0
    folder = tmp_path_factory.mktemp("store") / "0"
    writer, log = open_store(folder, form)
    synced = {"extents": 0, "index": 0}
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["append"] * 6 + ["finish"] * 3 + ["begin", "discard", "crash"]))
        if action == "begin" or not model.open:
            model.open[model.next_sample] = {}
            model.next_sample += 1
            continue
        sample = data.draw(st.sampled_from(sorted(model.open)))
        versions, sample_id = model.open[sample], response(sample, 2).id
        if action == "append":
            first = data.draw(st.integers(0, len(versions)))  # behind the end so far, or a preemption's return
            count = data.draw(st.integers(1, 9))
            version = data.draw(st.integers(0, 9))
            writer.append(sample_id, first, *rows(sample, first, count, version=version))
            versions.update(dict.fromkeys(range(first, first + count), version))
        elif action == "finish" and versions:
            tokens = data.draw(st.integers(max(len(versions) - 2, 2), len(versions) + 1))
            writer.finish(sample_id, tokens)
            writer.sync()
            log.append(response(sample, tokens))
            model.committed[sample] = [model.open[sample][position] for position in range(tokens - 1)]
            del model.open[sample]
            index = folder / "index.jsonl"
            synced = {"extents": len(list(read_index(index))), "index": index.stat().st_size}
        elif action == "discard":
            writer.discard(sample_id)
            versions.clear()  # it may be generated again under the same id
        elif action == "crash":
            number += 1
            image = folder.with_name(str(number))
            crash_image(folder, image, synced, data.draw)
            model.check(image)  # a reader needs no repair
            writer.close()
            log.close()
            folder = image
            writer, log = open_store(folder, form)
            for lost in model.open.values():
                lost.clear()
    writer.close()
    log.close()
    model.check(folder)
    writer, log = open_store(folder, form)
    write(writer, log, 900, 20)  # reopened rows can be used again without harm
    writer.close()
    log.close()
    model.committed[900] = [0] * 19
    model.check(folder)


def write_until_killed(folder: Path, samples: int) -> None:
    writer, log = open_store(folder, layout())
    for sample in range(samples):
        if response(sample, 2).id not in log.ids():
            write(writer, log, sample, 5 + sample % 17, chunk=1 + sample % 6)
    writer.close()
    log.close()


def test_sigkill_of_the_writing_process(tmp_path):
    """Killed at growing moments until the work is done; nothing committed is lost or written twice."""
    samples, kills, folder = 150, 0, tmp_path / "store"
    for turn in range(60):
        child = os.fork()
        if child == 0:
            write_until_killed(folder, samples)
            os._exit(0)
        time.sleep(0.05 + 0.1 * turn)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            break
        kills += 1
    assert os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
    assert kills >= 2
    store = StateStore(folder)
    assert len(store) == samples and store.verify().problems == []
    for sample in range(samples):
        assert same(store.read(response(sample, 2).id).taps, rows(sample, 0, 4 + sample % 17)[0])
    used = sum(store.lengths().values())
    shards = len(list(folder.glob("shard-*.safetensors")))
    assert shards * SHARD_ROWS < used * 1.7 + 3 * SHARD_ROWS  # killed attempts left no growing waste


def test_torn_last_lines_are_cut_and_the_cut_is_said(tmp_path):
    writer, log = open_store(tmp_path, layout())
    write(writer, log, 1, 10)
    writer.close()
    log.close()
    for name, tail in (("index.jsonl", b'{"sample":"prompt-0'), ("responses.jsonl", b'{"id":"x"\0\0\0\0')):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole + tail)
        writer, log = open_store(tmp_path, layout())
        assert {"index.jsonl": writer._index, "responses.jsonl": log._log}[name].cut_bytes == len(tail)
        writer.close()
        log.close()
        assert (tmp_path / name).read_bytes() == whole
    assert StateStore(tmp_path).ids() == ["prompt-001#0"]


def test_damage_in_the_middle_is_not_taken_for_a_torn_tail(tmp_path):
    writer, log = open_store(tmp_path, layout())
    for sample in (1, 2):
        write(writer, log, sample, 10)
    writer.close()
    log.close()
    index = (tmp_path / "index.jsonl").read_bytes()
    (tmp_path / "index.jsonl").write_bytes(index.replace(b'"row":0', b'"row":1', 1))
    with pytest.raises(MustFix, match="Line 1 of index.jsonl is damaged: its checksum is wrong"):
        StateStore(tmp_path)
    with pytest.raises(MustFix, match="Line 1 of index.jsonl is damaged"):
        StateWriter(tmp_path, layout())


def test_a_shard_that_was_being_made_is_cleared_away(tmp_path):
    (tmp_path / "shard-00000.safetensors.partial").write_bytes(b"half a header")
    writer, log = open_store(tmp_path, layout())
    write(writer, log, 1, 10)
    writer.close()
    log.close()
    assert StateStore(tmp_path).verify().problems == []
    assert not list(tmp_path.glob("*.partial"))
