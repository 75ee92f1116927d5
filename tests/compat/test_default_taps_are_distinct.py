"""The default taps are three different ones, also where (2, L//2, L-3) would coincide."""

import pytest

from compat.kimi_k25_eagle3 import AcceptedTargetType, default_taps
from jobs.errors import MustFix


def test_usual_sizes_have_the_usual_taps():
    assert default_taps(61) == (2, 30, 58)
    assert default_taps(10) == (2, 5, 7)


@pytest.mark.parametrize("layers", range(4, 130))
def test_three_ascending_ids_inside_the_model(layers):
    low, middle, high = default_taps(layers)
    assert 1 <= low < middle < high <= layers - 1


def test_too_few_layers_are_refused():
    with pytest.raises(MustFix, match="3 layers"):
        default_taps(3)


def test_accepted_type_is_the_type_itself():
    accepted = AcceptedTargetType("kimi_k2")
    assert accepted == "kimi_k2" and "llama" in accepted and "kimi" in accepted and "qwen" not in accepted
