"""Prices of the placement: how long a neuron takes on each device and how many make a synchronisation worth it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pi_toolkit.profiler.hardware import Gpu, Hardware

ACTIVATION_BYTES = 4  # hidden states cross the bus as float32


@dataclass(frozen=True)
class Costs:
    """Seconds of one neuron on each device (eq. 5: one read of its weights) and of one synchronisation (T_sync)."""

    cpu_neuron_seconds: float
    gpu_neuron_seconds: float
    sync_seconds: float

    def min_gpu_neurons(self, ffn_sizes: Sequence[int]) -> tuple[int | None, ...]:
        """C_l per layer: the fewest neurons whose move to the GPU gains more than a synchronisation costs (eq. 4).

        C_l · T_GPU + T_sync ≤ C_l · T_CPU, so C_l = ceil(T_sync / (T_CPU − T_GPU)). None where no number of neurons
        pays: the GPU reads no faster than the CPU, or the layer has fewer than C_l neurons.
        """
        gain_seconds = self.cpu_neuron_seconds - self.gpu_neuron_seconds
        if gain_seconds <= 0:
            return (None,) * len(ffn_sizes)
        break_even = self.sync_seconds / gain_seconds
        if not break_even <= max(ffn_sizes):
            return (None,) * len(ffn_sizes)
        fewest = math.ceil(break_even)
        return tuple(fewest if fewest <= neurons else None for neurons in ffn_sizes)


def costs(
    hardware: Hardware,
    gpu: Gpu,
    neuron_bytes: int,
    hidden_size: int,
    batch_size: int,
    sync_seconds: float | None = None,
) -> Costs:
    """Prices on *hardware* with its *gpu*; *sync_seconds* replaces all of T_sync, 0 makes synchronisation free."""
    if sync_seconds is None:
        sync_seconds = gpu.sync_seconds + transfer_seconds(gpu, hidden_size, batch_size)
    return Costs(neuron_bytes / hardware.cpu_bytes_per_second, neuron_bytes / gpu.bytes_per_second, sync_seconds)


def transfer_seconds(gpu: Gpu, hidden_size: int, batch_size: int) -> float:
    """Hidden states of one layer to the CPU and its partial sums back, one after the other: the sums depend on the states,
    so each way has the bandwidth of one direction."""
    return 2 * hidden_size * ACTIVATION_BYTES * batch_size / gpu.pcie_bytes_per_second
