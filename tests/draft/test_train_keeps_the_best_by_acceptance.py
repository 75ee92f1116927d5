"""Evaluations decide: the head ends with the weights of the longest acceptance, and a plateau ends training.

The figures come from a script, since what is tested is what the trainer makes of them; the weights,
checkpoints and interruptions are real.
"""

import re

import pytest
import torch
from short_training import new_head, train_shortly, twelve_samples
from synthetic_states import one_core  # noqa: F401 - a fixture

from jobs.errors import Interrupted

pytestmark = pytest.mark.usefixtures("one_core")
ACCEPTANCE = {4: 1.4, 8: 2.1, 12: 2.0, 16: 2.1, 20: 1.9, 24: 2.6}


class Killed(BaseException):
    """Ends a training without a word and without saving."""


class Training:
    def __init__(self, folder, store, language, stop_after=None, kill_at=None, kill_in_evaluation=None, stop_in_evaluation=None, **changes):
        self.head = new_head(language)
        self.lines, self.seen, self.stop_after = [], {}, stop_after
        self.kill_at, self.kill_in_evaluation, self.stop_in_evaluation = kill_at, kill_in_evaluation, stop_in_evaluation
        self.result = train_shortly(
            self.head, folder, store, language, evaluate=self.evaluate, should_stop=self.should_stop, report=self.report,
            **dict(evaluate_every=4, checkpoint_every=5) | changes,
        )  # fmt: skip

    def should_stop(self) -> bool:
        return self.stop_after is not None and any(line.get("step", 0) >= self.stop_after for line in self.lines)

    def report(self, line: dict) -> None:
        self.lines.append(line)
        if "loss" in line and line["step"] == self.kill_at:
            raise Killed

    def evaluate(self, head) -> dict:
        line = self.lines[-1]
        step = line["step"] if "step" in line else int(re.search(r"continues after step (\d+)", line["note"])[1])
        if step == self.kill_in_evaluation:
            raise Killed
        if step == self.stop_in_evaluation:
            raise Interrupted("Stopped after 3 of 9 judged answers")
        self.seen[step] = {name: p.detach().clone() for name, p in head.named_parameters()}
        return {"acceptance": ACCEPTANCE[step]}

    def notes(self) -> str:
        return "\n".join(line["note"] for line in self.lines if "note" in line)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return twelve_samples(tmp_path_factory.mktemp("states"))


def equal(head, weights) -> bool:
    return all(torch.equal(p, weights[name]) for name, p in head.named_parameters())


def test_a_plateau_ends_training_with_the_best_weights(tmp_path, data):
    run = Training(tmp_path, *data, patience=2)
    assert run.result.stopped_early and run.result.steps == 16 and sorted(run.seen) == [4, 8, 12, 16]
    assert (run.result.best_step, run.result.best_acceptance) == (8, 2.1), "equal is not better"
    assert equal(run.head, run.seen[8]) and not equal(run.head, run.seen[16])
    assert "acceptance has not grown by more than 0.0 for 2 evaluations: training ends after step 16 of 24" in run.notes()
    assert "the head ends with the weights of step 8, acceptance 2.100" in run.notes()
    again = Training(tmp_path, *data, patience=2)
    assert again.result.steps == 16 and not again.seen, "a training that ended is not gone on with"
    assert equal(again.head, run.seen[8])


def test_without_patience_it_trains_on_and_ends_with_the_last_if_that_is_best(tmp_path, data):
    run = Training(tmp_path, *data)
    assert run.result.steps == 24 and not run.result.stopped_early and run.result.best_step == 24
    assert equal(run.head, run.seen[24])


def test_a_small_gain_does_not_end_a_plateau(tmp_path, data):
    run = Training(tmp_path, *data, patience=3, patience_gain=1.0)
    assert run.result.steps == 16 and run.result.best_step == 8, "2.1 is the longest though no gain of 1.0"


def test_last_weights_are_kept_where_that_is_asked_for(tmp_path, data):
    run = Training(tmp_path, *data, patience=2, keep_best=False)
    assert equal(run.head, run.seen[16])


def test_an_interrupted_run_remembers_its_best(tmp_path, data):
    whole = Training(tmp_path / "whole", *data, patience=2)
    with pytest.raises(Interrupted):
        Training(tmp_path / "broken", *data, patience=2, stop_after=13)
    rest = Training(tmp_path / "broken", *data, patience=2)
    assert rest.result.resumed_from == 13 and rest.result.steps == 16
    assert all(torch.equal(a, b) for a, b in zip(whole.head.parameters(), rest.head.parameters(), strict=True))


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", [8, 24])
def test_an_evaluation_that_is_stopped_is_made_when_training_continues(tmp_path, data, step, processes):
    """SIGTERM in the middle of a replay: what is trained is saved, and nothing is judged twice or not at all."""
    shared = dict(processes=processes, accumulate=processes, epochs=2.0 * processes)
    with pytest.raises(Interrupted, match=f"after step {step} of 24; everything is saved: run the same command again to continue"):
        Training(tmp_path, *data, stop_in_evaluation=step, **shared)
    rest = Training(tmp_path, *data, **shared)
    assert rest.result.resumed_from == step and list(rest.seen) == list(range(step, 25, 4))
    assert rest.result.best_step == 24 and not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_two_processes_end_at_the_step_of_one_with_the_same_best(tmp_path, data):
    """The others hear from the first one, at the evaluation itself, that there is no more to be gained."""
    shared = dict(patience=2, accumulate=2, epochs=4)
    alone = Training(tmp_path / "one", *data, **shared)
    both = Training(tmp_path / "two", *data, processes=2, **shared)
    assert both.result.processes == 2 and alone.result.processes == 1
    for run in (alone, both):
        assert run.result.stopped_early and run.result.steps == 16 and sorted(run.seen) == [4, 8, 12, 16]
        assert (run.result.best_step, run.result.best_acceptance) == (8, 2.1) and equal(run.head, run.seen[8])
    for (name, a), b in zip(alone.head.named_parameters(), both.head.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4, msg=name)


def test_a_run_killed_after_an_evaluation_knows_what_it_found(tmp_path, data):
    """Checkpoint and evaluation fall on one step: the checkpoint is the later one, or a plateau would be seen too late."""
    whole = Training(tmp_path / "whole", *data, patience=2, checkpoint_every=4)
    with pytest.raises(Killed):
        Training(tmp_path / "broken", *data, patience=2, checkpoint_every=4, kill_at=13)
    rest = Training(tmp_path / "broken", *data, patience=2, checkpoint_every=4)
    assert rest.result.resumed_from == 12 and rest.result.steps == whole.result.steps == 16
    assert (rest.result.best_step, sorted(rest.seen)) == (8, [16])
    assert all(torch.equal(a, b) for a, b in zip(whole.head.parameters(), rest.head.parameters(), strict=True))


def test_a_run_killed_before_its_last_evaluation_makes_up_for_it(tmp_path, data):
    with pytest.raises(Killed):
        Training(tmp_path, *data, kill_in_evaluation=24)
    rest = Training(tmp_path, *data)
    assert rest.result.steps == 24 and rest.result.best_step == 24 and 24 in rest.seen
