"""What the trainer refuses, and how it gets past steps that are not finite."""

import json
import math
from pathlib import Path

import pytest
import torch
from short_training import new_head, train_shortly
from synthetic_states import TAPS, Language, draft_ids, make_store, one_core, small_config  # noqa: F401 - a fixture

from jobs.draft.data import check_type
from jobs.draft.update import Update, learning_rate
from jobs.errors import MustFix
from jobs.settings import TrainSettings
from jobs.storage.states import Response, ResponseLog, StateLayout, StateStore, StateWriter

pytestmark = pytest.mark.usefixtures("one_core")


def run(tmp_path, store, head, language, **changes):
    lines = []
    try:
        result = train_shortly(head, tmp_path / "checkpoints", store, language, report=lines.append, **dict(learning_rate=1e-3) | changes)
    except MustFix as error:
        return error, lines
    return result, lines


def poisoned_store(folder, language, bad: set[int], samples: int = 12, wild: set[int] = frozenset()) -> StateStore:
    """Samples of 64 rows, one a packed row, some of them with an infinite state, some with wild targets."""
    g = torch.Generator().manual_seed(0)
    with ResponseLog(folder) as log:
        writer = StateWriter(folder, StateLayout(TAPS, 32, "float32", "synthetic", "0" * 40, "0" * 64), shard_bytes=1 << 20)
        for number in range(samples):
            ids = language.write(65, g)
            taps, final, logprob = language.states(ids, g)
            if number in bad:
                taps[20, 1, 3] = math.inf
            if number in wild:
                final = -20 * final
            writer.append(f"s{number:02d}#0", 0, taps, final, logprob)
            writer.finish(f"s{number:02d}#0", 65)
            writer.sync()
            log.append(Response(f"s{number:02d}#0", ids[:5], ids[5:], "length", {}, "synthetic", False))
        writer.close()
    return StateStore(folder)


def test_a_bad_step_is_skipped_counted_and_kept_as_evidence(tmp_path):
    language = Language.make()
    store = poisoned_store(tmp_path / "states", language, {4})
    result, lines = run(tmp_path, store, new_head(language), language)
    assert result.bad_steps == 2 and result.steps == 24, "once an epoch"
    logged = [line for line in lines if "loss" in line]
    assert logged[-1]["bad_steps"] == 2 and math.isfinite(logged[-1]["loss"])
    assert all(json.dumps(line, allow_nan=False) for line in lines), "a line is strict JSON"
    evidence = sorted((tmp_path / "checkpoints").glob("bad-step-*.json"))
    assert len(evidence) == 2
    told = json.loads(evidence[0].read_text())
    assert told["states_finite_by_sample"] == {"s04#0": False} and told["weights_not_finite"] == []
    assert any("is skipped" in line.get("note", "") for line in lines)


@pytest.mark.slow
def test_the_evidence_is_of_all_processes(tmp_path):
    language = Language.make()
    bad = {1, 4, 7, 9}
    store = poisoned_store(tmp_path / "states", language, bad)
    result, _ = run(tmp_path, store, new_head(language), language, processes=2, accumulate=2)
    told = [json.loads(path.read_text())["states_finite_by_sample"] for path in (tmp_path / "checkpoints").glob("bad-step-*.json")]
    assert len(told) == result.bad_steps >= 4 and all(len(samples) == 2 for samples in told)
    assert all(finite == (int(name[1:3]) not in bad) for samples in told for name, finite in samples.items())
    assert not any(all(samples.values()) for samples in told)


def test_a_gpu_without_memory_is_something_to_mend(tmp_path, monkeypatch):
    language = Language.make()
    store = make_store(tmp_path / "states", [(4, 60)] * 3, language=language)

    def full(self, loss, count, rate):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity")

    monkeypatch.setattr(Update, "step", full)
    error, _ = run(tmp_path, store, new_head(language), language)
    assert isinstance(error, MustFix) and "Tried to allocate 2.00 GiB" in error.message and "lower train.tokens_per_step" in error.remedy


def test_too_many_bad_steps_stop_the_run_naming_the_evidence(tmp_path):
    language = Language.make()
    store = poisoned_store(tmp_path / "states", language, {1, 4, 7})
    head = new_head(language)
    error, _ = run(tmp_path, store, head, language, bad_step_limit=2)
    assert isinstance(error, MustFix)
    assert "3 optimizer steps had a loss or gradient that is not finite" in error.sentence()
    assert "bad-step-" in error.where and json.loads(Path(error.where).read_text())["bad_steps"] == 3
    assert all(bool(p.isfinite().all()) for p in head.parameters()), "no bad step reached the weights"


def test_a_loss_spike_is_skipped_counted_and_kept_as_evidence(tmp_path):
    language = Language.make()
    store = poisoned_store(tmp_path / "states", language, set(), samples=24, wild={11})
    result, lines = run(tmp_path, store, new_head(language), language, spike_factor=3.0, learning_rate=1e-2, epochs=4)
    assert 1 <= result.bad_steps <= 4 and result.steps == 96, "once an epoch, as soon as the loss has fallen"
    told = [json.loads(path.read_text()) for path in sorted((tmp_path / "checkpoints").glob("bad-step-*.json"))]
    assert [t["reason"] for t in told] == ["a loss far over the usual one"] * result.bad_steps
    assert all(float(t["loss"]) > 3 * float(t["usual_loss"]) > 0 and t["states_finite_by_sample"] == {"s11#0": True} for t in told)
    assert any("is usual" in line.get("note", "") for line in lines)
    without, _ = run(tmp_path / "without", store, new_head(language), language, spike_factor=None, learning_rate=1e-2, epochs=4)
    assert without.bad_steps == 0


def test_states_and_head_that_disagree_are_refused(tmp_path):
    language = Language.make()
    store = make_store(tmp_path / "states", [(4, 20)] * 3, language=language)
    error, _ = run(tmp_path, store, new_head(language, taps=(1, 5, 7)), language)
    assert "the head reads taps [1, 5, 7], the store holds [2, 5, 7]" in error.sentence()
    wide = Language.make(hidden=48)
    error, _ = run(tmp_path, store, new_head(wide, hidden_size=48), wide)
    assert "states of width 32 cannot train a head of width 48" in error.sentence()
    error, _ = run(tmp_path, store, new_head(language), wide)
    assert "the verifier's embedding has shape (64, 48) where (64, 32) is needed" in error.sentence()
    small = Language.make(vocabulary=20)
    error, _ = run(tmp_path, store, new_head(small, vocab_size=20, draft_vocab_size=16), small)
    assert "outside the vocabulary of 20" in error.sentence()


def test_a_type_of_states_other_than_the_settings_is_refused(tmp_path):
    for dtype, wanted in (("float32", "fp8"), ("float8_e4m3fn", "verifier")):
        store = make_store(tmp_path / dtype, [(4, 20)] * 2, dtype=dtype)
        with pytest.raises(MustFix, match=f"stored as {dtype}, states.dtype is {wanted}.*--redo generate.train"):
            check_type(store, wanted)
        check_type(store, {"fp8": "verifier", "verifier": "fp8"}[wanted])


def test_checkpoints_of_which_none_is_whole_are_refused(tmp_path):
    """To begin anew in silence would throw paid training away; only what was never finished is removed."""
    language = Language.make()
    store = make_store(tmp_path / "states", [(4, 60)] * 4, language=language)
    run(tmp_path, store, new_head(language), language, checkpoint_every=2)
    finished = sorted((tmp_path / "checkpoints").glob("step-*"))
    for path in finished:
        (path / "optimizer.safetensors").unlink()
    error, _ = run(tmp_path, store, new_head(language), language)
    assert isinstance(error, MustFix) and len(finished) == 2
    for path in finished:
        assert f"{path.name}: optimizer.safetensors is missing or has another size" in error.sentence()
    assert "--redo train" in error.sentence()


def test_fp8_states_train_like_the_type_they_were_made_from(tmp_path):
    """They travel as stored and become numbers on the device: the loss is that of the dequantized states."""
    language = Language.make()
    stores = {
        dtype: make_store(tmp_path / dtype, [(4, 60)] * 12, language=language, dtype=dtype) for dtype in ("bfloat16", "float8_e4m3fn")
    }
    logged = {}
    for dtype, store in stores.items():
        _, lines = run(tmp_path / f"run-{dtype}", store, new_head(language), language)
        logged[dtype] = [line for line in lines if "loss" in line]
    for a, b in zip(*logged.values(), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.05)
    rates = [logged[dtype][-1]["read_bytes_per_second"] / logged[dtype][-1]["tokens_per_second"] for dtype in logged]
    assert rates == pytest.approx([4 * 32 * 2, 4 * 32 + 4 * 4]), "bytes read a token"


def test_nothing_to_train_on_is_refused(tmp_path):
    language = Language.make()
    store = make_store(tmp_path / "states", [(1, 1)] * 3, language=language)
    error, _ = run(tmp_path, store, new_head(language), language)
    assert "the store holds no token to train on" in error.sentence()
    assert not list((tmp_path / "checkpoints").glob("step-*"))


def test_a_packed_row_shorter_than_the_samples_is_refused(tmp_path):
    language = Language.make()
    store = make_store(tmp_path / "states", [(4, 60)], language=language)
    error, _ = run(tmp_path, store, new_head(language), language, tokens_per_step=32)
    assert "63 rows does not fit into a packed row of 32" in error.sentence()


def test_a_finished_training_is_taken_over(tmp_path):
    """Run again, it trains nothing and gives the same weights: what a resumed run does after `train`."""
    language = Language.make()
    store = make_store(tmp_path / "states", [(4, 30)] * 6, language=language)
    first = new_head(language)
    done, _ = run(tmp_path, store, first, language)
    again = new_head(language)
    result, lines = run(tmp_path, store, again, language)
    assert result.resumed_from == result.steps == done.steps and not [line for line in lines if "loss" in line]
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))


def test_cross_entropy_learns_the_sampled_tokens(tmp_path):
    language = Language.make()
    store = make_store(tmp_path / "states", [(4, 60)] * 24, language=language)
    result, lines = run(
        tmp_path, store, new_head(language, draft_vocab_size=64), language, loss="cross_entropy", epochs=4, learning_rate=1e-2
    )
    logged = [line for line in lines if "loss" in line]
    assert logged[-1]["loss"] < 0.5 * logged[0]["loss"] and logged[-1]["accuracy_by_step"][0] > 0.75


def test_schedule_warms_up_and_ends_where_it_should():
    settings = TrainSettings(learning_rate=1.0, warm_start_learning_rate=0.5, warmup_share=0.1, final_share=0.05)
    rates = [learning_rate(step, 100, settings, warm=False) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates) == 1.0 and rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.05 + 0.95 * 0.5) and rates[-1] == pytest.approx(0.05, abs=1e-3)
    assert learning_rate(9, 100, settings, warm=True) == 0.5
