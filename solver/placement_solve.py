"""From a placement problem to an answer with a proven gap: the integer program, with the greedy placement beside it."""

import math
import time
from dataclasses import dataclass

import numpy as np

from pi_toolkit.profiler.command_line import readable_bytes
from pi_toolkit.profiler.errors import PlacementError

from .firings_outline import solve_outlined
from .gpu_assignment import assign_bundles, drop_unassigned
from .mip_solvers import (
    OPTIMAL_GAP,
    SOLVER_TOLERANCE,
    SOLVERS_SHARE,
    SolverTimeoutError,
    Status,
    first_usable,
    status_of,
)
from .placement_bound import upper_bound
from .placement_greedy import Chosen, greedy_placement
from .placement_ilp import IlpAnswer, solve_ilp
from .placement_problem import Choice, PlacementProblem
from .token_time import CPU

# Up to so many pairs of bundle and GPU the program is solved to its optimum. Beyond, an answer of the greedy placement or of
# the outlined program that is as close to the bound as was asked for stands without the program.
_EXACT_PAIRS = 400
# Up to so many pairs of bundle and GPU the program itself chooses among several GPUs; beyond, they are one to it.
_SMALL = 4_000


@dataclass(frozen=True)
class Solution:
    """A feasible choice, its value, and a value that no choice exceeds.

    ``status``: "optimal" when the gap is proven to be at most 1e-4, "feasible" when it is larger, "greedy" when no solver
    gave an answer. ``fallback_reason``: why another one than the solver that was asked for.
    """

    choice: Choice
    value: int | float
    upper_bound: int | float
    status: Status
    seconds: float
    fallback_reason: str | None = None

    @property
    def gap(self) -> float:
        """(upper bound − value) / upper bound."""
        return gap(self.value, self.upper_bound)


def gap(value: float, bound: float) -> float:
    return max(0.0, (bound - value) / bound) if bound > 0 else 0.0


def solve(
    problem: PlacementProblem,
    time_limit_seconds: float,
    solver: str = "cbc",
    homes: np.ndarray | None = None,
    allowed_gap: float = OPTIMAL_GAP,
) -> Solution:
    """The best placement found; raises ``PlacementError`` when none fits the memory of all devices.

    *homes*: per layer the GPU that its neurons go to where there is a choice. A placement proven to be within *allowed_gap*
    of the best is not improved any more.
    """
    began = time.monotonic()
    if homes is None:
        homes = np.zeros(len(problem.layers), dtype=np.int64)
    pooled = problem.pooled()
    if max(problem.fewest_gpu_bytes, problem.pinned_bytes) > problem.room:
        raise does_not_fit(problem)
    greedy = _assigned(problem, greedy_placement(pooled), homes)
    bound = upper_bound(problem)
    answer: IlpAnswer | None = None
    reason: str | None = None
    exact = len(problem.gpu_bytes) * sum(map(len, problem.layers)) <= _EXACT_PAIRS
    if not (exact or solver == "greedy" or _is_close(problem, greedy, bound, allowed_gap)):
        known = float(problem.value(greedy)) if greedy else float(bound)
        outlined = solve_outlined(problem, known, solver, time_limit_seconds, allowed_gap / 2)
        if outlined is not None:
            bound = min(bound, outlined.upper_bound)
            if greedy is None or problem.value(outlined.choice) > problem.value(greedy):
                greedy = outlined.choice
    if not pooled.open_layers() or (not exact and _is_close(problem, greedy, bound, allowed_gap)):
        answer = IlpAnswer(greedy, proved=False) if greedy else None
    else:
        program_gap = 0.0 if exact else allowed_gap

        def program(name: str) -> IlpAnswer | None:
            left = time_limit_seconds - (time.monotonic() - began)
            return _solve_ilp(problem, pooled, homes, name, left, program_gap)

        answer, reason = first_usable(solver, program)
        if answer is None and greedy is not None and reason is None and solver != "greedy":
            reason = "the solver called a problem infeasible that has a placement"
    if answer is None and greedy is None:
        raise does_not_fit(problem)
    seconds = time.monotonic() - began
    if answer is None:
        assert greedy is not None
        value = problem.value(greedy)
        return Solution(greedy, value, max(bound, value), "greedy", seconds, reason)
    if answer.proved:
        bound = min(bound, _with_tolerance(problem.value(answer.choice), 0.0 if exact else SOLVERS_SHARE * allowed_gap))
    # Among equals the greedy choice is the hottest-first one, and CBC may be short of it by its tolerance.
    choice = answer.choice
    if greedy is not None and problem.value(greedy) >= problem.value(choice):
        choice = greedy
    bound = max(bound, problem.value(choice))
    status = status_of(gap(problem.value(choice), bound))
    return Solution(choice, problem.value(choice), bound, status, seconds, reason)


def does_not_fit(problem: PlacementProblem) -> PlacementError:
    """What stands in the way, in words."""
    remedy = "use a smaller --dtype, a shorter --ctx, more --vram or --hardware with more memory"
    room = readable_bytes(problem.room)
    if problem.pinned_bytes > problem.room:
        return PlacementError(
            f"the pinned layers take {readable_bytes(problem.pinned_bytes)} and the GPU has room for {room} of neurons: "
            f"pin fewer, or {remedy}"
        )
    pinned = " and are not pinned" if any(pin is not None for pin in problem.pins) else ""
    return PlacementError(
        f"the model does not fit this machine: {readable_bytes(problem.fewest_gpu_bytes)} of FFN neurons are beyond the "
        f"CPU's memory, the GPU has room for {room}, and no choice of layers that are worth a synchronisation{pinned} "
        f"satisfies both: {remedy}"
    )


def _solve_ilp(
    problem: PlacementProblem,
    pooled: PlacementProblem,
    homes: np.ndarray,
    solver: str,
    time_limit_seconds: float,
    allowed_gap: float,
) -> IlpAnswer | None:
    """The program over all GPUs, or, of a large problem, over one with the room of all, whose answer is then divided."""
    if time_limit_seconds <= 0:
        raise SolverTimeoutError("the time limit was over before the program was solved: raise --time-limit")
    gpus = len(problem.gpu_bytes)
    if gpus == 1 or gpus * sum(map(len, problem.layers)) <= _SMALL:
        return solve_ilp(problem, solver, time_limit_seconds, allowed_gap)
    answer = solve_ilp(pooled, solver, time_limit_seconds, allowed_gap)
    if answer is None:
        return None
    chosen = tuple(devices != CPU for devices in answer.choice)
    whole = assign_bundles(problem, _with_pins(problem, chosen), homes)
    if whole is not None:
        return IlpAnswer(whole, answer.proved)
    assigned = _assigned(problem, chosen, homes)
    return IlpAnswer(assigned, proved=False) if assigned else None


def _assigned(problem: PlacementProblem, chosen: Chosen | None, homes: np.ndarray) -> Choice | None:
    """An answer to the pooled problem as one to *problem*; None where that breaks a constraint."""
    return None if chosen is None else drop_unassigned(problem, _with_pins(problem, chosen), homes)


def _with_pins(problem: PlacementProblem, chosen: Chosen) -> Chosen:
    return tuple(
        wanted if pin is None else np.arange(len(wanted)) < pin
        for wanted, pin in zip(chosen, problem.pins, strict=True)
    )


def _is_close(problem: PlacementProblem, choice: Choice | None, bound: float, allowed_gap: float) -> bool:
    return choice is not None and gap(problem.value(choice), bound) <= allowed_gap


def _with_tolerance(proved: int | float, allowed_gap: float) -> int | float:
    """What a solver may have missed of an optimum that it proved to be within *allowed_gap*, relative to its value or to its
    bound; without a gap nothing where counts are whole numbers below ten million."""
    bound = proved * (1 + SOLVER_TOLERANCE) / (1 - allowed_gap) if allowed_gap < 1 else math.inf
    if math.isinf(bound):
        return bound
    return math.floor(bound) if isinstance(proved, int) else bound
