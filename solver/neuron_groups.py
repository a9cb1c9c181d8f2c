"""Neuron groups: 64 neurons of similar impact in one layer are placed together (PowerInfer §6.3).

That turns the millions of choices of a large model into tens of thousands.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi_toolkit.profiler.errors import PlacementError

GROUP_NEURONS = 64
# Sums up to here are exact in int64 and in the solver's float64.
MAX_TOTAL_IMPACT = 2**53


@dataclass(frozen=True)
class NeuronGroups:
    """Groups of one layer, hottest first.

    ``neurons``: int64 [n], the layer's neuron ids, hottest first; group g holds the ``sizes[:g].sum()``-th of them and
    the following. ``sizes``: int64 [groups]. ``impacts``: [groups], summed firing counts (int64, float64 where counts are
    relative).
    """

    neurons: np.ndarray
    sizes: np.ndarray
    impacts: np.ndarray

    def members(self, chosen: np.ndarray) -> np.ndarray:
        """Ascending int32 neuron ids of the groups for which *chosen*, bool [groups], is true."""
        return np.sort(self.neurons[np.repeat(chosen, self.sizes)]).astype(np.int32)


def group_neurons(counts: Sequence[np.ndarray], group_neurons: int = GROUP_NEURONS) -> tuple[NeuronGroups, ...]:
    """Groups per layer out of firing counts [n] per layer; a neuron's impact is its firing count (eq. 1: v_n = f_n).

    Neurons that fire equally often keep the order of their ids; the last group of a layer may be short. Raises
    ``PlacementError`` for counts whose sum is beyond exact arithmetic.
    """
    total = sum(float(layer.sum(dtype=np.float64)) for layer in counts)
    if not total <= MAX_TOTAL_IMPACT:
        raise PlacementError(f"the firing counts sum to {total:.3g}, beyond 2^53: divide them by a common factor")
    return tuple(_group_layer(layer, group_neurons) for layer in counts)


def _group_layer(counts: np.ndarray, group_neurons: int) -> NeuronGroups:
    hottest_first = np.argsort(-counts, kind="stable")
    starts = np.arange(0, len(counts), group_neurons)
    sizes = np.diff(starts, append=len(counts))
    return NeuronGroups(hottest_first, sizes, np.add.reduceat(counts[hottest_first], starts))
