"""How many tokens per second a machine would make of a model, neither of which need be here.

The time is :mod:`.token_time`'s. What that takes for granted is said here by two constants, fitted to two published
figures (:mod:`.paper_figures`), and two measured ones:

* every layer costs ``overhead_seconds_per_layer``: launches, waiting, what is not reading;
* single rows scattered over a matrix are read at ``scattered_read_share`` of the CPU's bandwidth. A row right behind one
  that is read as well is read in sequence, so a layer of which the share ρ is read takes
  bytes · ((1 − ρ) / scattered_read_share + ρ) / bandwidth;
* quantised matrices are read from the CPU's memory at less than its bandwidth, because unpacking takes time;
* 1.4 candidates for every neuron that fires (:data:`.token_time.ASSUMED_OVERSHOOT`).

A prompt is one pass that reads every weight once. ``docs/simulation.md`` compares all of it with what is published.
"""

from dataclasses import dataclass, replace

import numpy as np

from pi_toolkit.profiler.hardware import Hardware

from .simulated_model import SimulatedModel
from .simulated_systems import DENSE, System, system_reads, system_units, unit_devices
from .token_time import CPU, Speeds, TokenTime, UnitDevices, speeds_of, token_time

# Of the CPU's bandwidth, where matrices are read from their first row to their last. q4_0: llama.cpp's tokens per second in
# F16 and Q4_0 on the same two cores, 30.1 and 67.2, against 2 and 0.5625 bytes a weight. q8_0: our kernel, 33.1 of 40 GB/s.
UNPACKING_SHARE = {"q4_0": 0.62, "q8_0": 0.83}


@dataclass(frozen=True)
class FittedConstants:
    """See the head of the module; both have a value for every model, machine, type and system alike."""

    overhead_seconds_per_layer: float
    scattered_read_share: float


FITTED = FittedConstants(overhead_seconds_per_layer=3.952e-4, scattered_read_share=0.4871)


@dataclass(frozen=True)
class SimulatedSpeed:
    """``time``: of one token; ``prompt_seconds``: of the prompt before it; ``gap``: of the integer program, relative;
    ``gpu_share``: share of the FFN's reads that GPUs make; ``devices``: where everything lies."""

    time: TokenTime
    prompt_seconds: float
    gap: float
    gpu_share: float
    devices: UnitDevices

    @property
    def tokens_per_second(self) -> float:
        return self.time.tokens_per_second

    def tokens_per_second_with_prompt(self, tokens: int) -> float:
        """Of an answer of *tokens* tokens, prompt included."""
        return tokens / (self.prompt_seconds + tokens * self.time.total_seconds)

    def parts(self) -> dict[str, float]:
        """The seconds of a token by what they go to. What GPU and CPU do at the same time is in both, so
        gpu + cpu − overlapped + predictor + sync + overhead is the token's time."""
        time, on_gpu = self.time, self.devices.attention != CPU
        head_on_gpu = self.devices.head != CPU
        return {
            "gpu_seconds": float(time.attention_seconds[on_gpu].sum() + time.gpu_seconds.sum())
            + time.head_seconds * head_on_gpu,
            "cpu_seconds": float(time.attention_seconds[~on_gpu].sum() + time.cpu_seconds.sum())
            + time.head_seconds * (not head_on_gpu),
            "overlapped_seconds": float(np.minimum(time.gpu_seconds, time.cpu_seconds).sum()),
            "predictor_seconds": float(time.predictor_seconds.sum()),
            "sync_seconds": float(time.sync_seconds.sum()),
            "overhead_seconds": float(time.overhead_seconds.sum()),
        }


def simulate(
    model: SimulatedModel, system: System, hardware: Hardware, constants: FittedConstants = FITTED
) -> SimulatedSpeed:
    """The predicted speed of *model* under *system* on *hardware*; raises ``PlacementError`` where it does not fit."""
    devices, gap = unit_devices(model, system, hardware)
    return predict(model, system, hardware, devices, gap, constants)


def predict(
    model: SimulatedModel,
    system: System,
    hardware: Hardware,
    devices: UnitDevices,
    gap: float = 0.0,
    constants: FittedConstants = FITTED,
) -> SimulatedSpeed:
    """The same for units that lie on *devices*."""
    units, reads = system_units(model, system), system_reads(model, system)
    speeds = _speeds(model, hardware, constants)
    time = token_time(units, devices, reads, speeds)
    if system not in DENSE:
        time = replace(time, cpu_seconds=time.cpu_seconds * _scattered(reads, devices, constants))
    everything = tuple(np.ones_like(read) for read in reads)
    on_gpus = sum(float(read[where != CPU].sum()) for read, where in zip(reads, devices.neurons, strict=True))
    return SimulatedSpeed(
        time=time,
        prompt_seconds=token_time(units, devices, everything, speeds).total_seconds,
        gap=gap,
        gpu_share=on_gpus / max(sum(float(read.sum()) for read in reads), 1e-12),
        devices=devices,
    )


def _speeds(model: SimulatedModel, hardware: Hardware, constants: FittedConstants) -> Speeds:
    speeds = speeds_of(hardware, model.shape.hidden_size)
    return replace(
        speeds,
        overhead_seconds_per_layer=constants.overhead_seconds_per_layer,
        cpu_bandwidth_share=UNPACKING_SHARE.get(model.dtype, 1.0),
    )


def _scattered(reads: tuple[np.ndarray, ...], devices: UnitDevices, constants: FittedConstants) -> np.ndarray:
    """Per layer how many times as long the CPU's neurons take as reading the same bytes in sequence."""
    on_cpu = [read[where == CPU] for read, where in zip(reads, devices.neurons, strict=True)]
    density = np.array([float(read.mean()) if len(read) else 0.0 for read in on_cpu])
    return (1 - density) / constants.scattered_read_share + density
