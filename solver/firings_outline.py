"""The paper's objective for models of thousands of groups, by the outlined program of the other objective.

Most firings on GPUs are fewest on the CPU: that is the shortest token of a machine whose CPU takes a second for every firing,
whose GPUs take next to none, where synchronisation is free and nothing but bundles has to be placed.
"""

from dataclasses import dataclass, replace

import numpy as np

from pi_toolkit.profiler.errors import PlacementError

from .latency_problem import LatencyProblem
from .latency_solve import solve_latency
from .memory import UnitBytes
from .mip_solvers import OPTIMAL_GAP
from .placement_problem import Choice, PlacementProblem
from .token_time import Speeds

_GPU_SPEED = 1e15  # relative to the CPU's: below what float64 can add to a layer's firings
_ROUNDING = 1e-9


@dataclass(frozen=True)
class OutlinedFirings:
    """A feasible choice, its firings, and firings that no choice exceeds."""

    choice: Choice
    value: int | float
    upper_bound: float


def solve_outlined(
    problem: PlacementProblem, known_value: float, solver: str, time_limit_seconds: float, gap: float = OPTIMAL_GAP / 2
) -> OutlinedFirings | None:
    """None where no placement was found, or nothing fires; *known_value*: firings of some choice, or an estimate of them;
    *gap*: of the firings on GPUs, where to stop."""
    firings = float(sum(bundles.impacts.sum() for bundles in problem.layers))
    if firings <= 0:
        return None
    nothing = (0,) * len(problem.layers)
    layers = tuple(replace(bundles, read_bytes=bundles.impacts.astype(np.float64)) for bundles in problem.layers)
    rooms = tuple(room // problem.unit * problem.unit for room in problem.gpu_bytes)  # no choice takes more
    all_bytes = sum(int(bundles.num_bytes.sum()) for bundles in problem.layers)
    latency = LatencyProblem(
        neurons=replace(problem, layers=layers, gpu_bytes=rooms, fewest_gpu_bytes=0),
        units=UnitBytes(nothing, 0, nothing, 1, 0, 0, False),
        speeds=Speeds(1.0, (_GPU_SPEED,) * len(problem.gpu_bytes), 0.0),
        cpu_bytes=all_bytes - problem.fewest_gpu_bytes,
    )
    gap *= max(known_value, 1.0) / firings  # small changes of what little is on GPUs are tiny ones of the rest
    try:
        solution = solve_latency(latency, time_limit_seconds, solver, gap=gap)
    except PlacementError:
        return None
    choice = solution.answer.bundles
    value = problem.value(choice)
    return OutlinedFirings(choice, value, max(value, firings - solution.lower_bound + _ROUNDING * firings))
