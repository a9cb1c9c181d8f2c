"""From a placement problem to an answer with a proven gap: the integer program, with the greedy placement beside it."""

import math
import time
from dataclasses import dataclass
from typing import Literal

from pi_toolkit.profiler.errors import PlacementError

from .placement_bound import upper_bound
from .placement_greedy import greedy_placement
from .placement_ilp import CbcAnswer, CbcUnusableError, solve_with_cbc
from .placement_problem import Choice, PlacementProblem

OPTIMAL_GAP = 1e-4
CBC_TOLERANCE = 1e-7  # relative; CBC was 1e-8 short before firings were scaled, exact in ten large instances since
Status = Literal["optimal", "feasible", "greedy"]


@dataclass(frozen=True)
class Solution:
    """A feasible choice, its value, and a value that no choice exceeds.

    ``status``: "optimal" when the gap is proven to be at most 1e-4, "feasible" when it is larger, "greedy" when CBC gave
    no answer (``fallback_reason`` says why).
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


def _does_not_fit(problem: PlacementProblem) -> PlacementError:
    return PlacementError(
        f"the model does not fit this machine: {problem.fewest_on_gpu:,} FFN neurons are beyond the CPU's memory, the "
        f"GPU has room for {problem.gpu_capacity:,}, and no choice of layers that are worth a synchronisation satisfies "
        "both: use a smaller --dtype, a shorter --ctx, more --vram or --hardware with more memory"
    )


def _with_tolerance(proved: int | float) -> int | float:
    """What CBC may have missed of its proven optimum; nothing where counts are whole numbers below ten million."""
    bound = proved * (1 + CBC_TOLERANCE)
    return math.floor(bound) if isinstance(proved, int) else bound


def solve(problem: PlacementProblem, time_limit_seconds: float) -> Solution:
    """The best placement found; raises ``PlacementError`` when none fits the memory of both devices."""
    began = time.monotonic()
    if problem.fewest_on_gpu > problem.gpu_capacity:
        raise _does_not_fit(problem)
    greedy = greedy_placement(problem)
    bound = upper_bound(problem)
    answer: CbcAnswer | None = None
    fallback_reason: str | None = None
    if problem.open_layers():
        try:
            answer = solve_with_cbc(problem, time_limit_seconds)
            if answer is None and greedy is not None:
                fallback_reason = "CBC called a problem infeasible that has a placement"
        except CbcUnusableError as error:
            fallback_reason = error.message
    elif greedy is not None:
        answer = CbcAnswer(greedy, proved=True)
    if answer is None and greedy is None:
        raise _does_not_fit(problem)
    seconds = time.monotonic() - began
    if answer is None:
        assert greedy is not None
        return Solution(greedy, problem.value(greedy), bound, "greedy", seconds, fallback_reason)
    if answer.proved:
        bound = min(bound, _with_tolerance(problem.value(answer.choice)))
    # Among equals the greedy choice is the hottest-first one, and CBC may be short of it by its tolerance.
    choice = answer.choice
    if greedy is not None and problem.value(greedy) >= problem.value(choice):
        choice = greedy
    bound = max(bound, problem.value(choice))
    status: Status = "optimal" if gap(problem.value(choice), bound) <= OPTIMAL_GAP else "feasible"
    return Solution(choice, problem.value(choice), bound, status, seconds)
