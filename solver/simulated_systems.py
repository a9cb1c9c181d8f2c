"""Where the units of a model lie, and what a token reads of them, under each of the systems that are compared.

powerinfer     attention, predictors and head on the GPU as far as they fit, neurons by the integer program
random         the same memory, its neurons drawn at random: the engine without the policy
sparse layers  whole layers on the GPU as far as they fit, firing neurons only: predictors and operators alone
llama.cpp      the same whole layers, every neuron
gpu only       every neuron, everything on the GPU, where it fits (vLLM)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.profiler.hardware import Gpu, Hardware
from pi_toolkit.profiler.model_families import ModelShape

from .memory import UnitBytes, unit_bytes
from .placement import Placement, PlacementRequest, place
from .simulated_model import SimulatedModel
from .token_time import ASSUMED_OVERSHOOT, CPU, UnitDevices

System = Literal["powerinfer", "random", "sparse layers", "llama.cpp", "gpu only"]
SYSTEMS: tuple[System, ...] = ("powerinfer", "random", "sparse layers", "llama.cpp", "gpu only")
DENSE: tuple[System, ...] = ("llama.cpp", "gpu only")
FIRINGS_PER_SHARE = 10**6  # firing shares as counts, for the integer program
_SEED = 1


def unit_devices(model: SimulatedModel, system: System, hardware: Hardware) -> tuple[UnitDevices, float]:
    """Devices of all units, and the proven gap of the integer program (0 where none is solved).

    Raises ``PlacementError`` where the model does not fit.
    """
    if system in ("powerinfer", "random"):
        placement = _by_program(model, hardware)
        devices = placement.devices
        if system == "random":
            devices = replace(devices, neurons=tuple(_shuffled(devices.neurons)))
        return devices, placement.gap
    devices = _whole_layers(system_units(model, system), model.shape, [_room(gpu) for gpu in hardware.gpus])
    if system == "gpu only" and not (devices.head >= 0 and (devices.attention >= 0).all()):
        raise PlacementError("the model does not fit the GPU: leave out the system 'gpu only'")
    return devices, 0.0


def system_reads(model: SimulatedModel, system: System) -> tuple[np.ndarray, ...]:
    """Per layer float64 [neurons]: the expected share of a neuron's bytes that a token reads.

    PowerInfer's engine reads gate and up rows of every candidate and the down rows of those that fire. Candidates are the
    neurons that fire and false ones, in all 1.4 times as many; the false ones are spread evenly over the neurons that do
    not fire, since a predictor errs on cold neurons as on hot ones.
    """
    if system in DENSE:
        return tuple(np.ones_like(share) for share in model.firing_shares)
    matrices = model.shape.neuron_matrices
    reads = []
    for share in model.firing_shares:
        density = float(share.mean())
        false_share = min((ASSUMED_OVERSHOOT - 1) * density / (1 - density), 1.0) if density < 1 else 0.0
        candidates = share + false_share * (1 - share)
        reads.append((candidates * (matrices - 1) + share) / matrices)
    return tuple(reads)


def system_units(model: SimulatedModel, system: System) -> UnitBytes:
    """Bytes of the units; the dense systems have no predictors."""
    hidden = None if system in DENSE else model.predictor_sizes
    return unit_bytes(model.shape, model.dtype, model.context, 1, hidden, model.predictor_dtype)


def _room(gpu: Gpu) -> int:
    return max(0, gpu.memory_bytes - gpu.reserve_bytes)


def _by_program(model: SimulatedModel, hardware: Hardware) -> Placement:
    request = PlacementRequest(
        vram_bytes=tuple(gpu.memory_bytes for gpu in hardware.gpus),
        reserve_bytes=tuple(gpu.reserve_bytes for gpu in hardware.gpus),
        dtype=model.dtype,
        context=model.context,
        batch_size=1,
        predictor_dtype=model.predictor_dtype,
        tokens=FIRINGS_PER_SHARE,
        mode="predicted",
    )
    counts = [np.rint(share * FIRINGS_PER_SHARE).astype(np.int64) for share in model.firing_shares]
    return place(model.shape, counts, hardware, request, model.predictor_sizes)


def _shuffled(neurons: Sequence[np.ndarray]) -> list[np.ndarray]:
    """As many on each device, drawn over the whole model."""
    drawn = np.random.default_rng(_SEED).permutation(np.concatenate(neurons))
    return np.split(drawn, np.cumsum([len(layer) for layer in neurons])[:-1])


def _whole_layers(units: UnitBytes, shape: ModelShape, rooms: Sequence[int]) -> UnitDevices:
    """Layers from the last to the first, then the head, GPU after GPU; the first that does not fit ends it (llama.cpp)."""
    layers = [
        a + p + n * units.neuron for a, p, n in zip(units.attention, units.predictor, shape.ffn_sizes, strict=True)
    ]
    gpu, used = 0, 0
    devices = np.full(len(layers) + 1, CPU)  # the head's last
    for unit, num_bytes in [*reversed(list(enumerate(layers))), (len(layers), units.head)]:
        while gpu < len(rooms) and used + num_bytes > rooms[gpu]:
            gpu, used = gpu + 1, 0
        if gpu == len(rooms):
            break
        devices[unit], used = gpu, used + num_bytes
    by_layer = devices[:-1]
    neurons = tuple(np.full(n, device, dtype=np.int8) for n, device in zip(shape.ffn_sizes, by_layer, strict=True))
    return UnitDevices(by_layer, by_layer, int(devices[-1]), neurons)
