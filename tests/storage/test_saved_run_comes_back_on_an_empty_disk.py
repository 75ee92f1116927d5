"""A run saved while it goes on: only what changed is sent, any state read back is consistent, one machine at a time."""

import json
import os
import shutil
import threading
import time

import pytest
import torch
from publications import MIB, contents, killed_at

from jobs.errors import Interrupted, MustFix
from jobs.storage.restored_run import restore
from jobs.storage.saved_run import NotOurs, RunSaver, place_beside, record_of
from jobs.storage.states import Response, ResponseLog, StateLayout, StateStore, StateWriter

WIDTH = 64
# The first test runs on every kind of place; what follows depends little on it.
on_a_bucket_and_a_folder = pytest.mark.parametrize("place", ["rclone", "file"], indirect=True)


def make_run(folder, *, run_id="one", stage="train"):
    """A run directory of 12 MiB: a ledger, two checkpoints, a half-written one, and what is not to be saved."""
    for step, fill in ((100, b"a"), (200, b"b")):
        checkpoint(folder, step, fill)
    for name in (
        "checkpoints/step-000300.partial/weights.safetensors",
        ".lock",
        "published/model.safetensors",
        "superseded/x/y",
        "states/eval/writer.lock",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"not to be saved")
    (folder / "empty.jsonl").touch()
    (folder / "prompts.jsonl").write_text("{}\n")
    ledger(folder, run_id, stage)
    return folder


def ledger(folder, run_id="one", stage="train", status="running"):
    stages = {name: {"state": "pending"} for name in ("fetch", "generate.eval", "generate.train", "train")}
    stages[stage]["started"] = "2026-01-01T00:00:00Z"
    (folder / "run.json").write_text(json.dumps({"run_id": run_id, "job": "hero", "status": status, "stages": stages}))


def checkpoint(folder, step, fill):
    target = folder / "checkpoints" / f"step-{step:06d}"
    target.mkdir(parents=True)
    (target / "weights.safetensors").write_bytes(fill * (6 * MIB))
    (target / "checkpoint.json").write_text(json.dumps({"step": step}))


def saved_names(folder):
    return sorted(name for name in contents(folder) if not name.startswith("."))


def saver(folder, place, **options):
    uri, settings = place
    return RunSaver(folder, uri, settings, **{"run_id": "one"} | options)


def age(folder):
    """As if everything had been written a while ago: only then a file is known by its time."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(time.time_ns() - 10**10,) * 2)


def test_a_run_comes_back_with_its_newest_checkpoint_and_times(place, tmp_path):
    run = make_run(tmp_path / "run")
    done = saver(run, place).save()
    assert done.bytes_sent == done.bytes > 6 * MIB
    state = restore(place[0], tmp_path / "back", place[1])
    assert state["job"] == "hero" and state["paid"]
    assert saved_names(tmp_path / "back") == [
        "checkpoints/step-000200/checkpoint.json",
        "checkpoints/step-000200/weights.safetensors",
        "empty.jsonl",
        "prompts.jsonl",
        "run.json",
    ]
    for name in saved_names(tmp_path / "back"):
        assert (tmp_path / "back" / name).read_bytes() == (run / name).read_bytes()
        assert (tmp_path / "back" / name).stat().st_mtime_ns == (run / name).stat().st_mtime_ns, (
            "the ledger names large files by their times"
        )


@on_a_bucket_and_a_folder
def test_only_what_changed_is_sent_and_what_is_old_is_removed(place, tmp_path):
    run = make_run(tmp_path / "run")
    age(run)
    first = saver(run, place)
    first.save()
    again = first.save()
    assert again.bytes_sent == 0
    checkpoint(run, 300, b"c")
    with open(run / "prompts.jsonl", "a") as file:
        file.write("{}\n")
    sent = first.save().bytes_sent
    assert 6 * MIB < sent < 6 * MIB + 1000 or sent < 6 * MIB  # equal blocks of one checkpoint are sent once
    blocks = {name.rpartition("/")[2] for name in first.place.names("blocks/")}
    state = json.loads(first.place.read_small("state.json"))
    assert blocks == {block for file in state["files"].values() for block in file["blocks"]}, "nothing stays that no state needs"
    # A new process of the same run reads nothing again and takes over its own place.
    assert saver(run, place).save().bytes_sent == 0


@on_a_bucket_and_a_folder
def test_a_killed_save_goes_on_and_the_state_before_stands(place, tmp_path):
    run = make_run(tmp_path / "run")
    age(run)
    saver(run, place).save()
    (run / "checkpoints" / "step-000300").mkdir()
    (run / "checkpoints" / "step-000300" / "weights.safetensors").write_bytes(os.urandom(17 * MIB))
    (run / "checkpoints" / "step-000300" / "checkpoint.json").write_text("{}")

    def dies(progress):
        sent = []

        def should_stop():
            sent.append(1)
            progress(len(sent), 0)
            return False

        saver(run, place).save(should_stop)

    killed_at(2, dies)
    restore(place[0], tmp_path / "before", place[1])
    assert (tmp_path / "before" / "checkpoints" / "step-000200").is_dir()
    assert saver(run, place).save().bytes > 17 * MIB
    restore(place[0], tmp_path / "back", place[1])
    assert (tmp_path / "back/checkpoints/step-000300/weights.safetensors").read_bytes() == (
        run / "checkpoints/step-000300/weights.safetensors"
    ).read_bytes()


@on_a_bucket_and_a_folder
def test_a_stopped_save_says_so(place, tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(Interrupted):
        saver(run, place).save(lambda: True)
    assert restore(place[0], tmp_path / "back", place[1]) is None


@on_a_bucket_and_a_folder
def test_an_interrupted_restore_goes_on_and_leaves_no_run(place, tmp_path):
    run, told = make_run(tmp_path / "run"), []
    saver(run, place).save()
    killed_at(1, lambda progress: restore(place[0], tmp_path / "back", place[1], progress=progress))
    assert not (tmp_path / "back" / "run.json").exists()
    restore(place[0], tmp_path / "back", place[1], progress=lambda *p: told.append(p))
    assert told[-1][0] == told[-1][1]
    assert (tmp_path / "back/checkpoints/step-000200/weights.safetensors").read_bytes() == b"b" * (6 * MIB)
    with pytest.raises(MustFix, match="holds a run already"):
        restore(place[0], tmp_path / "back", place[1])


@on_a_bucket_and_a_folder
def test_a_damaged_block_is_refused(place, tmp_path):
    one = saver(make_run(tmp_path / "run"), place)
    one.save()
    name = next(iter(one.place.names("blocks/")))
    one.place.write_small(name, b"damaged")
    with pytest.raises(MustFix, match="is damaged"):
        restore(place[0], tmp_path / "back", place[1])
    assert not (tmp_path / "back" / "run.json").exists()


@on_a_bucket_and_a_folder
def test_two_machines_never_continue_one_run(place, tmp_path):
    run = make_run(tmp_path / "run")
    here = saver(run, place)
    here.save()
    restore(place[0], tmp_path / "there", place[1])
    there = saver(tmp_path / "there", place)
    there.save()
    with pytest.raises(NotOurs, match="has taken this run over"):
        here.save()
    with pytest.raises(NotOurs, match="was continued on another machine"):
        saver(run, place).save()
    there.save()


def die_once_the_state_stands(one):
    """Save in a process that is killed after `state.json` has arrived and before this machine has noted it."""

    def save(progress):
        write_small = one.place.write_small

        def written(name, data, **options):
            write_small(name, data, **options)
            if name == "state.json":
                progress(1, 1)

        one.place.write_small = written
        one.save()

    killed_at(1, save)


@on_a_bucket_and_a_folder
def test_a_machine_killed_before_it_noted_its_save_is_not_locked_out(place, tmp_path):
    run = make_run(tmp_path / "run")
    for number in range(3):  # in its first save, and in one that follows a death like that
        one = saver(run, place)
        die_once_the_state_stands(one)
        assert json.loads(one.place.read_small("state.json"))["token"] == one.token and "uri" not in record_of(run), number
    with pytest.raises(NotOurs, match="was continued on another machine"):
        saver(make_run(tmp_path / "copy"), place).save()
    restore(place[0], tmp_path / "there", place[1])
    saver(run, place).save()
    die_once_the_state_stands(saver(run, place))
    saver(run, place).save()
    with pytest.raises(NotOurs, match="was continued on another machine"):
        saver(tmp_path / "there", place).save()


@on_a_bucket_and_a_folder
def test_a_run_that_was_saved_elsewhere_as_well_is_not_locked_out(place, tmp_path):
    run = make_run(tmp_path / "run")
    saver(run, place).save()
    saver(run, (f"{place[0]}-whole", place[1])).save()
    saver(run, place).save()


@on_a_bucket_and_a_folder
def test_a_record_older_than_the_state_names_no_block_that_is_gone(place, tmp_path):
    """The newest checkpoint is removed again after a save that was not noted: the one before it has to be sent again."""
    run = make_run(tmp_path / "run")
    age(run)
    saver(run, place).save()
    checkpoint(run, 300, b"c")
    die_once_the_state_stands(saver(run, place))
    shutil.rmtree(run / "checkpoints/step-000300")
    saver(run, place).save()
    restore(place[0], tmp_path / "back", place[1])
    assert (tmp_path / "back/checkpoints/step-000200/weights.safetensors").read_bytes() == b"b" * (6 * MIB)


@on_a_bucket_and_a_folder
def test_another_runs_paid_work_is_not_overwritten(place, tmp_path):
    saver(make_run(tmp_path / "run"), place).save()
    other = make_run(tmp_path / "other", run_id="two")
    with pytest.raises(NotOurs, match="An unfinished run of 'hero' is saved there"):
        saver(other, place, run_id="two").save()
    ledger(tmp_path / "run", status="done")
    saver(tmp_path / "run", place).save()
    saver(other, place, run_id="two").save()  # a finished one may be replaced


@on_a_bucket_and_a_folder
def test_rows_that_are_not_written_yet_cost_one_block(place, tmp_path):
    """A shard has its full size from the start: what is sent are the blocks with rows in them and one of zeros."""
    run, rows = make_run(tmp_path / "run"), os.urandom(MIB)
    shard = run / "states" / "train" / "shard-00000.safetensors"
    shard.parent.mkdir(parents=True)
    with open(shard, "wb") as file:
        file.write(rows)
        file.truncate(64 * MIB)
    before = saver(make_run(tmp_path / "without", run_id="two"), (f"{place[0]}-without", place[1]), run_id="two").save().bytes_sent
    done = saver(run, place).save()
    assert done.bytes > 64 * MIB and done.bytes_sent - before <= 3 * place[1].part_mib * MIB  # the last one is shorter
    restore(place[0], tmp_path / "back", place[1])
    back = (tmp_path / "back/states/train/shard-00000.safetensors").read_bytes()
    assert back == rows + bytes(63 * MIB)


def test_the_place_beside_a_head():
    assert place_beside("s3://bucket/kimi/head") == "s3://bucket/kimi/head.run"
    assert place_beside("s3://bucket") == "s3://bucket/run"
    assert place_beside("file:///mnt/heads/one/") == "file:///mnt/heads/one.run"


@on_a_bucket_and_a_folder
def test_states_saved_while_they_are_written_are_a_whole_store(tmp_path, place):
    """Saved again and again under a writer; what comes back passes the store's own verification, every time."""
    run = make_run(tmp_path / "run")
    folder = run / "states" / "train"
    layout = StateLayout(taps=(1, 2, 3), hidden_size=WIDTH, dtype="float32", verifier="v", verifier_revision="r", tokenizer_sha256="t")
    stop, written = threading.Event(), []

    def write():
        with StateWriter(folder, layout, shard_bytes=1 << 18, extent_rows=4) as writer, ResponseLog(folder) as log:
            for number in range(10_000):
                if stop.is_set():
                    return
                rows = 5 + number % 20
                sample = f"p{number}#0"
                writer.append(
                    sample, 0, torch.full((rows, 3, WIDTH), float(number)), torch.full((rows, WIDTH), float(number)), torch.zeros(rows)
                )
                writer.finish(sample, rows + 1)
                writer.sync()
                log.append(
                    Response(
                        id=sample,
                        prompt_token_ids=[1],
                        response_token_ids=[2] * rows,
                        finish_reason="stop",
                        sampling={},
                        source="s",
                        thinking=False,
                    )
                )
                written.append(sample)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        while len(written) < 20:
            time.sleep(0.01)
        one = saver(run, place)
        for attempt in range(3):
            one.save()
            restore(place[0], tmp_path / f"back{attempt}", place[1])
    finally:
        stop.set()
        thread.join()
    for attempt in range(3):
        store = StateStore(tmp_path / f"back{attempt}" / "states" / "train")
        assert len(store.ids()) >= 20
        store.verify().require(store.folder)
    with StateWriter(tmp_path / "back0" / "states" / "train", layout, shard_bytes=1 << 18, extent_rows=4):
        pass  # and a writer goes on with it
    shutil.rmtree(run)
