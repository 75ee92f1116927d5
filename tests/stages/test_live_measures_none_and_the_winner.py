"""Live measurement through the real server: what the engine counts, a server that dies, and what is kept.

The verifier and the head are those of `tests/compat/successor.py`: after token x comes x + 1, and the head's
first draft is right, its second wrong. So the engine must count 2 tokens a step but for the first step of an
answer, and one server start each is all the truth needs.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "compat"))
import successor  # noqa: E402

from jobs.context import Context  # noqa: E402
from jobs.errors import TryAgain  # noqa: E402
from jobs.job_file import load  # noqa: E402
from jobs.reporting.display import Display  # noqa: E402
from jobs.run import RunDirectory  # noqa: E402
from jobs.stages import fetch, live  # noqa: E402
from jobs.storage.responses import Response, ResponseLog  # noqa: E402
from jobs.verifier.chat import Chat  # noqa: E402
from jobs.verifier.facts import VerifierFacts  # noqa: E402

PROMPTS, TOKENS = 12, 24


def judged(mean: float, **more) -> dict:
    return {"acceptance_length": {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}, **more}


def eval_split(context: Context) -> None:
    """Prompts of the eval split as `generate.eval` leaves them; live reads no state, so there is none."""
    chat = Chat.load(context.verifier_path)
    with ResponseLog(context.states("eval")) as log:
        for number in range(PROMPTS):
            ids = [*chat.render([{"role": "user", "content": f"question {number}"}], False), 100 + number]
            log.append(Response(f"p{number}#0", ids, [7, 8], "stop", {}, "test", False))
        log.append(Response("std.gsm8k.0#0", [5, 6], [7, 8], "stop", {}, "gsm8k", False))


def made(folder: Path) -> Context:
    """A run that stands before `live`: its best way to speculate is an existing head."""
    verifier, head = successor.make(folder / "models")
    wanted = [
        f"verifier.model={verifier}", f'heads.candidates=[{{name="known", model="{head}"}}]', "evaluate.live.concurrencies=[1, 4]",
        f"evaluate.live.requests={PROMPTS}", f"evaluate.live.max_new_tokens={TOKENS}", "verifier.max_num_seqs=16", "generate.instant.temperature=0.7",
    ]  # fmt: skip
    settings = load("smoke", overrides=wanted, environment={})
    run = RunDirectory(folder / "run")
    run.begin(settings)
    context = Context(settings, run, Display.open("plain", stream=sys.stderr))
    fetch.run(context)
    eval_split(context)
    layers = VerifierFacts.read(context.verifier_path).default_taps
    (context.path / "baseline.json").write_text(
        json.dumps({"heads": {"known": judged(1.9, taps=list(layers)), "ngram": judged(1.2), "untrained": judged(3.9)}})
    )
    (context.path / "evaluation.json").write_text(json.dumps({"heads": {"trained": judged(1.5)}}))
    run.stage("live")["inputs"] = {}
    return context


def kill_the_plain_server(context: Context) -> None:
    """SIGKILL to the server of `none` once its first measurement stands and the second one runs."""
    while not (context.path / "live" / "none-1.json").exists():
        time.sleep(0.01)
    while (
        "none" not in (told := (context.path / "live.json").read_text() if (context.path / "live.json").exists() else "")
        or '"1"' not in told
    ):
        time.sleep(0.01)
    started = [json.loads(line) for line in (context.path / "events.jsonl").read_text().splitlines()]
    os.killpg(next(event["process"] for event in started if event["kind"] == "live server started"), signal.SIGKILL)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The stage once, with the first server killed in mid-measurement: (context, what it raised)."""
    context = made(tmp_path_factory.mktemp("live"))
    threading.Thread(target=kill_the_plain_server, args=(context,), daemon=True).start()
    with pytest.raises(TryAgain) as error:
        live.run(context)
    return context, error.value, json.loads((context.path / "live.json").read_text())


@pytest.mark.slow
def test_the_engines_counters_are_those_of_a_head_known_by_construction(measured):
    _, _, found = measured
    assert found["winner"] == "known", "the best that was judged, and never the untrained head"
    for run in found["ways"]["known"]["runs"].values():
        assert run["completed"] == PROMPTS and run["total_output_tokens"] <= PROMPTS * TOKENS
        assert run["spec_decode_per_position_acceptance_rates"][1:] == [0.0, 0.0]
        assert 1.85 < run["spec_decode_acceptance_length"] <= 2.0
        assert run["spec_decode_draft_tokens"] == 3 * run["spec_decode_num_drafts"]
        assert run["output_throughput"] > 0 and run["median_itl_ms"] > 0 and run["p99_tpot_ms"] > 0
    assert list(found["ways"]["known"]["runs"]) == ["1", "4"]
    assert (
        "--speculative-config" in found["ways"]["known"]["command"]
        and "--max-concurrency 4" in found["ways"]["known"]["runs"]["4"]["command"]
    )


@pytest.mark.slow
def test_a_server_that_dies_costs_its_own_measurement_only(measured):
    context, error, found = measured
    assert error.exit_code == 75
    assert context.loads == context.run.ledger["verifier_loads"] == 2, "each server is a load of the verifier, and is counted as one"
    assert "3 of 4 live measurements were made: The live server died with signal SIGKILL" in str(error) and "\n" not in str(error)
    assert list(found["ways"]["none"]["runs"]) == ["1"] and "SIGKILL" in found["ways"]["none"]["error"]
    assert found["speedup"].keys() == {"1"}
    assert found["same_answers"] == {"winner_and_plain": {"1": 1.0}, "plain_and_plain": {}}, "speculation in fp32 is lossless"
    compared = found["first_divergences"]["winner_and_plain"]["1"]
    assert (compared["answers"], compared["diverged"], compared["per_1000_tokens"]) == (PROMPTS, 0, 0.0)
    assert compared["tokens"] == found["ways"]["none"]["runs"]["1"]["total_output_tokens"]
    assert "spec_decode_acceptance_length" not in found["ways"]["none"]["runs"]["1"]


@pytest.mark.slow
def test_what_is_measured_is_not_measured_again_unless_the_head_is_another(measured, monkeypatch):
    context, _, _ = measured
    started = []
    monkeypatch.setattr(
        live, "_measure", lambda context, way, config, traffic, kept: started.append((way, sorted(kept["ways"][way]["runs"])))
    )
    live.run(context)
    assert started == [("none", ["1"]), ("known", ["1", "4"])]
    context.run.stage("live")["inputs"] = {"trained": {"sha256": "another head"}}
    assert live._kept(context, "known", live.traffic_of(context))["ways"] == {"none": {"runs": {}}, "known": {"runs": {}}}


@pytest.mark.slow
def test_only_the_runs_own_prompts_are_sent_and_greedily_on_cpu(measured):
    context, _, found = measured
    sent = [json.loads(line) for line in (context.path / "live" / "prompts.jsonl").read_text().splitlines()]
    assert len(sent) == PROMPTS == found["requests"] and all(row["output_tokens"] == TOKENS for row in sent)
    assert found["sampling"]["temperature"] == 0.0
