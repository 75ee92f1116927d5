"""A training killed with SIGKILL at random moments, or stopped with SIGTERM, ends bit for bit where an
unbroken one ends. Real processes, real signals, on CPU."""

import inspect
import os
import random
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from synthetic_states import make_store
from train_in_process import lines, start, wait

from jobs.draft import checkpoint, snapshot
from jobs.storage import files


def kill_when(process, folder: Path, step: int, delay: float, sent: signal.Signals) -> bool:
    """Sends the signal `delay` seconds after step `step` was reported; False if the process ended before."""
    seen = len(lines(folder))
    while process.is_alive():
        if any(line.get("step", 0) >= step for line in lines(folder)[seen:]):
            time.sleep(delay)
            os.kill(process.pid, sent)
            return True
        time.sleep(0.005)
    return False


def finish(process, folder: Path) -> None:
    code, error = wait(process, folder)
    assert code == 0, error


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    states = folder / "states"
    make_store(states, [(4 + i % 7, 12 + (i * 5) % 30) for i in range(40)])
    process = start(states, folder / "run")
    finish(process, folder / "run")
    last = [line for line in lines(folder / "run") if "loss" in line][-1]
    assert last["step"] == last["steps"] >= 20
    return states, load_file(folder / "run.safetensors"), last


def assert_same(weights, other):
    assert weights.keys() == other.keys()
    different = [name for name in weights if weights[name].numpy().tobytes() != other[name].numpy().tobytes()]
    assert not different, f"not bit-identical: {different}"


def numpyable(path):
    return {name: tensor.float() for name, tensor in load_file(path).items()}


@pytest.mark.slow
def test_sigkill_at_random_points(unbroken, tmp_path):
    states, weights, last = unbroken
    run, chance = tmp_path / "run", random.Random(20250101)
    kills = 0
    for step in sorted(chance.sample(range(2, last["steps"] - 1), 8)):
        process = start(states, run)
        # Anywhere within a step or a checkpoint's write: a step takes some hundredths of a second.
        kills += kill_when(process, run, step, chance.uniform(0, 0.05), signal.SIGKILL)
        process.join(60)
    assert kills >= 6
    process = start(states, run)
    finish(process, run)
    continued = [line for line in lines(run) if "continues" in line.get("note", "")]
    assert continued, "no run continued from a checkpoint"
    final = [line for line in lines(run) if "loss" in line][-1]
    assert final["trained_tokens"] == last["trained_tokens"] and final["loss"] == last["loss"]
    assert_same({n: t.float() for n, t in weights.items()}, numpyable(str(run) + ".safetensors"))
    assert not list(run.glob("*.partial"))
    assert len([p for p in run.iterdir() if checkpoint.NAME.fullmatch(p.name)]) == 2, "two checkpoints are kept"


def lines_of_the_write() -> list[str]:
    """Every line of a checkpoint's write as file:line, those behind the rename first, and some of what it calls."""

    def of(function) -> list[str]:
        code = function.__code__
        return [
            f"{code.co_filename}:{line}" for line in sorted({line for *_, line in code.co_lines() if line}) if line > code.co_firstlineno
        ]

    source, first = inspect.getsourcelines(checkpoint.write)
    where = {
        what: first + next(n for n, text in enumerate(source) if what in text)
        for what in ("partial.rename", "rmtree(final)", "return final")
    }
    never = {f"{checkpoint.__file__}:{where['rmtree(final)']}", f"{checkpoint.__file__}:{where['return final']}"}
    written = [line for line in of(checkpoint.write) if line not in never]  # nothing is in the way here; after the last line all is done
    before = [line for line in written if int(line.rpartition(":")[2]) <= where["partial.rename"]]
    called = random.Random(5).sample(of(snapshot.write_tensors)[1:], 3) + random.Random(5).sample(of(files.write_atomically)[2:8], 2)
    return [line for line in written if line not in before] + before + called


@pytest.mark.slow
def test_sigkill_at_every_line_of_a_checkpoints_write(unbroken, tmp_path):
    """Between the files, before and after the rename, while old ones are removed: the next start finds a whole one."""
    states, weights, last = unbroken
    run = tmp_path / "run"
    for line in lines_of_the_write():
        process = start(states, run, checkpoint_every=2, environment={"DIE_AT": line})
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, (line, Path(f"{run}.err").read_text())
        checkpoint.newest(run)
    process = start(states, run)
    finish(process, run)
    continued = {line["note"] for line in lines(run) if "continues" in line.get("note", "")}
    assert len(continued) >= 4, "the kills behind the rename have each left another step"
    assert_same({n: t.float() for n, t in weights.items()}, numpyable(str(run) + ".safetensors"))
    assert not list(run.glob("*.partial"))


def test_sigterm_saves_and_continues_exactly(unbroken, tmp_path):
    states, weights, last = unbroken
    run = tmp_path / "run"
    process = start(states, run, checkpoint_every=1000)
    assert kill_when(process, run, 5, 0.0, signal.SIGTERM)
    code, error = wait(process, run)
    assert code == 75 and "everything is saved" in error
    saved = checkpoint.newest(run)
    assert 5 <= saved.step < last["steps"]
    process = start(states, run)  # checkpoint_every is back at 4: taken, and named in a note
    finish(process, run)
    notes = [line["note"] for line in lines(run) if "note" in line]
    assert any("train.checkpoint_every was 1000 and is 4" in note for note in notes), notes
    assert_same({n: t.float() for n, t in weights.items()}, numpyable(str(run) + ".safetensors"))


def test_changed_settings_are_refused_by_name(unbroken, tmp_path):
    states, _, last = unbroken
    run = tmp_path / "run"
    process = start(states, run)
    assert kill_when(process, run, 5, 0.05, signal.SIGKILL)
    process.join(60)
    process = start(states, run, learning_rate=0.001, ttt_steps=2)
    code, error = wait(process, run)
    assert code == 78
    assert "learning_rate was 0.005 and is 0.001" in error and "ttt_steps was 3 and is 2" in error
    assert "--redo train" in error


def test_half_written_checkpoints_are_passed_over(unbroken, tmp_path):
    states, weights, last = unbroken
    run = tmp_path / "run"
    process = start(states, run)
    assert kill_when(process, run, 14, 0.1, signal.SIGKILL)
    process.join(60)
    newest, older = checkpoint._finished(run)[:2]
    damaged = newest / "weights.safetensors"
    with damaged.open("r+b") as file:  # one flipped byte in the newest: the one before it counts
        file.seek(damaged.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    (run / "step-999999.partial").mkdir()
    (run / "step-999999.partial" / "weights.safetensors").write_bytes(b"half")
    assert checkpoint.newest(run).folder == older
    process = start(states, run)
    finish(process, run)
    notes = " ".join(line["note"] for line in lines(run) if "note" in line)
    assert f"{newest.name} is passed over: weights.safetensors does not match its checksum" in notes
    assert "half-written checkpoint step-999999.partial removed" in notes
    assert not (run / "step-999999.partial").exists()
    assert_same({n: t.float() for n, t in weights.items()}, numpyable(str(run) + ".safetensors"))
