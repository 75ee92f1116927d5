"""However many folders lie on a file system and however much is wanted there: one sentence, with the sum."""

import json
import subprocess

import pytest
from test_preflight_finds_what_would_fail import context, small_disk

from jobs.errors import MustFix
from jobs.stages import preflight
from jobs.stages.preflight import room

ON_A_DISK = ("disk", "writable", "destination")


@pytest.fixture
def problems_of(monkeypatch):
    """problems_of(made) -> the sentences of a preflight that looks at the disk alone."""
    monkeypatch.setattr(preflight, "CHECKS", {name: preflight.CHECKS[name] for name in ON_A_DISK})
    monkeypatch.setattr(preflight, "IN_THE_MAIN_THREAD", ())

    def problems(made) -> list[str]:
        try:
            preflight.run(made)
        except MustFix as error:
            return error.problems
        finally:
            made.run.close()
        return []

    return problems


@pytest.mark.parametrize("full", [False, True])
def test_a_small_disk_with_everything_on_it(tmp_path, monkeypatch, problems_of, full):
    with small_disk(tmp_path / "disk", 100) as disk:
        for name in ("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "HOME", "HF_HOME"):
            monkeypatch.setenv(name, str(disk / name.lower()))
        made = context(disk, f"push.backup_uri=file://{disk}/copy")
        if full:
            with pytest.raises(OSError, match="No space left"):
                (disk / "ballast").write_bytes(bytes(100 << 20))
        (sentence,) = problems_of(made)
    assert sentence.startswith(f"{disk}/run has 0.{'0' if full else '1'} GB free, about ") and "GB more are needed there (" in sentence
    assert "for the run" in sentence and f"for its copy in {disk}/copy" in sentence and "2.1 to spare)" in sentence
    assert "a test file of 256 MiB" in sentence and "could not be written (No space left on device): take a larger disk" in sentence
    assert not full or f"the destination {disk}/run/published" in sentence


def test_a_disk_on_which_nothing_can_be_made_any_more(tmp_path, monkeypatch, problems_of):
    """No space is not the only thing a file system can lack: here it is inodes."""
    with small_disk(tmp_path / "disk", 100) as disk:
        subprocess.run(["mount", "-o", "remount,nr_inodes=4", str(disk)], check=True)
        for name in ("TRITON_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME"):
            monkeypatch.setenv(name, str(disk / name.lower()))
        (sentence,) = problems_of(context(tmp_path))
    assert sentence.startswith(f"{disk}/")
    assert f"the TORCHINDUCTOR_CACHE_DIR {disk}/torchinductor_cache_dir" in sentence and f"and the VLLM_CACHE_ROOT {disk}/" in sentence
    assert "could not be written (No space left on device): free space or remove files there" in sentence


def test_a_volume_that_is_read_only_is_one_sentence(tmp_path, monkeypatch, problems_of):
    with small_disk(tmp_path / "volume", 4) as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(folder / "vllm"))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        (sentence,) = problems_of(context(tmp_path))
    named = f"the TRITON_CACHE_DIR {folder}/triton and the VLLM_CACHE_ROOT {folder}/vllm"
    assert sentence == f"{named} cannot be written by user 0 (Read-only file system): mount them writable"


def test_what_fits_alone_may_not_fit_together(tmp_path):
    free = room.shutil.disk_usage(tmp_path).free
    each = 0.6 * free - room.SPARE_BYTES
    measured = {}
    room.need(measured, "what is fetched into the cache", tmp_path / "cache" / "not there yet", each)
    assert list(room.problems(measured)) == []
    room.need(measured, room.THE_RUN, tmp_path, each + 1)
    (sentence,) = room.problems(measured)
    assert sentence.startswith(
        f"{tmp_path} has {free / 1e9:.1f} GB free, about {(2 * each + room.SPARE_BYTES) / 1e9:.1f} GB more are needed"
    )
    assert json.loads(json.dumps(measured)) == measured, "it stands in preflight.json"


def test_each_file_system_has_its_own_sentence(tmp_path):
    measured = {}
    with small_disk(tmp_path / "cache", 10) as cache:
        room.need(measured, room.THE_RUN, tmp_path, 1e18)
        room.need(measured, f"what is fetched into {cache}", cache, 1e9)
        room.failed(measured, "the HF_HOME", cache, "No space left on device")
        run, fetched = room.problems(measured)
    assert run.startswith(f"{tmp_path} has") and "the run needs about 1000000002.1 GB more there: take a larger disk or fewer" in run
    assert f"{cache} has 0.0 GB free, what is fetched into {cache} needs about 3.1 GB more there" in fetched
    assert "and the HF_HOME could not be written (No space left on device): free space" in fetched and "samples" not in fetched


def test_what_is_written_already_is_not_needed_again(tmp_path, problems_of, monkeypatch):
    free = room.shutil.disk_usage(tmp_path).free
    monkeypatch.setattr(preflight, "expected_bytes", lambda _: free)
    written = {"run": 0, "copy": 0}
    monkeypatch.setattr(room, "bytes_under", lambda folder: written[folder.name])
    (tmp_path / "copy").mkdir()

    def found() -> list[str]:
        return problems_of(context(tmp_path, f"push.backup_uri=file://{tmp_path}/copy"))

    (sentence,) = found()
    assert f"{free / 1e9:.1f} for its copy in {tmp_path}/copy" in sentence
    written |= {"run": free}
    (sentence,) = found()
    assert "0.0 for the run" in sentence
    written |= {"copy": free}
    assert found() == []
