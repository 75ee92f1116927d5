"""The whole job as a user runs it: `smoke`, published to a real S3 server, brought back, and verified."""

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from report_pages import BROWSER, Page, charts_show_what_is_traced, figures_are_those_of_the_files, seen_in_a_browser
from s3_servers import moto_server
from small_smoke import finish, start

from jobs.verifier.facts import weight_files
from jobs.verifier.tiny import CHECKPOINT

pytestmark = pytest.mark.slow


def job(*arguments, environment=None):
    done = subprocess.run(
        [sys.executable, "-m", "entrypoints.cli", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | (environment or {}),
    )
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke") / "run"
    with moto_server() as server:
        server.make_bucket("heads")
        push = ["push.uri=s3://heads/tiny", f"push.endpoint_url={server.endpoint_url}", "push.path_style=true", "push.region=us-east-1"]
        result = finish(start(folder, *push, small=False, environment=server.environment), timeout=1200)
        assert result["status"] == "done", result["error"]
        yield folder, result, server, push


def test_the_trained_head_beats_the_untrained_one_and_ngram(smoke):
    folder, result, *_ = smoke
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["gains"]["over_untrained"]["low"] >= 1.0
    assert evaluation["gains"]["over_ngram"]["low"] >= 0.1
    assert result["acceptance"].keys() >= {"none", "untrained", "ngram", "trained", "baseline"} and result["acceptance"]["none"] == 1.0
    assert 1.0 <= result["acceptance"]["untrained"] < result["acceptance"]["trained"] <= 4.0


def test_one_load_serves_eval_and_train(smoke):
    folder, result, *_ = smoke
    assert result["verifier_loads"] == 1 == json.loads((folder / "run.json").read_text())["verifier_loads"]
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    order = [event.get("stage", event["kind"]) for event in events if event["kind"] in ("stage started", "verifier loaded")]
    begun = [name for name in order if name in ("verifier loaded", "generate.eval", "baseline", "generate.train")]
    assert begun == ["generate.eval", "verifier loaded", "baseline", "generate.train"], (
        "judged while the engine idles, before the train split is paid for"
    )


def test_the_head_can_draft_what_the_train_answers_hold_and_knows_nothing_of_the_eval_answers(smoke):
    from jobs.draft.vocabulary import DraftVocabulary, build
    from jobs.verifier.chat import Chat
    from jobs.verifier.tiny import CHECKPOINT

    folder, *_ = smoke
    answers = [json.loads(line) for line in (folder / "states/train/responses.jsonl").read_text().splitlines()]
    counts = Counter(token for answer in answers for token in answer["response_token_ids"])
    kept = DraftVocabulary.load(folder / "vocab.safetensors")
    assert kept.draft_ids.tolist() == build(counts, 1024, Chat.load(CHECKPOINT).special_token_ids, kept.vocab_size).draft_ids.tolist()


def test_the_verifier_was_read_ahead_of_its_load_and_the_disks_rate_is_in_the_ledger(smoke):
    folder, *_ = smoke
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (ahead,) = [event for event in events if event["kind"] == "verifier read ahead"]
    assert ahead["whole"] and ahead["bytes"] == sum(file.stat().st_size for file in weight_files(CHECKPOINT))
    assert [event["kind"] for event in events if event["kind"].startswith("verifier")] == ["verifier read ahead", "verifier loaded"]
    rates = json.loads((folder / "run.json").read_text())["stages"]["preflight"]["counts"]["bytes_per_second"]
    assert rates["disk_written"] > 0 and rates["disk_read"] > 0


def test_every_state_verifies(smoke):
    folder, *_ = smoke
    code, result = job("states", "verify", str(folder))
    assert code == 0, result
    for store in result["stores"].values():
        assert store["samples"] > 0 and store["checked_logprobs"] > 0 and not store["problems"]


def test_prompts_in_are_responses_and_drops(smoke):
    folder, result, *_ = smoke
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    for split in ("eval", "train"):
        turns = sum(sum(m["role"] == "user" for m in row["messages"]) for row in prompts if row["split"] == split)
        counts = result["stages"][f"generate.{split}"]["counts"]
        assert counts["turns"] + sum(counts["dropped"].values()) == turns


def test_what_was_published_comes_back_whole_and_loads(smoke, tmp_path):
    folder, result, server, push = smoke
    assert result["published"] == "s3://heads/tiny"
    code, pulled = job(
        "pull", "s3://heads/tiny", str(tmp_path / "head"), *(p for s in push for p in ("--set", s)), environment=server.environment
    )
    assert code == 0, pulled
    for name in ("model.safetensors", "config.json", "README.md", "manifest.json"):
        assert (tmp_path / "head" / name).read_bytes() == (folder / "head" / name).read_bytes()
    from jobs.draft.formats import load_head

    head = load_head(tmp_path / "head")
    assert head.config.taps == (2, 5, 7) and head.config.max_position_embeddings == 262_144


def test_the_card_states_data_settings_and_measured_figures(smoke):
    folder, *_ = smoke
    card = (folder / "head" / "README.md").read_text()
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert f"{evaluation['heads']['trained']['acceptance_length']['mean']:.3f}" in card
    for expected in ("EAGLE-3", "untrained", "ngram", "PSF-2.0", "vllm", "[2, 5, 7]"):
        assert expected in card


def test_status_and_report_tell_the_same_story(smoke):
    folder, result, *_ = smoke
    code, status = job("status", str(folder))
    assert code == 0 and status["acceptance"] == result["acceptance"] and status["published"] == result["published"]
    page = (folder / "report.html").read_text()
    assert f"{result['acceptance']['trained']:.2f}" in page and "http-equiv" not in page


def test_every_figure_of_its_report_is_traceable_and_every_chart_shows_such_figures(smoke):
    folder, *_ = smoke
    page = Page((folder / "report.html").read_text())
    figures_are_those_of_the_files(folder, page)
    charts_show_what_is_traced(page)
    assert "code" in json.loads((folder / "evaluation.json").read_text())["gains_by_domain"]


@pytest.mark.skipif(BROWSER is None, reason="Debian's chromium is not installed")
@pytest.mark.parametrize("width", [390, 1200])
def test_a_real_browser_shows_its_report_without_an_error(smoke, tmp_path, width):
    folder, *_ = smoke
    seen = seen_in_a_browser(folder / "report.html", tmp_path, width)
    assert seen["verdict"] == "Done" and len(seen["charts"]) == 7 and seen["requests"] == 0 and seen["wide"] <= width
    assert seen["bars"] == 24 and seen["whiskers"] >= 2 and seen["figures"] > 100


def test_the_whole_run_was_forecast_while_it_went_on(smoke):
    """Each stage began with what was still expected; of the run that is over `status` tells the whole, and no price means no cost."""
    folder, result, *_ = smoke
    shown = [line for line in (folder.parent / f"{folder.name}.log").read_text().splitlines() if "; run: elapsed " in line]
    begun = {line.split()[1].rstrip(":"): line for line in shown if ": started; run: elapsed " in line}
    assert begun.keys() == result["stages"].keys() and all(line.endswith(" more") for line in shown), shown
    assert any(re.search(r"train: [\d,]+/[\d,]+ steps .*; run: elapsed \d:\d\d:\d\d, \S", line) for line in shown)
    progress = json.loads((folder / "run.json").read_text())["stages"]["train"]["progress"]
    assert progress["done"] == progress["total"] == result["stages"]["train"]["counts"]["steps"]
    _, status = job("status", str(folder))
    assert status["forecast"] is None and re.search(r"\nIn all [\d.]+ min\.\nDone, published at ", status["text"])
