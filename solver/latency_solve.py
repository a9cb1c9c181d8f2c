"""From a latency problem to an answer with a proven gap: greedy answers, a bound of our own, and the program in between."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pi_toolkit.profiler.command_line import readable_bytes
from pi_toolkit.profiler.errors import PlacementError

from .latency_bound import Dual, lower_bound
from .latency_greedy import Plan, dense_first, layers_first, realise
from .latency_outline import solve_outline
from .latency_problem import Answer, LatencyProblem, best_of
from .latency_program import solve_exact
from .mip_solvers import (
    OPTIMAL_GAP,
    SOLVER_TOLERANCE,
    SOLVERS,
    SOLVERS_SHARE,
    SolverTimeoutError,
    SolverUnusableError,
    Status,
    first_usable,
    status_of,
)
from .token_time import CPU

# Up to so many pairs of bundle and GPU every bundle is a variable.
_EXACT_PAIRS = 400
_ROUNDS = 6  # of the outlined program, with tangents added where the last answer was
_FIRST_TANGENTS = 12
_OUTLINE_GAP = 0.2  # of the gap that is allowed in the end, for one round


@dataclass(frozen=True)
class LatencySolution:
    """A feasible answer, its predicted seconds, and seconds that no answer goes below; otherwise as
    :class:`.placement_solve.Solution`."""

    answer: Answer
    token_seconds: float
    lower_bound: float
    status: Status
    seconds: float
    fallback_reason: str | None = None

    @property
    def gap(self) -> float:
        """(seconds − lower bound) / seconds."""
        return _gap(self.token_seconds, self.lower_bound)


@dataclass(frozen=True)
class _Found:
    """What a solver added: answers, and the best bound it proved (0 for none)."""

    answers: list[Answer]
    bound: float


def solve_latency(
    problem: LatencyProblem,
    time_limit_seconds: float,
    solver: str = "cbc",
    others: Sequence[Answer] = (),
    gap: float = OPTIMAL_GAP,
) -> LatencySolution:
    """The quickest placement found, never slower than a feasible one of *others*; stops when it is proven to be within
    *gap* of the best. Raises ``PlacementError`` when no placement fits the memory of all devices."""
    began = time.monotonic()
    dual = lower_bound(problem)
    plans = [_dual_plan(problem, dual), dense_first(problem), layers_first(problem)]
    answers = [answer for plan in plans for answer in (realise(problem, plan), realise(problem, plan, fill=False))]
    best = best_of(problem, [*answers, *others])
    bound, found, reason = dual.seconds, None, None
    if problem.gpu_bytes:
        found, reason = first_usable(
            solver,
            lambda name: _solve_program(problem, best, bound, name, time_limit_seconds - _since(began), gap),
        )
    if found is not None:
        best = best_of(problem, [*([best] if best else []), *found.answers])
        bound = max(bound, found.bound)
    if best is None:
        raise _does_not_fit(problem)
    token_seconds = problem.seconds(best)
    bound = min(bound, token_seconds)
    status: Status = status_of(_gap(token_seconds, bound)) if found is not None or not problem.gpu_bytes else "greedy"
    return LatencySolution(best, token_seconds, bound, status, _since(began), reason)


def _solve_program(
    problem: LatencyProblem,
    best: Answer | None,
    bound: float,
    solver: str,
    time_limit_seconds: float,
    gap: float,
) -> _Found | None:
    """Raises ``SolverUnusableError``; None when the solver proved that nothing fits."""
    if time_limit_seconds <= 0:
        raise SolverTimeoutError("the time limit was over before the program was solved: raise --time-limit")
    if sum(map(len, problem.layers)) * len(problem.gpu_bytes) <= _EXACT_PAIRS:
        return _solve_exactly(problem, solver, time_limit_seconds, gap)
    return _solve_outlines(problem, best, bound, solver, time_limit_seconds, gap)


def _solve_exactly(problem: LatencyProblem, solver: str, time_limit_seconds: float, gap: float) -> _Found | None:
    """By *solver*, and by the other one when that has not proved its answer in a quarter of the time: between equal GPUs one
    can search for minutes where the other is done at once."""
    began = time.monotonic()
    answers: list[Answer] = []
    for name in (solver, *(other for other in SOLVERS if other != solver)):
        left = time_limit_seconds - _since(began)
        if left <= 0:
            break
        try:
            exact = solve_exact(problem, name, left if name != solver else left / 4, gap)
        except SolverUnusableError as error:
            if answers or (name == solver and isinstance(error, SolverTimeoutError)):
                continue
            raise
        if exact is None:
            return None
        answer, proved = exact
        answers.append(answer)
        if proved:
            return _Found(answers, problem.seconds(answer) * (1 - SOLVER_TOLERANCE) * (1 - SOLVERS_SHARE * gap))
    return _Found(answers, 0.0)


def _solve_outlines(
    problem: LatencyProblem,
    best: Answer | None,
    bound: float,
    solver: str,
    time_limit_seconds: float,
    gap: float,
) -> _Found | None:
    """The outlined program, again with tangents at its answer, until the gap is small enough or nothing improves."""
    began = time.monotonic()
    tangents = [set(_spread(len(bundles))) for bundles in problem.layers]
    answers = [best] if best else []
    for layer, devices in enumerate(best.bundles if best else ()):
        tangents[layer].add(int((devices != CPU).sum()))
    proven = 0.0
    for _ in range(_ROUNDS):
        left = time_limit_seconds - _since(began)
        if left <= 0:
            break
        try:
            outline = solve_outline(problem, [sorted(t) for t in tangents], solver, left, _OUTLINE_GAP * gap)
        except SolverUnusableError:
            if len(answers) > 1:  # a later round, cut off by the time limit
                break
            raise
        if outline is None:
            return _Found(answers, proven) if best else None
        proven = max(proven, outline.optimum_seconds or 0.0)
        plans = [outline.plan, replace(outline.plan, head_gpu=None), replace(outline.plan, head_gpu=None, homes=None)]
        answers += [realise(problem, plan) for plan in plans]
        quickest = best_of(problem, answers)
        if quickest and _gap(problem.seconds(quickest), max(bound, proven)) <= gap:
            break
        before = sum(map(len, tangents))
        for layer, count in enumerate(outline.plan.bundles):
            tangents[layer] |= {count, min(count + 1, len(problem.layers[layer]))}
        if sum(map(len, tangents)) == before:
            break
    return _Found(answers, proven)


def _spread(bundles: int) -> list[int]:
    """Where tangents touch first: close together among the hottest bundles, where the curve bends."""
    return sorted({int(part) for part in np.geomspace(1, bundles, _FIRST_TANGENTS)}) if bundles else []


def _counts(problem: LatencyProblem, bundle_bytes: np.ndarray) -> list[int]:
    """Whole bundles within the bytes of each layer, but for rounding."""
    return [
        int(np.searchsorted(bundles.num_bytes.cumsum(), wanted * (1 + 1e-9) + 1e-6, side="right"))
        for bundles, wanted in zip(problem.layers, bundle_bytes, strict=True)
    ]


def _dual_plan(problem: LatencyProblem, dual: Dual) -> Plan:
    return Plan(
        np.array([option.attention for option in dual.layers]),
        np.array([option.predictor for option in dual.layers]),
        dual.head,
        _counts(problem, np.array([option.bundle_bytes for option in dual.layers])),
    )


def _does_not_fit(problem: LatencyProblem) -> PlacementError:
    return PlacementError(
        f"the model does not fit this machine: {readable_bytes(problem.fewest_gpu_bytes)} are beyond the CPU's memory of "
        f"{readable_bytes(problem.cpu_bytes)}, and no placement brings them into the GPU's "
        f"{readable_bytes(sum(problem.gpu_bytes))}: use a smaller --dtype, a shorter --ctx, more --vram or --hardware with "
        "more memory"
    )


def _gap(seconds: float, bound: float) -> float:
    return max(0.0, (seconds - bound) / seconds) if seconds > 0 else 0.0


def _since(began: float) -> float:
    return time.monotonic() - began
