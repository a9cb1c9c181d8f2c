"""The share of neurons that carries 80 % of the firings equals a count by hand; the figure is drawn for any counts."""

import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pi_toolkit.profiler.locality import locality_figure, measure_locality, share_for


def brute_force_share(counts: list[int], carried: Fraction = Fraction(4, 5)) -> float:
    """Take the hottest neuron again and again until the wanted share of all firings is reached, in exact numbers."""
    remaining, taken, total = sorted(counts), 0, sum(counts)
    if not total:
        return 0.0
    neurons = 0
    while Fraction(taken, total) < carried:
        taken += remaining.pop()
        neurons += 1
    return neurons / len(counts)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40))
def test_share_equals_counting_by_hand(counts: list[int]) -> None:
    """Prevents an off-by-one, or a rounding error at exactly 80 %, in the number the whole placement argument rests on."""
    assert share_for(np.array(counts)) == brute_force_share(counts)


@pytest.mark.parametrize(
    ("counts", "share"),
    [([7], 1.0), ([1] * 10, 0.8), ([0, 0, 5], 1 / 3), ([8, 1, 1, 0], 0.25), ([0, 0, 0], 0.0), ([1] * 35, 0.8)],
)
def test_share_of_known_counts(counts: list[int], share: float) -> None:
    """Prevents both definitions from being wrong in the same way."""
    assert share_for(np.array(counts)) == share == brute_force_share(counts)


@pytest.mark.parametrize(("carried", "share"), [(0.5, 0.2), (0.9, 0.6), (1.0, 0.8)])
def test_other_shares_than_80_percent(carried: float, share: float) -> None:
    """Prevents the argument from being ignored, and neurons that never fire from being needed for all firings."""
    assert share_for(np.array([5, 2, 2, 1, 0]), carried) == share


def test_model_is_measured_over_all_layers_together() -> None:
    """Prevents the model's number from being a mean over layers, which hides that some layers fire more."""
    hot, cold = np.array([100, 100, 100, 100]), np.array([1, 0, 0, 0])
    locality = measure_locality([hot, cold], 100)
    assert locality.firing_share == [1.0, 0.0025]
    assert locality.share_for_80_percent == [1.0, 0.25]
    assert locality.share_for_80_percent_model == 0.5  # four of eight


def test_layers_of_different_size() -> None:
    """Prevents layers with fewer neurons from weighing as much as others."""
    counts = [np.array([1, 1, 1, 1, 1]), np.array([4, 4, 4])]
    assert measure_locality(counts, 4).share_for_80_percent_model == brute_force_share([1, 1, 1, 1, 1, 4, 4, 4])


@pytest.mark.parametrize(
    "counts",
    [
        [np.array([5, 0, 3]), np.array([1, 2, 3])],
        [np.zeros(4, dtype=np.int64)],
        [np.array([10])],
        [np.arange(20)] * 13,
    ],
)
def test_figure_is_a_png_for_any_counts(counts: list[np.ndarray]) -> None:
    """Prevents a crash on logarithmic axes after a long run, and a figure that differs between equal runs."""
    png = locality_figure(counts, 20, "a title with $ and _")
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (1320, 540)
    assert locality_figure(counts, 20, "a title with $ and _") == png
