"""A second opinion on a placement: every constraint and the objective again, from devices, bytes and counts alone.

It shares no code with the integer programs, the greedy placements, the grouping or the prediction of time.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pi_toolkit.profiler.errors import PlacementError

from .memory import UnitBytes

if TYPE_CHECKING:
    from .placement import Placement

_REMEDY = "report this bug with the workspace's activation folder"


def check_placement(
    placement: "Placement",
    units: UnitBytes,
    counts: Sequence[np.ndarray],
    cpu_memory_bytes: int,
    pins: Mapping[int, int] | None = None,
) -> None:
    """Raise ``PlacementError`` if *placement* breaks a constraint or states a wrong number."""
    _check_devices(placement, counts)
    _check_threshold(placement, pins or {})
    _check_memory(placement, units, cpu_memory_bytes)
    _check_firings(placement, counts)
    _check_seconds(placement, units)
    value, bound = placement.objective_value, placement.bound
    is_time = placement.objective == "latency"
    expected = placement.time.total_seconds if is_time else placement.gpu_firings
    _require(bool(np.isclose(value, expected, rtol=1e-9, atol=0 if is_time else 1e-9)), "objective")
    _require(bound <= value if is_time else bound >= value, "bound")
    _require(0 <= placement.gap <= 1, "gap")
    distance = (value - bound) / value if is_time else (bound - value) / bound if bound else 0.0
    _require(bool(np.isclose(placement.gap, distance, atol=1e-12)), "gap")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise PlacementError(f"the placement did not pass its check ({what}): {_REMEDY}")


def _check_devices(placement: "Placement", counts: Sequence[np.ndarray]) -> None:
    """Every unit is in one place (eq. 3) that exists; attention and predictor of a layer lie on no two GPUs."""
    devices, gpus = placement.devices, len(placement.gpu_budgets)
    _require(len(devices.neurons) == len(counts), "number of layers")
    for layer, (of_neurons, layer_counts) in enumerate(zip(devices.neurons, counts, strict=True)):
        _require(of_neurons.shape == layer_counts.shape, f"layer {layer}: a device for every neuron")
        _require(bool(((of_neurons >= -1) & (of_neurons < gpus)).all()), f"layer {layer}: devices exist")
    for name, of_units in (("attention", devices.attention), ("predictor", devices.predictor)):
        _require(of_units.shape == (len(counts),), f"a device for every {name}")
        _require(bool(((of_units >= -1) & (of_units < gpus)).all()), f"devices of {name} exist")
    _require(-1 <= devices.head < gpus, "device of the head exists")
    apart = (devices.attention >= 0) & (devices.predictor >= 0) & (devices.attention != devices.predictor)
    _require(not apart.any(), "attention and predictor on two GPUs")


def _check_threshold(placement: "Placement", pins: Mapping[int, int]) -> None:
    """No neuron of a layer, or at least C_l (eqs. 7 and 8), or as many as are pinned."""
    for layer, (devices, fewest) in enumerate(zip(placement.devices.neurons, placement.min_gpu_neurons, strict=True)):
        on_gpus = int((devices >= 0).sum())
        if layer in pins:
            _require(on_gpus == pins[layer], f"layer {layer}: pinned to {pins[layer]}")
        else:
            _require(not on_gpus or (fewest is not None and on_gpus >= fewest), f"layer {layer}: C_l = {fewest}")


def _check_memory(placement: "Placement", units: UnitBytes, cpu_memory_bytes: int) -> None:
    """Stated bytes are those of the units, and within all memories (eq. 6)."""
    devices = placement.devices
    attention, predictor = (np.array(sizes, dtype=np.int64) for sizes in (units.attention, units.predictor))
    taken = []
    for device in range(-1, len(placement.gpu_budgets)):
        total = int(attention[devices.attention == device].sum() + predictor[devices.predictor == device].sum())
        total += sum(int((layer == device).sum()) for layer in devices.neurons) * units.neuron
        total += units.head if devices.head == device and not (device == -1 and units.head_is_embedding) else 0
        taken.append(total + (units.embedding if device == -1 else 0))
    _require(placement.cpu_bytes == taken[0] <= cpu_memory_bytes, "bytes on the CPU")
    _require(list(placement.gpu_used) == taken[1:], "bytes on the GPUs")
    fits = all(used <= budget for used, budget in zip(placement.gpu_used, placement.gpu_budgets, strict=True))
    _require(fits, "memory of the GPUs")


def _check_firings(placement: "Placement", counts: Sequence[np.ndarray]) -> None:
    """Firings served from GPUs (eq. 2)."""
    firings = sum(float(layer[at >= 0].sum()) for layer, at in zip(counts, placement.devices.neurons, strict=True))
    _require(bool(np.isclose(firings, placement.gpu_firings, rtol=1e-9, atol=1e-9)), "firings on GPUs")


def _check_seconds(placement: "Placement", units: UnitBytes) -> None:
    """The predicted time of a token, layer by layer (eq. 5)."""
    devices, speeds = placement.devices, placement.speeds
    bandwidth = [speeds.cpu_bytes_per_second * speeds.cpu_bandwidth_share, *speeds.gpu_bytes_per_second]
    total = units.head / bandwidth[devices.head + 1]
    for layer, (of_neurons, share) in enumerate(zip(devices.neurons, placement.read_shares, strict=True)):
        read = share * units.neuron
        places = {int(devices.attention[layer]), *np.unique(of_neurons).tolist()}
        total += units.attention[layer] / bandwidth[devices.attention[layer] + 1]
        if units.predictor[layer]:
            places.add(int(devices.predictor[layer]))
            total += units.predictor[layer] / bandwidth[devices.predictor[layer] + 1]
        total += max(float(read[of_neurons == device].sum()) / bandwidth[device + 1] for device in places)
        total += speeds.overhead_seconds_per_layer + (speeds.sync_seconds if len(places) > 1 else 0.0)
    _require(bool(np.isclose(total, placement.time.total_seconds, rtol=1e-9, atol=0)), "predicted time")
