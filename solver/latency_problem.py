"""The data of one placement decision under the objective latency, and what any answer to it costs.

Attention with its KV cache and predictor of every layer, the output head, and all bundles are units of choice. The time is
that of :mod:`.token_time`, here from bundles, there from single neurons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .bundle import Bundles
from .memory import UnitBytes
from .placement_problem import Choice, PlacementProblem, thresholds_hold
from .token_time import CPU, Speeds


@dataclass(frozen=True)
class Answer:
    """A device, the number of a GPU or ``CPU``, for every unit.

    ``attention``, ``predictor``: int [layers], the latter ``CPU`` where there is none; ``head``; ``bundles``: per layer int8
    [bundles].
    """

    attention: np.ndarray
    predictor: np.ndarray
    head: int
    bundles: Choice


@dataclass(frozen=True)
class LatencyProblem:
    """Where should every unit live for the shortest token?

    ``neurons``: bundles, C_l and pins; its ``gpu_bytes`` are the whole budgets of the GPUs here, its ``fewest_gpu_bytes``
    is not used. ``cpu_bytes``: memory of the CPU, which also holds the embedding.
    """

    neurons: PlacementProblem
    units: UnitBytes
    speeds: Speeds
    cpu_bytes: int

    @property
    def layers(self) -> tuple[Bundles, ...]:
        return self.neurons.layers

    @property
    def gpu_bytes(self) -> tuple[int, ...]:
        return self.neurons.gpu_bytes

    @cached_property
    def seconds_per_byte(self) -> np.ndarray:
        """float64 [GPUs + 1], the CPU's last."""
        return self.speeds.seconds_per_byte()

    @cached_property
    def attention_bytes(self) -> np.ndarray:
        return np.array(self.units.attention, dtype=np.int64)

    @cached_property
    def predictor_bytes(self) -> np.ndarray:
        return np.array(self.units.predictor, dtype=np.int64)

    @cached_property
    def layer_bytes(self) -> np.ndarray:
        """int64 [layers], of all bundles of a layer."""
        return np.array([int(bundles.num_bytes.sum()) for bundles in self.layers], dtype=np.int64)

    @cached_property
    def layer_reads(self) -> np.ndarray:
        """float64 [layers], bytes of a layer's bundles that a token reads."""
        return np.array([float(bundles.read_bytes.sum()) for bundles in self.layers])

    @cached_property
    def head_cpu_bytes(self) -> int:
        """What the head takes on the CPU, where a tied one is the embedding."""
        return 0 if self.units.head_is_embedding else self.units.head

    @cached_property
    def fewest_gpu_bytes(self) -> int:
        """Bytes the CPU's memory cannot hold, and which the GPUs must."""
        movable = (
            int(self.attention_bytes.sum() + self.predictor_bytes.sum() + self.layer_bytes.sum()) + self.head_cpu_bytes
        )
        return max(0, movable + self.units.embedding - self.cpu_bytes)

    def open_to_gpu(self, layer: int) -> bool:
        """Whether bundles of *layer* may be on GPUs."""
        pin = self.neurons.pins[layer]
        return self.neurons.min_gpu_neurons[layer] is not None if pin is None else pin > 0

    def gpu_used(self, answer: Answer) -> list[int]:
        """Bytes on each GPU."""
        used = []
        for gpu in range(len(self.gpu_bytes)):
            taken = int(self.attention_bytes[answer.attention == gpu].sum())
            taken += int(self.predictor_bytes[answer.predictor == gpu].sum())
            taken += self.units.head if answer.head == gpu else 0
            taken += sum(int(b.num_bytes[d == gpu].sum()) for b, d in zip(self.layers, answer.bundles, strict=True))
            used.append(taken)
        return used

    def cpu_used(self, answer: Answer) -> int:
        """Bytes on the CPU."""
        taken = self.units.embedding + (self.head_cpu_bytes if answer.head == CPU else 0)
        taken += int(self.attention_bytes[answer.attention == CPU].sum())
        taken += int(self.predictor_bytes[answer.predictor == CPU].sum())
        return taken + sum(int(b.num_bytes[d == CPU].sum()) for b, d in zip(self.layers, answer.bundles, strict=True))

    def is_feasible(self, answer: Answer) -> bool:
        """Memory of all devices, C_l, pins, and that attention and predictor of a layer lie on no two GPUs."""
        fits = all(used <= room for used, room in zip(self.gpu_used(answer), self.gpu_bytes, strict=True))
        apart = (answer.attention != CPU) & (answer.predictor != CPU) & (answer.attention != answer.predictor)
        return (
            fits
            and self.cpu_used(answer) <= self.cpu_bytes
            and not apart.any()
            and thresholds_hold(self.neurons, answer.bundles)
        )

    def seconds(self, answer: Answer) -> float:
        """Predicted time of a token."""
        price = self.seconds_per_byte
        dense = float((self.attention_bytes * price[answer.attention]).sum())
        dense += float((self.predictor_bytes * price[answer.predictor]).sum()) + self.units.head * price[answer.head]
        layers = sum(self.ffn_seconds(layer, devices) for layer, devices in enumerate(answer.bundles))
        split = sum(self.is_split(layer, answer) for layer in range(len(self.layers)))
        overhead = self.speeds.overhead_seconds_per_layer * len(self.layers)
        return dense + layers + self.speeds.sync_seconds * split + overhead

    def ffn_seconds(self, layer: int, devices: np.ndarray) -> float:
        """The slowest device's part of the bundles of one layer."""
        price = self.seconds_per_byte
        reads = np.bincount(devices % len(price), weights=self.layers[layer].read_bytes, minlength=len(price))
        return float((reads * price).max())

    def is_split(self, layer: int, answer: Answer) -> bool:
        """y_l: whether the units of *layer* lie on more than one device."""
        attention = answer.attention[layer]
        apart = self.predictor_bytes[layer] > 0 and answer.predictor[layer] != attention
        return bool(apart or (answer.bundles[layer] != attention).any())

    def on_cpu(self) -> Answer:
        """Everything on the CPU, pinned bundles included."""
        nowhere = np.full(len(self.layers), CPU)
        return Answer(nowhere, nowhere.copy(), CPU, tuple(self.neurons.nothing()))


def best_of(problem: LatencyProblem, answers: Sequence[Answer]) -> Answer | None:
    """The quickest of the feasible *answers*; the first among equals."""
    feasible = [answer for answer in answers if problem.is_feasible(answer)]
    return min(feasible, key=problem.seconds, default=None)
