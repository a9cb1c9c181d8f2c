"""What lies on which tier: neurons, attention and predictor of each layer, and the output head.

Tiers are devices: the cold one is the CPU, hot ones are GPUs. Without a GPU all are the CPU, and a placement is honoured all
the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pi_toolkit.profiler.model_families import ModelShape
from pi_toolkit.solver.gpuidx import GpuIndex
from pi_toolkit.solver.memory import UnitBytes
from pi_toolkit.solver.token_time import CPU, UnitDevices

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TierPlan:
    """``hot_neurons``: per layer the ascending ids of the neurons on hot tiers; all others are on the cold one.

    Where there are several hot tiers, ``gpus`` are their devices, the first of them ``hot``, and ``devices`` says by number
    which unit is on which.
    """

    hot: "torch.device"
    cold: "torch.device"
    hot_neurons: tuple[np.ndarray, ...]
    attention_hot: tuple[bool, ...]
    predictor_hot: tuple[bool, ...]
    head_hot: bool
    gpus: "tuple[torch.device, ...]" = ()
    devices: UnitDevices | None = None

    def attention_device(self, layer: int) -> "torch.device":
        if self.devices:
            return self._device(self.devices.attention[layer])
        return self.hot if self.attention_hot[layer] else self.cold

    def predictor_device(self, layer: int) -> "torch.device":
        if self.devices:
            return self._device(self.devices.predictor[layer])
        return self.hot if self.predictor_hot[layer] else self.cold

    def head_device(self) -> "torch.device":
        if self.devices:
            return self._device(self.devices.head)
        return self.hot if self.head_hot else self.cold

    def tiers(self, layer: int, neurons: int) -> "list[tuple[torch.device, np.ndarray]]":
        """(device, ascending neuron ids int64) of the tiers of *layer* that are not empty, hot first."""
        if self.devices:
            of_neurons = self.devices.neurons[layer]
            numbered = [(self._device(number), np.flatnonzero(of_neurons == number)) for number in self._numbers()]
            return [(device, ids) for device, ids in numbered if len(ids)]
        hot = self.hot_neurons[layer].astype(np.int64)
        cold = np.setdiff1d(np.arange(neurons, dtype=np.int64), hot, assume_unique=True)
        return [(device, ids) for device, ids in ((self.hot, hot), (self.cold, cold)) if len(ids)]

    def bytes_by_gpu(self, units: UnitBytes) -> "list[tuple[torch.device, int]]":
        """(device, bytes that this plan puts there) of every hot tier."""
        if not self.devices:
            return [(self.hot, self.hot_bytes(units))]
        attention, predictor = np.array(units.attention), np.array(units.predictor)
        at, result = self.devices, []
        for number, gpu in enumerate(self.gpus):
            taken = int(attention[at.attention == number].sum() + predictor[at.predictor == number].sum())
            taken += units.neuron * sum(int((layer == number).sum()) for layer in at.neurons)
            result.append((gpu, taken + units.head * (at.head == number)))
        return result

    def _numbers(self) -> list[int]:
        return [*range(len(self.gpus)), CPU]

    def _device(self, number: int) -> "torch.device":
        return self.cold if number == CPU else self.gpus[number]

    def hot_bytes(self, units: UnitBytes) -> int:
        """Bytes that this plan puts on hot tiers."""
        attention = sum(size for size, hot in zip(units.attention, self.attention_hot, strict=True) if hot)
        predictor = sum(size for size, hot in zip(units.predictor, self.predictor_hot, strict=True) if hot)
        neurons = units.neuron * sum(len(ids) for ids in self.hot_neurons)
        return attention + predictor + neurons + units.head * self.head_hot

    def hot_share(self, shape: ModelShape) -> float:
        """Share of the model's FFN neurons on hot tiers."""
        return sum(len(ids) for ids in self.hot_neurons) / sum(shape.ffn_sizes)


def all_cold(shape: ModelShape, hot: "torch.device", cold: "torch.device") -> TierPlan:
    """Everything on the cold tier: what runs when there is no placement."""
    nothing = (np.empty(0, np.int64),) * shape.num_layers
    nowhere = (False,) * shape.num_layers
    return TierPlan(hot, cold, nothing, nowhere, nowhere, False)


def from_index(
    index: GpuIndex, hot: "torch.device", cold: "torch.device", gpus: "Sequence[torch.device]" = ()
) -> TierPlan:
    """The plan a ``.gpuidx`` states; *gpus* are the devices of a placement on several, one for each of its ``gpu_budgets``.

    A file without our keys (PowerInfer's own) says nothing about dense parts: they are hot if any neuron is, because
    PowerInfer places them before the neurons.
    """
    layers = len(index.gpu_neurons)
    default = any(len(ids) for ids in index.gpu_neurons)
    attention = index.attention_on_gpu if index.attention_on_gpu is not None else (default,) * layers
    predictor = index.predictor_on_gpu if index.predictor_on_gpu is not None else (default,) * layers
    head = index.head_on_gpu if index.head_on_gpu is not None else default
    plan = TierPlan(hot, cold, tuple(index.gpu_neurons), tuple(attention), tuple(predictor), head)
    if index.devices is None:
        return plan
    assert len(gpus) == len(index.gpu_budgets or ()), "a device for every GPU of the placement"
    return replace(plan, gpus=tuple(gpus), devices=index.devices)
