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
from .token_time import CPU, TokenTime, UnitDevices, speeds_of, token_time

# Of the CPU's bandwidth, where matrices are read from their first row to their last. q4_0: llama.cpp's tokens per second in
# F16 and Q4_0 on the same two cores, 30.1 and 67.2, against 2 and 0.5625 bytes a weight. q8_0: our kernel, 33.1 of 40 GB/s.
UNPACKING_SHARE = {"q4_0": 0.62, "q8_0": 0.83}


@dataclass(frozen=True)
class FittedConstants:
    """See the head of the module; both have a value for every model, machine, type and system alike."""

    overhead_seconds_per_layer: float
    scattered_read_share: float


FITTED = FittedConstants(overhead_seconds_per_layer=0.0003898, scattered_read_share=0.5322)


@dataclass(frozen=True)
class ReadTimes:
    """What reading takes before the fitted constants have their say.

    ``token`` and ``prompt``: without overhead, all in sequence. ``cpu_density``: float64 [layers], the share that a token
    reads of the neurons on the CPU; None where they are read from first to last. ``attention_on_gpu``: bool [layers].
    ``gap``: of the integer program, relative. ``gpu_share``: share of a token's FFN reads that GPUs make.
    """

    token: TokenTime
    prompt: TokenTime
    cpu_density: np.ndarray | None
    attention_on_gpu: np.ndarray
    head_on_gpu: bool
    gap: float
    gpu_share: float

    def speed(self, constants: FittedConstants = FITTED) -> "SimulatedSpeed":
        """With overhead, and scattered rows at their price."""
        overhead = np.full(len(self.attention_on_gpu), constants.overhead_seconds_per_layer)
        token, prompt = (replace(time, overhead_seconds=overhead) for time in (self.token, self.prompt))
        if self.cpu_density is not None:
            price = (1 - self.cpu_density) / constants.scattered_read_share + self.cpu_density
            token = replace(token, cpu_seconds=token.cpu_seconds * price)
        return SimulatedSpeed(token, prompt.total_seconds, self)


@dataclass(frozen=True)
class SimulatedSpeed:
    """``time``: of one token; ``prompt_seconds``: of the prompt before it."""

    time: TokenTime
    prompt_seconds: float
    reads: ReadTimes

    @property
    def tokens_per_second(self) -> float:
        return self.time.tokens_per_second

    def tokens_per_second_with_prompt(self, tokens: int) -> float:
        """Of an answer of *tokens* tokens, prompt included."""
        return tokens / (self.prompt_seconds + tokens * self.time.total_seconds)

    def parts(self) -> dict[str, float]:
        """The seconds of a token by what they go to. What GPU and CPU do at the same time is in both, so
        gpu + cpu − overlapped + predictor + sync + overhead is the token's time."""
        time, on_gpu, head_on_gpu = self.time, self.reads.attention_on_gpu, self.reads.head_on_gpu
        gpu, cpu = (
            float(time.attention_seconds[where].sum() + neurons.sum()) + time.head_seconds * head
            for where, neurons, head in (
                (on_gpu, time.gpu_seconds, head_on_gpu),
                (~on_gpu, time.cpu_seconds, not head_on_gpu),
            )
        )
        return {
            "gpu_seconds": gpu,
            "cpu_seconds": cpu,
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
    return read_times(model, system, hardware, devices, gap).speed(constants)


def read_times(
    model: SimulatedModel, system: System, hardware: Hardware, devices: UnitDevices, gap: float = 0.0
) -> ReadTimes:
    """Of units that lie on *devices*."""
    as_read = model if model.tokens_read is None else replace(model, context=model.tokens_read)
    units, reads = system_units(as_read, system), system_reads(model, system)
    unpacking = UNPACKING_SHARE.get(model.dtype, 1.0)
    speeds = replace(speeds_of(hardware, model.shape.hidden_size), cpu_bandwidth_share=unpacking)
    everything = tuple(np.ones_like(read) for read in reads)
    on_cpu = [read[where == CPU] for read, where in zip(reads, devices.neurons, strict=True)]
    read, read_on_cpu = (sum(float(layer.sum()) for layer in layers) for layers in (reads, on_cpu))
    density = np.array([float(layer.mean()) if len(layer) else 0.0 for layer in on_cpu])
    return ReadTimes(
        token=token_time(units, devices, reads, speeds),
        prompt=token_time(units, devices, everything, speeds),
        cpu_density=None if system in DENSE else density,
        attention_on_gpu=devices.attention != CPU,
        head_on_gpu=devices.head != CPU,
        gap=gap,
        gpu_share=1 - read_on_cpu / read if read else 0.0,
    )
