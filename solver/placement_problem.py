"""The data of one placement decision, shared by the integer program, the greedy answer and the upper bound."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import gcd

import numpy as np

from .neuron_groups import NeuronGroups

Choice = tuple[np.ndarray, ...]  # per layer bool [groups]: which live on the GPU


@dataclass(frozen=True)
class PlacementProblem:
    """Which groups should live on the GPU? All neurons of a model take the same bytes, so memory is counted in neurons.

    ``gpu_capacity``: neurons that fit on the GPU beside the dense units. ``fewest_on_gpu``: neurons the CPU's memory
    cannot hold. ``min_gpu_neurons``: C_l per layer, None for a layer that must stay on the CPU.
    """

    layers: tuple[NeuronGroups, ...]
    gpu_capacity: int
    fewest_on_gpu: int
    min_gpu_neurons: tuple[int | None, ...]

    def open_layers(self) -> list[int]:
        """Layers that may use the GPU at all: C_l exists and fits."""
        return [
            layer
            for layer, fewest in enumerate(self.min_gpu_neurons)
            if fewest is not None and fewest <= self.gpu_capacity
        ]

    @cached_property
    def unit(self) -> int:
        """Largest common divisor of the groups' sizes: every choice holds a multiple of it."""
        return reduce(gcd, (int(size) for groups in self.layers for size in np.unique(groups.sizes)))

    def nothing(self) -> list[np.ndarray]:
        """The choice that leaves every group on the CPU."""
        return [np.zeros(len(groups.sizes), dtype=bool) for groups in self.layers]

    def value(self, choice: Sequence[np.ndarray]) -> int | float:
        """Firings served from the GPU (eq. 2)."""
        total = sum(groups.impacts[chosen].sum() for groups, chosen in zip(self.layers, choice, strict=True))
        return float(total) if isinstance(total, np.floating) else int(total)

    def is_feasible(self, choice: Sequence[np.ndarray]) -> bool:
        """Memory of both devices (eq. 6) and the communication threshold (eqs. 7 and 8), in whole numbers."""
        placed = [int(groups.sizes[chosen].sum()) for groups, chosen in zip(self.layers, choice, strict=True)]
        worthwhile = all(
            neurons == 0 or (fewest is not None and neurons >= fewest)
            for neurons, fewest in zip(placed, self.min_gpu_neurons, strict=True)
        )
        return worthwhile and self.fewest_on_gpu <= sum(placed) <= self.gpu_capacity
