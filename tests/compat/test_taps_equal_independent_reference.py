"""Taps named in `additional_config` are the residual stream at the INPUT of those layers, by transformers' own code in fp32."""

import pytest
from probing import run_probe

CLOSE = 1e-4


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_probe("engine", "taps_of_both", tmp_path_factory.mktemp("llama"))


def test_every_kind_of_id_in_chunked_prefill_and_decode(seen):
    assert seen["kimi"]["rows"] == 10 + 100 + 33 + 3 * 7
    assert seen["kimi"]["worst"] < CLOSE


def test_llama_gives_the_same_and_refuses_what_it_cannot(seen):
    assert seen["llama"]["worst"] < CLOSE
    assert "LlamaForCausalLM gives out taps 1 to 5, not 0" in seen["llama"]["outside"]
