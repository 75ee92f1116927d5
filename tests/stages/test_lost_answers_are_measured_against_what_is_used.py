"""More answers lost than `generate.max_dropped_share` of those that are used stop the run; what a token budget leaves out counts for neither."""

import json
import random

import numpy as np
import pytest
from arrivals import Arrivals
from generate_in_process import SMALL, prepare, prompt, run, small_engine

from jobs.errors import MustFix
from jobs.stages.conversations import read_conversations
from jobs.storage.states import StateStore
from jobs.verifier.capture import Capture

ROWS = [prompt(i, f"Say number {i}", split="train" if i >= 40 else "eval") for i in range(1040)]
BUDGET = 4000  # tokens: about 150 of the 1,000 turns of the train split


def limited(folder, share: float):
    return prepare(folder, ROWS, generate={"train_token_budget": BUDGET, "max_dropped_share": share})


def with_share(folder, share: float):
    settings = json.loads((folder / "settings.json").read_text())
    settings["generate"]["max_dropped_share"] = share
    (folder / "settings.json").write_text(json.dumps(settings))


def a_tenth(sample: str) -> bool:
    return random.Random(f"lost {sample}").random() < 0.1


def noted(folder) -> int:
    """Samples that the events of a run say were dropped."""
    events = (json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines())
    return sum(event["samples"] for event in events if event["kind"] == "sample dropped")


def test_beyond_the_share_of_what_the_budget_will_use_the_run_stops_early(tmp_path):
    """A tenth is lost and 2 % are allowed, which is 20 of the whole split and 3 of what the budget uses."""
    folder = limited(tmp_path / "run", 0.02)
    run(folder, "eval", Arrivals(1, 8))
    engine = Arrivals(2, 8, lost=a_tenth)
    with pytest.raises(MustFix, match=r"[34] of 1\d\d samples of the train split were dropped") as stopped:
        run(folder, "train", engine)
    assert stopped.value.exit_code == 78 and "max_dropped_share = 0.02" in stopped.value.sentence()
    assert noted(folder) <= 4 and len(engine.handed_out) < 75


def test_where_no_earlier_answer_tells_what_will_be_used_the_share_holds_at_the_end(tmp_path):
    folder = limited(tmp_path / "run", 0.02)
    with pytest.raises(MustFix, match=r"1\d of 1\d\d samples of the train split were dropped") as stopped:
        run(folder, "train", Arrivals(2, 8, lost=a_tenth))
    assert stopped.value.exit_code == 78
    with_share(folder, 0.3)
    again = Arrivals(3, 8, lost=a_tenth)
    counts = run(folder, "train", again)
    assert 0.02 < counts["dropped"]["states_incomplete"] / counts["asked"] < 0.3
    assert all(finished.dropped for finished in again.handed_out), "a finished answer was asked for again"


def test_what_is_lost_beyond_the_budget_is_not_counted(tmp_path):
    """2 % may be lost; it is every answer that is begun well beyond what the budget turns out to use, and nothing before."""
    folder = limited(tmp_path / "run", 0.02)
    run(folder, "eval", Arrivals(1, 8))
    order = [f"{conversation.id}#0" for conversation in read_conversations(folder / "prompts.jsonl", "train", SMALL["job"]["seed"])]
    counts = run(folder, "train", Arrivals(5, 300, lost=set(order[200:]).__contains__))
    assert counts["dropped"] == {} and counts["turns"] == counts["prompts"] < 160
    assert noted(folder) > 0.02 * 160


@pytest.fixture(scope="module")
def engine():
    with small_engine() as made:
        yield made


def test_rows_that_really_go_missing_stop_the_run_and_what_is_whole_is_kept(engine, tmp_path, monkeypatch):
    """The fourth row of every fifth answer never reaches the writer: 8 of 40, and a tenth is allowed."""
    spans, rows = Capture._spans, ROWS[:40]
    torn = [f"{row['id']}#0" for row in rows[::5]]

    def without_the_fourth(self, scheduler_output):
        found = spans(self, scheduler_output)
        lost = np.isin(np.array(found.samples), torn) & (found.position <= 3) & (found.position + found.rows > 3)
        return found.only(~lost)

    folder = prepare(tmp_path / "run", rows, generate={"max_new_tokens": 24, "max_dropped_share": 0.1})
    with monkeypatch.context() as faulty:
        faulty.setattr(Capture, "_spans", without_the_fourth)
        with pytest.raises(MustFix) as stopped:
            run(folder, "eval", engine)
    said = stopped.value.sentence()
    assert stopped.value.exit_code == 78 and "\n" not in said
    assert "5 of 40 samples of the eval split were dropped ({'states_incomplete': 5})" in said and "position" in said
    assert "(generate.max_dropped_share = 0.1): mend the cause, or allow more; finished answers are kept." in said
    committed = (folder / "states/eval/responses.jsonl").read_bytes()
    assert run(folder, "eval", engine)["turns"] == 40  # the cause is mended
    assert (folder / "states/eval/responses.jsonl").read_bytes().startswith(committed)
    store = StateStore(folder / "states/eval")
    assert store.verify().problems == [] and set(torn) <= set(store.ids())
