"""The acceptance length that training reports is what judging the saved head gives, as it is served, on the same eval answers."""

import json

import torch
from run_with_states import answered, run_with_states

from jobs.draft.formats import load_head
from jobs.draft.replay import judge
from jobs.stages import judging, train
from jobs.storage.states import StateStore


def test_the_last_evaluation_is_that_of_the_saved_head(tmp_path):
    overrides = (
        "train.max_steps=11",
        "train.evaluate_every=4",
        "train.evaluate_samples=5",
        "train.keep_best=false",
        "verifier.dtype=bfloat16",
    )
    context = answered(run_with_states(tmp_path / "run", *overrides))
    train.run(context)
    lines = [json.loads(line) for line in (context.path / "train.jsonl").read_text().splitlines()]
    told = {line["step"]: line["evaluation"] for line in lines if "evaluation" in line}
    assert list(told) == [4, 8, 11] and told[11]["acceptance"] > told[4]["acceptance"]

    head, store = load_head(context.path / "trained", dtype=torch.bfloat16), StateStore(context.states("eval"))
    ids = judging.sampled_ids(store, 5, context.settings.job.seed)
    assert len(set(ids)) == 5 and "std.gsm8k.0#0" not in ids

    def judged(of: list[str]) -> dict:
        judgement = judge(head, store, of, 3)
        return {"acceptance": judgement.mean_acceptance_length, "rates": judgement.walk.rates}

    assert told[11] == judged(ids) != judged(store.ids())
