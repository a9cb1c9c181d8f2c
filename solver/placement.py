"""The placement of a model on one machine, under the paper's objective or for the shortest token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from pi_toolkit.predictor_training.predictor_size import PredictorSize
from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.profiler.hardware import Hardware
from pi_toolkit.profiler.model_families import ModelShape

from .costs import costs
from .dense_exchange import beside_neurons
from .dense_units import DensePlacement, place_dense_units
from .firings_outline import solve_outlined
from .latency_problem import Answer, LatencyProblem
from .latency_solve import solve_latency
from .memory import UnitBytes, unit_bytes
from .mip_solvers import OPTIMAL_GAP, Status, status_of
from .neuron_groups import GROUP_NEURONS, group_neurons
from .placement_check import check_placement
from .placement_problem import PlacementProblem
from .placement_rivals import layer_wise_answer, random_answer
from .placement_solve import Solution, solve
from .token_time import (
    ASSUMED_OVERSHOOT,
    CPU,
    Mode,
    Speeds,
    TokenTime,
    UnitDevices,
    expected_reads,
    firing_shares,
    speeds_of,
    token_time,
)

Objective = Literal["firings", "latency"]
# The paper's answer, where it is only a rival, is the greedy one if that is proven to be this close to it.
_RIVAL_GAP = 1e-3


@dataclass(frozen=True)
class PlacementRequest:
    """What a placement is made for.

    ``vram_bytes``, ``reserve_bytes``: of every GPU (a number for one). ``sync_seconds`` None: T_sync of the hardware and the
    transfer of hidden states. ``predictor_dtype``, ``head_dtype`` None: what ``pi-run`` holds them in. ``tokens``: how many
    were counted (None: counts are relative). ``mode``, ``overshoot``: see :func:`.token_time.expected_reads`.
    ``group_size``: neurons that are placed together; with ``whole_groups`` those of a layer that do not fill the last group
    stay on the CPU. ``pins``: layer to number of its neurons on GPUs. ``min_gpu_neurons`` replaces C_l. ``max_cpu_bytes``:
    at most so much of the CPU's memory.
    """

    vram_bytes: int | tuple[int, ...]
    reserve_bytes: int | tuple[int, ...]
    dtype: str
    context: int
    batch_size: int
    sync_seconds: float | None = None
    time_limit_seconds: float = 60.0
    predictor_dtype: str | None = None
    head_dtype: str | None = None
    objective: Objective = "firings"
    solver: str = "cbc"
    gap: float = OPTIMAL_GAP
    tokens: int | None = None
    mode: Mode = "exact"
    overshoot: float | tuple[float, ...] = ASSUMED_OVERSHOOT
    group_size: int = GROUP_NEURONS
    whole_groups: bool = False
    pins: Mapping[int, int] = field(default_factory=dict)
    min_gpu_neurons: int | None = None
    max_cpu_bytes: int | None = None

    @property
    def gpu_budgets(self) -> tuple[int, ...]:
        """Bytes on each GPU for the model."""
        vram = self.vram_bytes if isinstance(self.vram_bytes, tuple) else (self.vram_bytes,)
        reserve = self.reserve_bytes if isinstance(self.reserve_bytes, tuple) else (self.reserve_bytes,) * len(vram)
        return tuple(max(0, memory - kept) for memory, kept in zip(vram, reserve, strict=True))

    @property
    def gpu_budget_bytes(self) -> int:
        return sum(self.gpu_budgets)


@dataclass(frozen=True)
class Placement:
    """Where everything lives, and what that is worth.

    ``devices``: see :class:`.token_time.UnitDevices`. ``gpu_used`` of at most ``gpu_budgets`` bytes are taken on each GPU.
    ``min_gpu_neurons``: C_l per layer, None where GPUs cannot win. ``objective_value``: firings of the profile served from
    GPUs, or predicted seconds of a token; no placement reaches beyond ``bound``, above the former or below the latter, and
    ``gap`` is the distance relative to the larger. ``status``: see :class:`.placement_solve.Solution`. ``rivals``: predicted
    tokens per second of other placements in the same memory, None where one does not fit. ``read_shares``: per layer the
    share of a neuron's bytes that a token is expected to read. ``gpu_firings`` of ``all_firings`` of the profile are those of
    neurons on GPUs.
    """

    devices: UnitDevices
    units: UnitBytes
    gpu_budgets: tuple[int, ...]
    gpu_used: tuple[int, ...]
    cpu_bytes: int
    min_gpu_neurons: tuple[int | None, ...]
    objective: Objective
    objective_value: int | float
    bound: int | float
    gap: float
    status: Status
    seconds: float
    fallback_reason: str | None
    gpu_firings: int | float
    all_firings: float
    time: TokenTime
    rivals: dict[str, float | None]
    speeds: Speeds
    read_shares: tuple[np.ndarray, ...]

    @property
    def gpu_neurons(self) -> tuple[np.ndarray, ...]:
        """Per layer the ascending int32 ids of the FFN neurons on GPUs."""
        return tuple(np.flatnonzero(layer != CPU).astype(np.int32) for layer in self.devices.neurons)

    @property
    def attention_on_gpu(self) -> tuple[bool, ...]:
        return tuple((self.devices.attention != CPU).tolist())

    @property
    def predictor_on_gpu(self) -> tuple[bool, ...]:
        return tuple((self.devices.predictor != CPU).tolist())

    @property
    def head_on_gpu(self) -> bool:
        return self.devices.head != CPU

    @property
    def gpu_budget_bytes(self) -> int:
        return sum(self.gpu_budgets)

    @property
    def gpu_bytes(self) -> int:
        return sum(self.gpu_used)

    @property
    def gpu_neuron_bytes(self) -> int:
        return sum(len(ids) for ids in self.gpu_neurons) * self.units.neuron


def place(
    shape: ModelShape,
    counts: Sequence[np.ndarray],
    hardware: Hardware,
    request: PlacementRequest,
    predictor_sizes: Sequence[PredictorSize] | None = None,
) -> Placement:
    """Place a model with firing *counts* [neurons] per layer and predictors of *predictor_sizes*.

    The GPUs of *hardware* and of *request* are the same. Raises ``PlacementError`` when the model does not fit the memory
    of all devices, or what is asked for contradicts itself. A machine without a GPU has no budget and every C_l is None.
    """
    _check_pins(request.pins, shape.ffn_sizes)
    units = unit_bytes(
        shape,
        request.dtype,
        request.context,
        request.batch_size,
        predictor_sizes,
        request.predictor_dtype,
        request.head_dtype,
    )
    shares = firing_shares(counts, request.tokens)
    reads = expected_reads(shares, request.mode, shape.neuron_matrices, request.overshoot, request.batch_size)
    problem = _latency_problem(shape, counts, reads, units, hardware, request)
    firings_solution: Solution | None = None
    try:
        dense, firings_solution = _by_firings(problem, units, request)
    except PlacementError:
        if request.objective == "firings":
            raise
    paper = None if firings_solution is None else beside_neurons(problem, _answer(dense, firings_solution))
    rivals = {"random": random_answer(problem), "layer-wise": layer_wise_answer(problem), "paper": paper}
    if request.objective == "firings":
        assert firings_solution is not None and paper is not None
        answer, solution = paper, firings_solution
        value, bound, gap = solution.value, solution.upper_bound, solution.gap
        status, seconds, reason = solution.status, solution.seconds, solution.fallback_reason
    else:
        feasible = [rival for rival in rivals.values() if rival is not None]
        latency = solve_latency(problem, request.time_limit_seconds, request.solver, feasible, request.gap)
        answer, value, bound, gap = latency.answer, latency.token_seconds, latency.lower_bound, latency.gap
        status, seconds, reason = latency.status, latency.seconds, latency.fallback_reason
    if request.whole_groups:
        answer = _without_short_groups(problem, answer, request.group_size)
        if request.objective == "firings":
            value = problem.neurons.value(answer.bundles)
            gap = (bound - value) / bound if bound else 0.0
        else:
            value = problem.seconds(answer)
            gap = (value - bound) / value
        status = status if status == "greedy" else status_of(gap)
    devices = _unit_devices(problem, answer)
    time = token_time(units, devices, reads, problem.speeds)
    placement = Placement(
        devices=devices,
        units=units,
        gpu_budgets=problem.gpu_bytes,
        gpu_used=tuple(problem.gpu_used(answer)),
        cpu_bytes=problem.cpu_used(answer),
        min_gpu_neurons=problem.neurons.min_gpu_neurons,
        objective=request.objective,
        objective_value=value,
        bound=bound,
        gap=gap,
        status=status,
        seconds=seconds,
        fallback_reason=reason,
        gpu_firings=problem.neurons.value(answer.bundles),
        all_firings=sum(float(layer.sum()) for layer in counts),
        time=time,
        rivals={name: None if rival is None else 1 / problem.seconds(rival) for name, rival in rivals.items()},
        speeds=problem.speeds,
        read_shares=reads,
    )
    check_placement(placement, units, counts, problem.cpu_bytes, request.pins)
    return placement


def _latency_problem(
    shape: ModelShape,
    counts: Sequence[np.ndarray],
    reads: Sequence[np.ndarray],
    units: UnitBytes,
    hardware: Hardware,
    request: PlacementRequest,
) -> LatencyProblem:
    """Every unit, with the whole budgets of the GPUs."""
    pins = [request.pins.get(layer) for layer in range(shape.num_layers)]
    bundles = group_neurons(counts, request.group_size, units.neuron, reads, pins)
    pinned = tuple(None if pin is None else layer.leading(pin) for pin, layer in zip(pins, bundles, strict=True))
    budgets = request.gpu_budgets if hardware.gpus else ()
    thresholds = _min_gpu_neurons(shape, units, hardware, request)
    cpu_bytes = min(hardware.cpu_memory_bytes, request.max_cpu_bytes or hardware.cpu_memory_bytes)
    speeds = speeds_of(hardware, shape.hidden_size, request.batch_size, request.sync_seconds)
    return LatencyProblem(PlacementProblem(bundles, budgets, 0, thresholds, pinned), units, speeds, cpu_bytes)


def _by_firings(
    problem: LatencyProblem, units: UnitBytes, request: PlacementRequest
) -> tuple[DensePlacement, Solution]:
    """The paper's answer: dense units first, then bundles by the integer program; where another objective is asked for,
    only if the greedy answer is not close to its bound."""
    dense = place_dense_units(units, problem.gpu_bytes, problem.layer_bytes.tolist(), problem.cpu_bytes)
    rooms = tuple(budget - used for budget, used in zip(problem.gpu_bytes, dense.gpu_bytes, strict=True))
    neurons = replace(
        problem.neurons,
        gpu_bytes=rooms,
        fewest_gpu_bytes=max(0, int(problem.layer_bytes.sum()) + dense.cpu_bytes - problem.cpu_bytes),
    )
    if request.objective == "firings":
        return dense, solve(neurons, request.time_limit_seconds, request.solver, dense.homes, request.gap)
    quick = solve(neurons, request.time_limit_seconds, "greedy", dense.homes)
    if quick.gap <= _RIVAL_GAP or request.solver == "greedy":
        return dense, quick
    outlined = solve_outlined(neurons, float(quick.value), request.solver, request.time_limit_seconds)
    if outlined is not None and outlined.value > quick.value:
        return dense, replace(quick, choice=outlined.choice, value=outlined.value)
    return dense, quick


def _answer(dense: DensePlacement, solution: Solution) -> Answer:
    return Answer(dense.attention, dense.predictor, dense.head, solution.choice)


def _unit_devices(problem: LatencyProblem, answer: Answer) -> UnitDevices:
    neurons = [b.neuron_devices(devices) for b, devices in zip(problem.layers, answer.bundles, strict=True)]
    return UnitDevices(answer.attention, answer.predictor, answer.head, tuple(neurons))


def _without_short_groups(problem: LatencyProblem, answer: Answer, group_size: int) -> Answer:
    """*answer* with every bundle of fewer neurons than a group on the CPU, and layers that fall below C_l thereby."""
    choice = []
    for layer, (bundles, devices) in enumerate(zip(problem.layers, answer.bundles, strict=True)):
        kept = np.where(bundles.sizes < group_size, CPU, devices).astype(np.int8)
        fewest = problem.neurons.min_gpu_neurons[layer] or 0
        choice.append(kept if int(bundles.sizes[kept != CPU].sum()) >= fewest else np.full_like(kept, CPU))
    return replace(answer, bundles=tuple(choice))


def _check_pins(pins: Mapping[int, int], ffn_sizes: Sequence[int]) -> None:
    for layer, neurons in pins.items():
        if not 0 <= layer < len(ffn_sizes):
            raise PlacementError(
                f"layer {layer} is pinned and the model has layers 0 … {len(ffn_sizes) - 1}: pin one of them"
            )
        if not 0 <= neurons <= ffn_sizes[layer]:
            raise PlacementError(
                f"layer {layer} is pinned to {neurons} neurons of which {ffn_sizes[layer]} exist: pin at most so many"
            )


def _min_gpu_neurons(
    shape: ModelShape, units: UnitBytes, hardware: Hardware, request: PlacementRequest
) -> tuple[int | None, ...]:
    """C_l; of several GPUs that of the one that needs most."""
    if not hardware.gpus:
        return (None,) * shape.num_layers
    if request.min_gpu_neurons is not None:
        return tuple(request.min_gpu_neurons if request.min_gpu_neurons <= n else None for n in shape.ffn_sizes)
    by_gpu = [
        costs(hardware, gpu, units.neuron, shape.hidden_size, request.batch_size, request.sync_seconds).min_gpu_neurons(
            shape.ffn_sizes
        )
        for gpu in hardware.gpus
    ]
    return tuple(
        None if None in fewest else max(n for n in fewest if n is not None) for fewest in zip(*by_gpu, strict=True)
    )
