"""What lies on which tier: neurons, attention and predictor of each layer, and the output head.

Tiers are devices. Without a GPU both are the CPU, and a placement is honoured all the same.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pi_toolkit.profiler.model_families import ModelShape
from pi_toolkit.solver.gpuidx import GpuIndex
from pi_toolkit.solver.memory import UnitBytes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TierPlan:
    """``hot_neurons``: per layer the ascending ids of the neurons on the hot tier; all others are on the cold one."""

    hot: "torch.device"
    cold: "torch.device"
    hot_neurons: tuple[np.ndarray, ...]
    attention_hot: tuple[bool, ...]
    predictor_hot: tuple[bool, ...]
    head_hot: bool

    def attention_device(self, layer: int) -> "torch.device":
        return self.hot if self.attention_hot[layer] else self.cold

    def predictor_device(self, layer: int) -> "torch.device":
        return self.hot if self.predictor_hot[layer] else self.cold

    def head_device(self) -> "torch.device":
        return self.hot if self.head_hot else self.cold

    def tiers(self, layer: int, neurons: int) -> "list[tuple[torch.device, np.ndarray]]":
        """(device, ascending neuron ids int64) of the tiers of *layer* that are not empty, hot first."""
        hot = self.hot_neurons[layer].astype(np.int64)
        cold = np.setdiff1d(np.arange(neurons, dtype=np.int64), hot, assume_unique=True)
        return [(device, ids) for device, ids in ((self.hot, hot), (self.cold, cold)) if len(ids)]

    def hot_bytes(self, units: UnitBytes) -> int:
        """Bytes that this plan puts on the hot tier."""
        attention = sum(size for size, hot in zip(units.attention, self.attention_hot, strict=True) if hot)
        predictor = sum(size for size, hot in zip(units.predictor, self.predictor_hot, strict=True) if hot)
        neurons = units.neuron * sum(len(ids) for ids in self.hot_neurons)
        return attention + predictor + neurons + units.head * self.head_hot

    def hot_share(self, shape: ModelShape) -> float:
        """Share of the model's FFN neurons on the hot tier."""
        return sum(len(ids) for ids in self.hot_neurons) / sum(shape.ffn_sizes)


def all_cold(shape: ModelShape, hot: "torch.device", cold: "torch.device") -> TierPlan:
    """Everything on the cold tier: what runs when there is no placement."""
    nothing = (np.empty(0, np.int64),) * shape.num_layers
    nowhere = (False,) * shape.num_layers
    return TierPlan(hot, cold, nothing, nowhere, nowhere, False)


def from_index(index: GpuIndex, hot: "torch.device", cold: "torch.device") -> TierPlan:
    """The plan a ``.gpuidx`` states.

    A file without our keys (PowerInfer's own) says nothing about dense parts: they are hot if any neuron is, because
    PowerInfer places them before the neurons.
    """
    layers = len(index.gpu_neurons)
    default = any(len(ids) for ids in index.gpu_neurons)
    attention = index.attention_on_gpu if index.attention_on_gpu is not None else (default,) * layers
    predictor = index.predictor_on_gpu if index.predictor_on_gpu is not None else (default,) * layers
    head = index.head_on_gpu if index.head_on_gpu is not None else default
    return TierPlan(hot, cold, tuple(index.gpu_neurons), tuple(attention), tuple(predictor), head)
