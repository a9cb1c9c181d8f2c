"""Which layers have attention and predictor on GPUs where not all fit: best those whose neurons are there as well.

Dense units go first, in layer order (:mod:`.dense_units`), which says how many fit. Whose they are is open as long as
layers are alike, and a layer that is divided anyway pays its synchronisation once. So layers exchange their dense units,
after it is known where the neurons are: which neurons are on GPUs, and hence the paper's objective, stays as it is.
"""

from dataclasses import replace

import numpy as np

from .latency_problem import Answer, LatencyProblem
from .token_time import CPU


def beside_neurons(problem: LatencyProblem, answer: Answer) -> Answer:
    """*answer* with attention and predictor exchanged between pairs of layers for as long as that makes a token quicker.

    Bundles and head stay, and so does everything's fitting in: every exchange is within the memory of all devices.
    """
    exchange = _Exchange(problem, answer)
    for layer in exchange.lonely_layers():
        exchange.improve(layer)
    return replace(answer, attention=exchange.attention, predictor=exchange.predictor)


class _Exchange:
    """Devices of the dense units, and the bytes that are free on every device, the CPU's last."""

    def __init__(self, problem: LatencyProblem, answer: Answer) -> None:
        self.problem = problem
        self.attention, self.predictor = answer.attention.copy(), answer.predictor.copy()
        used = [*problem.gpu_used(answer), problem.cpu_used(answer)]
        self.free = np.array([*problem.gpu_bytes, problem.cpu_bytes]) - used
        # The only device of a layer's bundles, None where they are on several.
        self.only = [int(devices[0]) if (devices == devices[0]).all() else None for devices in answer.bundles]

    def lonely_layers(self) -> list[int]:
        """Layers with bundles on GPUs and attention on the CPU."""
        return [layer for layer, only in enumerate(self.only) if only != CPU and self.attention[layer] == CPU]

    def improve(self, layer: int) -> None:
        """Exchange with the layer with which most time is gained, if any is."""
        gains = [(self._gain(layer, other), other) for other in range(len(self.only)) if other != layer]
        best, other = max(gains, key=lambda gain: gain[0], default=(0.0, layer))
        if best > 0:
            self.free -= self._growth(layer, other)
            for devices in (self.attention, self.predictor):
                devices[[layer, other]] = devices[[other, layer]]

    def _gain(self, one: int, other: int) -> float:
        """Seconds that an exchange saves; 0 where it does not fit."""
        here, there = self._devices(one), self._devices(other)
        before = self._seconds(one, *here) + self._seconds(other, *there)
        after = self._seconds(one, *there) + self._seconds(other, *here)
        return before - after if after < before and (self._growth(one, other) <= self.free).all() else 0.0

    def _devices(self, layer: int) -> tuple[int, int]:
        return int(self.attention[layer]), int(self.predictor[layer])

    def _seconds(self, layer: int, attention: int, predictor: int) -> float:
        """Of the dense units and the synchronisation of *layer*, were they there."""
        problem, price = self.problem, self.problem.seconds_per_byte
        apart = problem.predictor_bytes[layer] > 0 and predictor != attention
        sync = problem.speeds.sync_seconds if apart or self.only[layer] != attention else 0.0
        dense = problem.attention_bytes[layer] * price[attention] + problem.predictor_bytes[layer] * price[predictor]
        return float(dense) + sync

    def _growth(self, one: int, other: int) -> np.ndarray:
        """Bytes that an exchange adds to every device."""
        growth = np.zeros_like(self.free)
        for sizes, devices in (
            (self.problem.attention_bytes, self.attention),
            (self.problem.predictor_bytes, self.predictor),
        ):
            growth[devices[one]] += sizes[other] - sizes[one]
            growth[devices[other]] += sizes[one] - sizes[other]
        return growth
