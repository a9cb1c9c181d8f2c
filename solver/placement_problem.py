"""The data of one placement decision under the paper's objective, shared by program, greedy answer and upper bound."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import gcd

import numpy as np

from .bundle import Bundles
from .token_time import CPU

Choice = tuple[np.ndarray, ...]  # per layer int8 [bundles]: the number of a GPU, or CPU


@dataclass(frozen=True)
class PlacementProblem:
    """Which bundles should live on a GPU, and on which?

    ``gpu_bytes``: room on each GPU beside the dense units. ``fewest_gpu_bytes``: what the CPU's memory cannot hold.
    ``min_gpu_neurons``: C_l per layer, None for a layer that must stay on the CPU. ``pinned``: per layer the number of
    bundles, from the first, that are on GPUs whatever they are worth, with all others on the CPU; None leaves the choice.
    """

    layers: tuple[Bundles, ...]
    gpu_bytes: tuple[int, ...]
    fewest_gpu_bytes: int
    min_gpu_neurons: tuple[int | None, ...]
    pinned: tuple[int | None, ...] | None = None

    @cached_property
    def pins(self) -> tuple[int | None, ...]:
        return self.pinned or (None,) * len(self.layers)

    def open_layers(self) -> list[int]:
        """Layers that are free to use a GPU: not pinned, C_l exists and fits into all GPUs together."""
        return [
            layer
            for layer, fewest in enumerate(self.min_gpu_neurons)
            if self.pins[layer] is None and fewest is not None and self.threshold_bytes(layer) <= self.room
        ]

    def threshold_bytes(self, layer: int) -> int:
        """A number of bytes that bundles of at least C_l neurons take or exceed, and no fewer neurons reach where all take
        the same bytes."""
        bundles, fewest = self.layers[layer], self.min_gpu_neurons[layer] or 0
        per_neuron = float((bundles.num_bytes / bundles.sizes).min())
        return -(-int(fewest * per_neuron) // self.unit) * self.unit

    @cached_property
    def room(self) -> int:
        """Bytes that whole bundles can take on all GPUs together."""
        return sum(gpu // self.unit * self.unit for gpu in self.gpu_bytes)

    @cached_property
    def unit(self) -> int:
        """Largest common divisor of the bundles' bytes: every choice takes a multiple of it."""
        return reduce(gcd, (int(size) for bundles in self.layers for size in np.unique(bundles.num_bytes)))

    @cached_property
    def pinned_bytes(self) -> int:
        return sum(int(b.num_bytes[:pin].sum()) for b, pin in zip(self.layers, self.pins, strict=True) if pin)

    @cached_property
    def pinned_impact(self) -> int | float:
        return sum(b.impacts[:pin].sum().item() for b, pin in zip(self.layers, self.pins, strict=True) if pin)

    def pooled(self) -> "PlacementProblem":
        """The same on one GPU with the room of all, with the pinned layers decided and taken off: no answer to this problem
        is worth more than the best of the pooled one and ``pinned_impact``."""
        closed = [
            None if pin is not None else fewest for pin, fewest in zip(self.pins, self.min_gpu_neurons, strict=True)
        ]
        return replace(
            self,
            gpu_bytes=(max(0, self.room - self.pinned_bytes),),
            fewest_gpu_bytes=max(0, self.fewest_gpu_bytes - self.pinned_bytes),
            min_gpu_neurons=tuple(closed),
            pinned=None,
        )

    def nothing(self) -> list[np.ndarray]:
        """The choice that leaves every bundle on the CPU."""
        return [np.full(len(bundles), CPU, dtype=np.int8) for bundles in self.layers]

    def value(self, choice: Sequence[np.ndarray]) -> int | float:
        """Firings served from GPUs (eq. 2)."""
        total = sum(b.impacts[devices != CPU].sum() for b, devices in zip(self.layers, choice, strict=True))
        return float(total) if isinstance(total, np.floating) else int(total)

    def is_feasible(self, choice: Sequence[np.ndarray]) -> bool:
        """Memory of all devices (eq. 6), the communication threshold (eqs. 7 and 8) and pins, in whole numbers."""
        used = [
            sum(int(b.num_bytes[devices == gpu].sum()) for b, devices in zip(self.layers, choice, strict=True))
            for gpu in range(len(self.gpu_bytes))
        ]
        fits = all(taken <= room for taken, room in zip(used, self.gpu_bytes, strict=True))
        return fits and sum(used) >= self.fewest_gpu_bytes and thresholds_hold(self, choice)


def thresholds_hold(problem: PlacementProblem, choice: Sequence[np.ndarray]) -> bool:
    """Whether every layer has no neuron on GPUs, or C_l (eqs. 7 and 8), or the bundles it is pinned to."""
    for bundles, devices, fewest, pin in zip(
        problem.layers, choice, problem.min_gpu_neurons, problem.pins, strict=True
    ):
        on_gpu = devices != CPU
        if pin is not None:
            if not (on_gpu[:pin].all() and not on_gpu[pin:].any()):
                return False
        elif on_gpu.any() and (fewest is None or int(bundles.sizes[on_gpu].sum()) < fewest):
            return False
    return True
