"""Who drafts, with which taps, and whether that can be, is settled before the verifier is loaded: else one sentence."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import untrained_head
from generate_in_process import context_of, prepare, prompt

from jobs.errors import MustFix
from jobs.job_file import load
from jobs.settings import VerifierSettings
from jobs.stages import speculation
from jobs.stages.preflight import access
from jobs.verifier.drafter import Drafter
from jobs.verifier.facts import VerifierFacts
from jobs.verifier.fit import cache_bytes, draft_bytes, refuse_too_large
from jobs.verifier.tiny import CHECKPOINT

GREEDY = {"thinking": {"temperature": 0}, "instant": {"temperature": 0}}


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Path:
    return untrained_head.saved(tmp_path_factory.mktemp("head"))


@pytest.fixture
def run(head, tmp_path):
    """run(speculate, heads, generate=…, best=…, taps=…) -> context of a run directory; best and taps as its baseline found them."""
    opened = []

    def made(speculate: str, *names: str, generate=GREEDY, best: str | None = None, folder: Path = head, **candidate):
        listed = [{"name": name, "model": str(folder), **candidate} for name in names]
        path = prepare(
            tmp_path / f"run{len(opened)}", [prompt(1, "Why?")], generate={"speculate": speculate, **generate}, heads={"candidates": listed}
        )
        (path / "locations.json").write_text(json.dumps({"verifier": str(CHECKPOINT), "heads": {name: str(folder) for name in names}}))
        if best:
            judged = {name: {"taps": [3, 6, 8]} for name in names}
            (path / "baseline.json").write_text(json.dumps({"heads": judged, "best": best}))
        opened.append(context_of(path))
        return opened[-1]

    yield made
    for context in opened:
        context.run.close()


def written_taps(config: dict) -> list[int]:
    return json.loads((Path(config["model"]) / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]


def test_off_is_the_default_and_drafts_nothing(run):
    assert load("hero", environment={}).generate.speculate == load("smoke", environment={}).generate.speculate == "off"
    assert speculation.drafter(run("off", "one")) is None


def test_a_named_head_drafts_with_the_taps_its_config_gives_vllm(run):
    drafter = speculation.drafter(run("one", "one", "other"))
    assert (drafter.name, drafter.taps) == ("one", (2, 5, 7)) and written_taps(drafter.config) == [2, 5, 7]
    assert drafter.config["method"] == "eagle3" and drafter.config["num_speculative_tokens"] == 3


def test_ngram_drafts_with_the_window_it_is_judged_with(run):
    assert speculation.drafter(run("ngram")).config == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
    }


def test_best_is_the_only_candidate_or_what_the_runs_baseline_found(run):
    assert speculation.drafter(run("best", "one")).name == "one"
    with pytest.raises(MustFix, match="Which of 2 heads is the best is known after the baseline") as refused:
        speculation.drafter(run("best", "one", "other"))
    assert "name one of one, other or ngram" in refused.value.sentence()
    judged = speculation.drafter(run("best", "one", "other", best="other"))
    assert (judged.name, judged.taps, written_taps(judged.config)) == ("other", (3, 6, 8), [3, 6, 8])
    assert speculation.drafter(run("best", "one", "other", best="ngram")).config["method"] == "ngram"


def test_taps_that_mean_another_layer_to_each_engine_have_to_be_said(run, head, tmp_path):
    folder = tmp_path / "nested"
    shutil.copytree(head, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(config))
    context = run("one", "one", folder=folder)
    with pytest.raises(MustFix, match="names its taps in eagle_config only") as refused:
        speculation.drafter(context)
    assert [refused.value.sentence()] == [sentence for sentence in access.fits(context) if "taps" in sentence]
    assert written_taps(speculation.drafter(run("one", "one", folder=folder, taps=[2, 5, 7])).config) == [2, 5, 7]
    del config["eagle_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert speculation.drafter(run("one", "one", folder=folder)).taps == (2, 5, 7)  # everybody's default


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU verifies sampled answers too")
def test_sampled_answers_are_refused_on_cpu_before_anything_is_loaded(run):
    context = run("ngram", generate={"thinking": {"temperature": 0}})
    assert speculation.problems(context, {}, (2, 5, 7)) == []  # every prompt thinks
    context = run("ngram", generate={})
    with pytest.raises(MustFix, match=r"verifies greedily only, and generate.thinking.temperature = 1 \("):
        speculation.drafter(context)
    assert any("verifies greedily only" in sentence for sentence in access.fits(context))


def test_settings_that_leave_nothing_to_draft_for_are_refused():
    def refused(*overrides: str) -> str:
        with pytest.raises(MustFix) as error:
            load("smoke", overrides=overrides, environment={})
        return error.value.sentence()

    assert "'bset' is neither `off`, `ngram`, `best` nor one of []" in refused("generate.speculate=bset")
    assert '"best" needs a head in heads.candidates' in refused("generate.speculate=best")
    assert "with generate.responses it decodes nothing" in refused("generate.speculate=ngram", "generate.responses=answers")
    assert "with generate.endpoints others decode" in refused("generate.speculate=ngram", "generate.endpoints=['http://one:8000']")
    assert "has not been tried with verifier.parallel = 'dp_ep'" in refused(
        "generate.speculate=ngram", "verifier.parallel=dp_ep", "verifier.tensor_parallel_size=2"
    )
    assert "may not be called" in refused('heads.candidates=[{name="best", model="x/y"}]', "heads.warm_start=best")


def test_the_head_counts_where_memory_is_asked_for(head, monkeypatch):
    settings = VerifierSettings(dtype="float32")
    facts, drafter = VerifierFacts.read(CHECKPOINT), Drafter("one", (2, 5, 7), {"model": str(head)})
    one_layer = 2 * facts.hidden_size * 4 * settings.max_model_len  # keys and values, fp32
    assert draft_bytes(head, settings) == (head / "model.safetensors").stat().st_size + one_layer
    text = json.loads((CHECKPOINT / "config.json").read_text())["text_config"]
    needed = sum(file.stat().st_size for file in CHECKPOINT.glob("*.safetensors")) + cache_bytes(text, settings)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"total": needed})())
    refuse_too_large(CHECKPOINT, settings)
    with pytest.raises(MustFix, match="does not fit") as refused:
        refuse_too_large(CHECKPOINT, settings, drafter)
    assert "of a draft head" in refused.value.where and 'generate.speculate = "off"' in refused.value.remedy
