"""A second opinion on a placement: every constraint and the objective again, from neuron ids, bytes and counts alone.

It shares no code with the integer program, the greedy placement or the grouping.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pi_toolkit.profiler.errors import PlacementError

from .memory import UnitBytes

if TYPE_CHECKING:
    from .placement import Placement

_REMEDY = "report this bug with the workspace's activation folder"


def check_placement(
    placement: "Placement", units: UnitBytes, counts: Sequence[np.ndarray], cpu_memory_bytes: int
) -> None:
    """Raise ``PlacementError`` if *placement* breaks a constraint or states a wrong number."""
    _check_ids(placement.gpu_neurons, counts)
    _check_threshold(placement)
    _check_memory(placement, units, counts, cpu_memory_bytes)
    _check_objective(placement, counts)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise PlacementError(f"the placement did not pass its check ({what}): {_REMEDY}")


def _check_ids(gpu_neurons: Sequence[np.ndarray], counts: Sequence[np.ndarray]) -> None:
    """Every neuron is in one place (eq. 3)."""
    _require(len(gpu_neurons) == len(counts), "number of layers")
    for layer, (ids, layer_counts) in enumerate(zip(gpu_neurons, counts, strict=True)):
        _require(bool((np.diff(ids) > 0).all()), f"layer {layer}: ids ascend")
        _require(not len(ids) or (ids[0] >= 0 and ids[-1] < len(layer_counts)), f"layer {layer}: ids exist")


def _check_threshold(placement: "Placement") -> None:
    """No layer, or at least C_l neurons of it (eqs. 7 and 8)."""
    for layer, (ids, fewest) in enumerate(zip(placement.gpu_neurons, placement.min_gpu_neurons, strict=True)):
        _require(not len(ids) or (fewest is not None and len(ids) >= fewest), f"layer {layer}: C_l = {fewest}")


def _check_memory(
    placement: "Placement", units: UnitBytes, counts: Sequence[np.ndarray], cpu_memory_bytes: int
) -> None:
    """Stated bytes are those of the units, and within both memories (eq. 6)."""
    on_gpu = np.array([len(ids) for ids in placement.gpu_neurons], dtype=np.int64)
    neurons = np.array([len(layer) for layer in counts], dtype=np.int64)
    attention = np.array(units.attention, dtype=np.int64)
    predictor = np.array(units.predictor, dtype=np.int64)
    attention_on_gpu, predictor_on_gpu = np.array(placement.attention_on_gpu), np.array(placement.predictor_on_gpu)
    gpu = int((attention * attention_on_gpu).sum() + (predictor * predictor_on_gpu).sum() + on_gpu.sum() * units.neuron)
    cpu = int((attention * ~attention_on_gpu).sum() + (predictor * ~predictor_on_gpu).sum()) + units.embedding
    cpu += int((neurons - on_gpu).sum()) * units.neuron
    if placement.head_on_gpu:
        gpu += units.head
    elif not units.head_is_embedding:
        cpu += units.head
    _require(placement.gpu_neuron_bytes == int(on_gpu.sum()) * units.neuron, "bytes of neurons on the GPU")
    _require(placement.gpu_bytes == gpu <= placement.gpu_budget_bytes, "bytes on the GPU")
    _require(placement.cpu_bytes == cpu <= cpu_memory_bytes, "bytes on the CPU")


def _check_objective(placement: "Placement", counts: Sequence[np.ndarray]) -> None:
    """Firings served from the GPU (eq. 2) and the bound above them."""
    firings = sum(float(layer[ids].sum()) for layer, ids in zip(counts, placement.gpu_neurons, strict=True))
    _require(bool(np.isclose(firings, placement.objective_value, rtol=1e-9, atol=1e-9)), "objective")
    _require(placement.upper_bound >= placement.objective_value, "upper bound")
    _require(0 <= placement.gap <= 1, "gap")
