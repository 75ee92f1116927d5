"""Atomic writes and line logs under readers, SIGKILL and bad content."""

import hashlib
import json
import os
import shutil
import signal
import threading
import time

import pytest

from jobs.errors import MustFix
from jobs.storage.files import (
    JsonLog,
    files_under,
    held,
    read_json,
    sha256_file,
    whole_lines,
    write_atomically,
    write_json_atomically,
)


def test_a_reader_sees_the_old_or_the_new_file(tmp_path):
    path, done, seen = tmp_path / "run.json", threading.Event(), set()
    contents = [bytes([65 + number]) * 200_000 for number in range(4)]
    write_atomically(path, contents[0])

    def read() -> None:
        while not done.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(60):
        write_atomically(path, contents[turn % 4])
    done.set()
    reader.join()
    assert len(seen) > 1 and seen <= set(contents)


def test_sigkill_leaves_the_old_or_the_new_file(tmp_path):
    path = tmp_path / "run.json"
    write_json_atomically(path, {"turn": -1, "filler": "x" * 300_000})
    for delay in (0.01, 0.02, 0.03, 0.05, 0.08):
        child = os.fork()
        if child == 0:
            for turn in range(100_000):
                write_json_atomically(path, {"turn": turn, "filler": "x" * 300_000})
            os._exit(0)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert len(read_json(path)["filler"]) == 300_000


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="Out of range float"):
        write_json_atomically(tmp_path / "a.json", {"loss": float("nan")})
    with pytest.raises(IsADirectoryError):
        (tmp_path / "folder").mkdir()
        write_atomically(tmp_path / "folder", b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def test_sha256_is_that_of_hashlib_and_reports_bytes(tmp_path):
    path, blocks = tmp_path / "file", []
    content = os.urandom(5 << 20)
    path.write_bytes(content)
    assert sha256_file(path, blocks.append) == hashlib.sha256(content).hexdigest()
    assert sum(blocks) == len(content)


def objects(path):
    return [json.loads(line) for _, _, line in whole_lines(path)]


def test_a_log_continues_after_a_torn_line(tmp_path):
    path = tmp_path / "events.jsonl"
    log = JsonLog(path)
    log.append_json({"event": 1}, sync=True)
    log.close()
    with open(path, "ab") as file:
        file.write(b'{"event": 2')
    assert objects(path) == [{"event": 1}]
    log = JsonLog(path)
    assert log.cut_bytes == len(b'{"event": 2')
    log.append_json({"event": 3, "text": "ü"})
    log.close()
    assert objects(path) == [{"event": 1}, {"event": 3, "text": "ü"}]


def test_looking_through_a_folder_in_which_others_write(tmp_path):
    """`Path.rglob` raises here within a second: preflight refused good runs, and the rental's watch would have ended."""
    over = threading.Event()

    def write():
        while not over.is_set():
            folder = tmp_path / "checkpoints" / "step-1"
            folder.mkdir(parents=True)
            (folder / "weights").write_bytes(b"1234")
            shutil.rmtree(tmp_path / "checkpoints")

    (tmp_path / "kept").write_bytes(b"12345678")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    writer = threading.Thread(target=write)
    writer.start()
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            sizes = {path.name: found.st_size for path, found in files_under(tmp_path)}
            assert sizes["kept"] == 8 and sizes.get("weights", 4) in (0, 4) and "link" not in sizes
    finally:
        over.set()
        writer.join()


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"a": 1}\n\0\0\0\n{"a": 2}\n')
    with pytest.raises(MustFix, match="Line 2 of prompts.jsonl is damaged"):
        objects(path)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(MustFix, match="bad.json is not JSON"):
        read_json(tmp_path / "bad.json")


def test_a_lock_is_let_go_by_a_killed_process(tmp_path, monkeypatch):
    monkeypatch.setattr("jobs.storage.files.LOCK_WAIT_SECONDS", 0.3)
    path, (read_end, write_end) = tmp_path / "lock", os.pipe()
    child = os.fork()
    if child == 0:
        with held(path, what="it"):
            os.write(write_end, b"held")
            time.sleep(60)
    assert os.read(read_end, 4) == b"held"
    with pytest.raises(MustFix, match="Another process is using it"), held(path, what="it"):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with held(path, what="it", remove=True):
        assert path.exists()
    assert not path.exists()
