"""The placement of a model on one machine: dense units first, in layer order, then FFN neurons by the integer program."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pi_toolkit.profiler.command_line import readable_bytes
from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.profiler.hardware import Hardware
from pi_toolkit.profiler.model_families import ModelShape

from .costs import costs
from .memory import UnitBytes, unit_bytes
from .neuron_groups import group_neurons
from .placement_check import check_placement
from .placement_problem import PlacementProblem
from .placement_solve import Status, solve


@dataclass(frozen=True)
class PlacementRequest:
    """What a placement is made for. ``sync_seconds`` None: T_sync of the hardware and the transfer of hidden states."""

    vram_bytes: int
    reserve_bytes: int
    dtype: str
    context: int
    batch_size: int
    sync_seconds: float | None = None
    time_limit_seconds: float = 60.0
    predictor_dtype: str | None = None  # the model's where it is None

    @property
    def gpu_budget_bytes(self) -> int:
        return max(0, self.vram_bytes - self.reserve_bytes)


@dataclass(frozen=True)
class Placement:
    """Where everything lives.

    ``gpu_neurons``: per layer the ascending int32 ids of the FFN neurons on the GPU. ``gpu_bytes`` of at most
    ``gpu_budget_bytes`` are used, ``gpu_neuron_bytes`` of them by FFN neurons. ``min_gpu_neurons``: C_l per layer, None
    where the GPU cannot win. ``objective_value``: firings of the profile served from the GPU, which no placement of the
    neurons lifts above ``upper_bound``; ``gap`` is relative to it. ``status``: see :class:`.placement_solve.Solution`.
    """

    gpu_neurons: tuple[np.ndarray, ...]
    attention_on_gpu: tuple[bool, ...]
    predictor_on_gpu: tuple[bool, ...]
    head_on_gpu: bool
    gpu_budget_bytes: int
    gpu_bytes: int
    gpu_neuron_bytes: int
    cpu_bytes: int
    min_gpu_neurons: tuple[int | None, ...]
    objective_value: int | float
    upper_bound: int | float
    gap: float
    status: Status
    seconds: float
    fallback_reason: str | None


@dataclass(frozen=True)
class DensePlacement:
    """Units that run on every token, and the bytes they take on each device."""

    attention_on_gpu: tuple[bool, ...]
    predictor_on_gpu: tuple[bool, ...]
    head_on_gpu: bool
    gpu_bytes: int
    cpu_bytes: int


def place(
    shape: ModelShape,
    counts: Sequence[np.ndarray],
    hardware: Hardware,
    request: PlacementRequest,
    predictor_hidden: Sequence[int] | None = None,
) -> Placement:
    """Place a model with firing *counts* [neurons] per layer and predictors of widths *predictor_hidden*.

    Raises ``PlacementError`` when the model does not fit the memory of both devices. A machine without a GPU has no
    budget and every C_l is None.
    """
    units = unit_bytes(
        shape, request.dtype, request.context, request.batch_size, predictor_hidden, request.predictor_dtype
    )
    budget = request.gpu_budget_bytes if hardware.gpu else 0
    dense = place_dense_units(units, budget)
    problem = PlacementProblem(
        layers=group_neurons(counts),
        gpu_capacity=min((budget - dense.gpu_bytes) // units.neuron, sum(shape.ffn_sizes)),
        fewest_on_gpu=_fewest_on_gpu(shape, units, dense, hardware),
        min_gpu_neurons=_min_gpu_neurons(shape, units, hardware, request),
    )
    solution = solve(problem, request.time_limit_seconds)
    gpu_neurons = tuple(groups.members(chosen) for groups, chosen in zip(problem.layers, solution.choice, strict=True))
    placed = sum(len(ids) for ids in gpu_neurons)
    placement = Placement(
        gpu_neurons=gpu_neurons,
        attention_on_gpu=dense.attention_on_gpu,
        predictor_on_gpu=dense.predictor_on_gpu,
        head_on_gpu=dense.head_on_gpu,
        gpu_budget_bytes=budget,
        gpu_bytes=dense.gpu_bytes + placed * units.neuron,
        gpu_neuron_bytes=placed * units.neuron,
        cpu_bytes=dense.cpu_bytes + (sum(shape.ffn_sizes) - placed) * units.neuron,
        min_gpu_neurons=problem.min_gpu_neurons,
        objective_value=solution.value,
        upper_bound=solution.upper_bound,
        gap=solution.gap,
        status=solution.status,
        seconds=solution.seconds,
        fallback_reason=solution.fallback_reason,
    )
    check_placement(placement, units, counts, hardware.cpu_memory_bytes)
    return placement


def place_dense_units(units: UnitBytes, budget_bytes: int) -> DensePlacement:
    """Attention with KV cache and predictor of each layer in layer order, then the head: each goes on the GPU if it fits
    into what the ones before it left, and otherwise stays on the CPU."""
    used = 0

    def takes(num_bytes: int) -> bool:
        nonlocal used
        fits = used + num_bytes <= budget_bytes
        used += num_bytes if fits else 0
        return fits

    by_layer = [
        (takes(attention), predictor > 0 and takes(predictor))
        for attention, predictor in zip(units.attention, units.predictor, strict=True)
    ]
    head_on_gpu = takes(units.head)
    cpu_bytes = units.embedding + sum(units.attention) + sum(units.predictor) - used
    # On the GPU a tied head is a copy; on the CPU it is the embedding itself.
    cpu_bytes += units.head if head_on_gpu or not units.head_is_embedding else 0
    attention_on_gpu, predictor_on_gpu = zip(*by_layer, strict=True)
    return DensePlacement(attention_on_gpu, predictor_on_gpu, head_on_gpu, used, cpu_bytes)


def _fewest_on_gpu(shape: ModelShape, units: UnitBytes, dense: DensePlacement, hardware: Hardware) -> int:
    """Neurons the CPU's memory has no room for."""
    room = hardware.cpu_memory_bytes - dense.cpu_bytes
    if room < 0:
        raise PlacementError(
            f"embeddings, attention and head of {readable_bytes(dense.cpu_bytes)} on the CPU exceed its memory of "
            f"{readable_bytes(hardware.cpu_memory_bytes)}: use a smaller --dtype, a shorter --ctx or more --vram"
        )
    return max(0, sum(shape.ffn_sizes) - room // units.neuron)


def _min_gpu_neurons(
    shape: ModelShape, units: UnitBytes, hardware: Hardware, request: PlacementRequest
) -> tuple[int | None, ...]:
    if hardware.gpu is None:
        return (None,) * shape.num_layers
    prices = costs(hardware, hardware.gpu, units.neuron, shape.hidden_size, request.batch_size, request.sync_seconds)
    return prices.min_gpu_neurons(shape.ffn_sizes)
