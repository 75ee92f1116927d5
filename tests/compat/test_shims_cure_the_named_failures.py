"""Against the real vLLM 0.16.0: without the shims each call fails in the way they name, with them it works."""

from importlib.metadata import version

import pytest
import successor
from probing import run_probe

from compat.registry import shims

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return successor.make(tmp_path_factory.mktemp("successor"))[1]


@pytest.fixture(scope="module")
def bare(head):
    return run_probe("vllm_calls", head, shims=False)


@pytest.fixture(scope="module")
def cured(head):
    return run_probe("vllm_calls", head)


@pytest.mark.parametrize(
    ("call", "failure"),
    [
        ("scheduler_config", "is_encoder_decoder"),
        ("scheduler_config_bare", "max_model_len"),
        ("kv_cache_specs", "unexpected keyword argument 'kv_cache_specs'"),
        ("no_block_size", "missing 1 required positional argument: 'block_size'"),
        ("no_block_hasher", "AssertionError"),
        ("speculation", "Eagle3 is only supported for"),
    ],
)
def test_call_of_older_code(bare, cured, call, failure):
    assert failure in bare[call]
    assert cured[call] == "ok"


def test_call_that_works_is_not_changed(bare, cured):
    assert bare["scheduler_config_given"] == cured["scheduler_config_given"] == "ok"


def test_kimi_and_deepseek_are_eagle3_targets(bare, cured):
    assert bare["supports_eagle3"] == [False, False, False]
    assert cured["supports_eagle3"] == [True, True, True]


@pytest.mark.parametrize("what", ["pipeline_taps", "pipeline_speculation"])
def test_pipeline_parallelism_is_refused(cured, what):
    assert cured[what].startswith("MustFix: EAGLE-3 taps cannot be read under pipeline parallelism (pipeline_parallel_size=2)")


def test_taps_that_would_be_wrong_are_refused(cured):
    assert cured["float16_taps"].startswith("MustFix: In float16 vLLM rescales DeepSeek's residual")
    assert cured["unordered_taps"].startswith("MustFix: Taps [5, 2] are not ascending layer ids")


def test_taps_are_part_of_the_compile_cache_key(cured):
    assert cured["hash_has_taps"] == 2


def test_taps_are_given_out_only_with_the_shim(bare):
    assert bare["aux"] == [False] * len(bare["aux"]) and bare["aux"]  # test_taps_equal_… sees them with it


def test_doctor_names_the_installed_versions(cured):
    versions = cured["doctor"]["versions"]
    assert versions["vllm"] == "0.16.0"
    assert all(versions[name] == version(name) for name in ("speculators", "torch", "transformers"))
    assert cured["doctor"]["devices"]


def test_doctor_has_a_row_for_every_shim(cured):
    rows = cured["doctor"]["shims"]
    assert [row["name"] for row in rows] == [shim.name for shim in shims()]
    for row in rows:
        assert row["why"] and row["upstream"] and row["patches"] and row["note"] is None
        assert row["applied"] == row["needed"]
        assert f"{row['name']:22} {'yes' if row['needed'] else 'no':7}" in cured["rendered"]
