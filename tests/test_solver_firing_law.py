"""The power law behind models that are not here: what is given about a model is what comes out of it."""

import numpy as np
import pytest

from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.profiler.locality import share_for
from pi_toolkit.solver.firing_law import firing_shares_by_law
from pi_toolkit.solver.model_presets import REGLU, RELU, SWIGLU, Locality80, presets

SIZES = (4096,) * 24


@pytest.mark.parametrize(("density", "locality"), [(0.03, RELU), (0.18, REGLU), (0.57, SWIGLU)])
def test_density_and_model_share(density: float, locality: Locality80) -> None:
    """A model that fires more than was said, or more evenly."""
    shares = firing_shares_by_law(SIZES, density, locality)
    assert np.mean([share.mean() for share in shares]) == pytest.approx(density, rel=1e-6)
    assert share_for(np.concatenate(shares)) == pytest.approx(min(locality.model, locality.layer), abs=0.005)
    for share in shares:
        assert share.min() >= 0 and share.max() <= 1
        assert (np.diff(share) <= 0).all(), "hottest first"


@pytest.mark.parametrize(("density", "locality"), [(0.03, RELU), (0.18, REGLU), (0.47, SWIGLU)])
def test_layer_share(density: float, locality: Locality80) -> None:
    """The exponent of another law: one layer alone has the density itself, and so the layer's own share."""
    (share,) = firing_shares_by_law((28672,), density, Locality80(locality.layer, locality.layer))
    assert share_for(share) == pytest.approx(locality.layer, abs=0.002)


def test_deeper_layers_fire_more() -> None:
    """PowerInfer §3: the first half of OPT-30B's layers has hardly any active neuron."""
    means = [share.mean() for share in firing_shares_by_law((28672,) * 48, 0.03, RELU)]
    assert means == sorted(means) and np.mean(means[:24]) < 0.01


def test_layers_of_different_sizes() -> None:
    """Laws over positions that are those of the first layer."""
    shares = firing_shares_by_law((64, 4096, 7), 0.1, REGLU)
    assert [len(share) for share in shares] == [64, 4096, 7]


def test_impossible_laws_are_refused() -> None:
    """A law that does not have what was asked for."""
    with pytest.raises(PlacementError, match=r"where 90.0% of the neurons fire .* give a lower --density"):
        firing_shares_by_law(SIZES, 0.9, RELU)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("opt-6.7b", 6.7), ("opt-13b", 12.9), ("opt-30b", 30.0), ("opt-66b", 65.7), ("opt-175b", 174.6), ("falcon-40b", 41.3),
        ("llama2-7b", 6.7), ("llama2-13b", 13.0), ("llama2-70b", 69.0), ("bamboo-7b", 7.2), ("yi-34b", 34.4),
    ],
)  # fmt: skip
def test_presets_have_their_models_parameters(name: str, billions: float) -> None:
    """A width, a depth or a number of heads that is another model's."""
    assert presets()[name].shape.num_parameters() / 1e9 == pytest.approx(billions, abs=0.06)
