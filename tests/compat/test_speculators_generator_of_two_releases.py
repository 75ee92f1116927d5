"""speculators' own state generator on vLLM 0.16.0 and Kimi-K2.5: 0.3.0 needs every shim, the pinned 0.4.0.1 those not cured upstream.

Its layer ids name the OUTPUT of a layer; the values are compared with transformers' DeepSeek-V3 in fp32.
"""

import pytest
from probing import run_probe

CLOSE = 1e-4


@pytest.fixture(scope="module")
def old(old_speculators):
    return run_probe("report_of_generator", "0.3.0", path=old_speculators)


@pytest.fixture(scope="module")
def pinned():
    return run_probe("report_of_generator", "0.4.0.1")


@pytest.fixture(params=["0.3.0", "0.4.0.1"])
def seen(request):
    seen = request.getfixturevalue("old" if request.param == "0.3.0" else "pinned")
    assert seen["versions"] == [request.param, "0.16.0"]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["few", "fourteen", "two_passes_and_over_32"])
def test_states_are_right_and_in_order(seen, batch):
    assert seen[batch] < CLOSE


@pytest.mark.slow
def test_what_fails_in_both_without_shims(seen):
    assert "kimi_k25" in seen["config_without_shim"]
    assert "trust_remote_code" in seen["tokenizer_without_shim"]
    assert seen["memory_without_shim"].startswith("RuntimeError")
    assert seen["limit"] == 0


@pytest.mark.slow
def test_everything_is_needed_by_the_old_release(old):
    assert {name for name, row in old["shims"].items() if row["needed"] and row["applied"]} == set(old["shims"])


@pytest.mark.slow
def test_what_fails_in_the_old_release_only(old):
    assert "has no attribute 'model'" in old["nested_decoder_without_shim"]
    assert old["executor_without_shim"] != "ok"
    assert old["thirty_four_without_shim"].startswith("ValueError: wrong rows")


@pytest.mark.slow
def test_what_upstream_has_cured_is_left_alone(pinned):
    rows = pinned["shims"]
    assert {name for name, row in rows.items() if not row["needed"]} == {"speculators_worker", "speculators_executor"}
    assert not any(rows[name]["applied"] for name in ("speculators_worker", "speculators_executor"))
    assert {name for name, row in rows.items() if row["applied"]} == {name for name, row in rows.items() if row["needed"]}


@pytest.mark.slow
def test_pinned_release_permutes_more_than_ten_without_its_shim(pinned):
    assert pinned["fourteen_without_shim"] == float("inf")
    assert "not found in captured states" in pinned["thirty_four_without_shim"]
