"""A target with a signature its shim was not written for stays as it is, and one sentence says so."""

import pytest
from probing import run_probe


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_probe("refusals", tmp_path_factory.mktemp("run"))


def test_refusal_names_function_found_and_known_arguments(seen):
    sentence = seen["scheduler_config"]
    assert sentence.startswith("MustFix: The shim scheduler_config does not know ")
    assert "(self, max_model_len, is_encoder_decoder, novelty)" in sentence
    assert "known: (self, max_model_len, is_encoder_decoder)" in sentence
    assert "vllm 0.16.0" in sentence


def test_nothing_is_patched_blindly(seen):
    assert seen["unpatched"]


def test_model_modules_load_and_refuse_where_taps_are_wanted(seen):
    assert seen["kimi_applied"] == "ok"
    assert "The shim kimi_k25_eagle3 does not know" in seen["kimi_used"]


def test_other_shims_still_apply(seen):
    assert seen["kv_cache_helpers"] == "ok"
    assert seen["known_patched"]


def test_unknown_shim_is_refused_with_the_known_ones(seen):
    assert "no shim called 'scheduler_confg'" in seen["unknown_name"]
    assert "scheduler_config" in seen["unknown_name"]


def test_doctor_shows_the_refusals(seen):
    assert "does not know" in seen["doctor"]["scheduler_config"]
    assert "does not know" in seen["doctor"]["kimi_k25_eagle3"]
    assert seen["doctor"]["kv_cache_helpers"] is None


def test_preflight_names_each_before_anything_is_paid_for(seen):
    refused = [sentence for sentence in seen["preflight"] if "does not know" in sentence]
    assert sorted(sentence.split(":")[0] for sentence in refused) == ["shim kimi_k25_eagle3", "shim scheduler_config"]
