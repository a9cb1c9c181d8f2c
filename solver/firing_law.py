"""Firing shares that nobody measured, from a power law: three published numbers describe a model.

Given are the density ρ (the share of a layer's neurons that fire on a token), the share s of a layer's neurons that carries
80 % of its firings, and the same share S for the whole model (PowerInfer §3.1: OPT-30B s = 26 %, S = 17 %). Within a layer
of mean density ρ_l the neuron at position u, 0 < u ≤ 1, hottest first, fires on the share

    p_l(u) = min(1, c_l · u^-α)

of the tokens. α is the exponent at which a layer of density ρ has the share s (without the cap the first u of neurons carry
u^(1-α) of the firings, so α = 1 − ln 0.8 / ln s), and c_l the factor at which p_l has the mean ρ_l. Layers differ in how
many neurons fire, by

    ρ_l proportional to e^(β·l/L), with mean ρ

where β ≥ 0 makes the share of the whole model S; 0 where S > s, which no mixture of such layers has. That deeper layers
fire more is what the paper says of OPT-30B, whose first 24 layers have less than 1 %. Which neuron is hot is no part of this:
ids are positions.
"""

from collections.abc import Callable, Sequence

import numpy as np

from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.profiler.locality import CARRIED_SHARE, share_for

from .model_presets import Locality80

_LARGEST_EXPONENT, _LARGEST_TILT = 4.0, 12.0
_STEPS = 40  # of bisection: twelve digits
_LAYER_POSITIONS, _MODEL_POSITIONS = 4096, 256  # per layer, while α and β are sought


def firing_shares_by_law(ffn_sizes: Sequence[int], density: float, locality: Locality80) -> tuple[np.ndarray, ...]:
    """Per layer float64 [neurons], hottest first: the share of tokens on which a neuron fires.

    Raises ``PlacementError`` for a density at which so uneven a law cannot exist.
    """
    exponent = _layer_exponent(density, locality.layer)
    tilt = _tilt(len(ffn_sizes), density, exponent, locality.model)
    densities = _layer_densities(len(ffn_sizes), density, tilt)
    return tuple(_layer_law(neurons, mean, exponent) for neurons, mean in zip(ffn_sizes, densities, strict=True))


def _layer_exponent(density: float, share: float) -> float:
    """α: the exponent at which *share* of a layer's neurons carries 80 % of its firings."""
    if not share > CARRIED_SHARE * density:
        raise PlacementError(
            f"where {density:.1%} of the neurons fire on a token, {share:.1%} of them cannot carry {CARRIED_SHARE:.0%} of "
            "the firings: give a lower --density"
        )
    return _falling_to(
        lambda exponent: share_for(_layer_law(_LAYER_POSITIONS, density, exponent)), share, _LARGEST_EXPONENT
    )


def _tilt(layers: int, density: float, exponent: float, share: float) -> float:
    """β: how unevenly the layers fire, so that *share* of all neurons carries 80 % of all firings."""

    def share_of_model(tilt: float) -> float:
        densities = _layer_densities(layers, density, tilt)
        return share_for(np.concatenate([_layer_law(_MODEL_POSITIONS, mean, exponent) for mean in densities]))

    return _falling_to(share_of_model, share, _LARGEST_TILT)


def _layer_densities(layers: int, density: float, tilt: float) -> np.ndarray:
    return _capped(np.exp(tilt * np.arange(layers) / layers), density)


def _layer_law(neurons: int, density: float, exponent: float) -> np.ndarray:
    return _capped(((np.arange(neurons) + 0.5) / neurons) ** -exponent, density)


def _capped(weights: np.ndarray, mean: float) -> np.ndarray:
    """min(1, c · *weights*) for the c at which that has the given *mean*, at most 1."""
    falling = np.sort(weights)[::-1]
    capped = np.arange(len(falling))  # how many of the largest are at the cap
    factors = (mean * len(falling) - capped) / falling[::-1].cumsum()[::-1]
    factor = factors[np.argmax(factors * falling <= 1.0)]
    return np.minimum(factor * weights, 1.0)


def _falling_to(function: Callable[[float], float], value: float, largest: float) -> float:
    """Where the falling *function* reaches *value*, between 0 and *largest*."""
    low, high = 0.0, largest
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > value else (low, middle)
    return high if low else 0.0
