"""Replicas write one store together: the files are those of one writer, and a crash of one or all costs nothing committed.

Real processes with real locks; what each leaves is read by the reader that knows nothing of replicas.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from stored_rows import layout, response, rows, same

from jobs.errors import MustFix
from jobs.storage.extents import Extent, read_index
from jobs.storage.states import ResponseLog, StateStore, StateWriter
from jobs.storage.writer_group import Member, SharedLineLog

SHARD_ROWS = 13


def opened(folder: Path, number: int, of: int) -> StateWriter:
    form = layout()
    return StateWriter(folder, form, shard_bytes=4096 + form.row_bytes * SHARD_ROWS, extent_rows=4, member=Member(number, of))


def tokens_of(sample: int) -> int:
    return 5 + sample % 17


def write_rows(writer: StateWriter, sample: int, version: int = 0) -> None:
    """A whole sample, durable, not committed."""
    name, length = response(sample, 2).id, tokens_of(sample) - 1
    for first in range(0, length, 3):
        writer.append(name, first, *rows(sample, first, min(3, length - first), version=version))
    writer.finish(name, tokens_of(sample))
    writer.sync()


def commit(folder: Path, samples: list[int]) -> None:
    with ResponseLog(folder) as log:
        for sample in samples:
            log.append(response(sample, tokens_of(sample)))


def assert_whole(folder: Path, samples: range) -> StateStore:
    store = StateStore(folder)
    assert store.ids() == [response(sample, 2).id for sample in samples]
    assert store.verify().problems == []
    for sample in samples:
        assert same(store.read(response(sample, 2).id).taps, rows(sample, 0, tokens_of(sample) - 1)[0])
    return store


def in_process(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001
            os._exit(9)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


def group(folder: Path, of: int, work: Callable[[StateWriter, int], None]) -> list[int]:
    """Processes that write together, the first one opened first, as the engine opens them."""
    folder.mkdir(exist_ok=True)
    for number in range(of):
        (folder / f"open-{number}").unlink(missing_ok=True)

    def member(number: int) -> None:
        writer = opened(folder, number, of)
        (folder / f"open-{number}").touch()
        for other in range(of):
            wait_for(folder / f"open-{other}")
        work(writer, number)
        writer.close()

    children = [in_process(lambda: member(0))]
    wait_for(folder / "open-0")
    return children + [in_process(lambda number=number: member(number)) for number in range(1, of)]


def test_three_writers_make_the_store_one_reader_reads(tmp_path):
    samples = range(60)

    def work(writer: StateWriter, number: int) -> None:
        for sample in samples[number::3]:
            write_rows(writer, sample)

    assert [ended(child) for child in group(tmp_path, 3, work)] == [0, 0, 0]
    commit(tmp_path, list(samples))
    assert_whole(tmp_path, samples)
    by_writer = [
        {extent.shard % 3 for extent in read_index(tmp_path / "index.jsonl") if int(extent.sample[7:10]) % 3 == n} for n in range(3)
    ]
    assert by_writer == [{0}, {1}, {2}], "a writer wrote into another one's shard"
    # And another number of writers continues it: all free rows of the shards there are used before new ones are made.
    with opened(tmp_path, 0, 1) as writer:
        for sample in range(60, 80):
            write_rows(writer, sample)
    commit(tmp_path, list(range(60, 80)))
    assert_whole(tmp_path, range(80))


def test_any_of_them_killed_at_any_moment_loses_nothing_committed(tmp_path):
    """Each sample changes its writer with every start, so an unfinished try of one stands before the whole one of another."""
    folder, samples, turn, kills = tmp_path / "store", range(90), 0, 0

    def durable() -> int:
        return len(list(folder.glob("durable-*")))

    while True:
        done = ResponseLog(folder).ids() if folder.exists() else set()
        of = 2 + turn % 2

        def work(writer: StateWriter, number: int, of: int = of, turn: int = turn, done: set = done) -> None:
            for sample in samples:
                if (sample + turn) % of == number and response(sample, 2).id not in done:
                    write_rows(writer, sample)
                    (folder / f"durable-{sample}").touch()
                    time.sleep(0.005)

        enough, until = durable() + 9 * (turn + 1), time.monotonic() + 60
        children = group(folder, of, work)
        while durable() < min(enough, len(samples)) and time.monotonic() < until:
            time.sleep(0.002)  # by what was written, not by the clock: a fast machine would be done before the first kill
        victims = children if turn % 3 == 0 else children[turn % of :][:1]
        for child in victims:
            os.kill(child, signal.SIGKILL)
        codes = [ended(child) for child in children]
        assert 9 not in codes
        kills += any(codes)
        commit(folder, [s for s in samples if (folder / f"durable-{s}").exists() and response(s, 2).id not in done])
        store = StateStore(folder)
        assert store.verify().problems == []
        if len(store) == len(samples):
            break
        turn += 1
    assert kills >= 2
    store = assert_whole(folder, samples)
    shards = len(list(folder.glob("shard-*.safetensors")))
    assert shards * SHARD_ROWS < sum(store.lengths().values()) * 1.7 + 9 * SHARD_ROWS  # killed attempts left no growing waste


def test_nobody_else_writes_while_one_of_them_lives(tmp_path, monkeypatch):
    """Whatever group the other one belongs to, and however few of this one are left: its engine may be an orphan."""
    monkeypatch.setattr("jobs.storage.files.LOCK_WAIT_SECONDS", 0.2)
    children = group(tmp_path, 3, lambda writer, number: time.sleep(60))
    wait_for(tmp_path / "open-2")
    for child in children[:2]:
        os.kill(child, signal.SIGKILL)
        ended(child)
    for number, of in ((0, 1), (0, 2), (0, 3)):
        with pytest.raises(MustFix, match="Another process is using this state store"):
            opened(tmp_path, number, of)
    os.kill(children[2], signal.SIGKILL)
    ended(children[2])
    opened(tmp_path, 0, 1).close()


def test_a_line_that_a_dying_writer_left_is_cut_by_the_next_one(tmp_path):
    line = Extent("a#0", 0, 0, 0, 4, "0" * 16).line()
    path = tmp_path / "index.jsonl"
    ours, theirs = SharedLineLog(path), SharedLineLog(path)
    ours.append(line)
    os.write(theirs._descriptor, line[:17])  # and there it died
    ours.append(line)
    theirs.append(line)
    ours.close()
    theirs.close()
    assert path.read_bytes() == (line + b"\n") * 3
    assert len(list(read_index(path))) == 3
