"""Both objectives on 500 random small instances against trying every placement."""

import pytest

from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.solver.latency_bound import lower_bound
from pi_toolkit.solver.latency_problem import LatencyProblem
from pi_toolkit.solver.latency_solve import solve_latency
from pi_toolkit.solver.placement_bound import upper_bound
from pi_toolkit.solver.placement_solve import solve
from solver_brute_force import best_firings, best_seconds, random_instance

INSTANCES, BLOCKS = 500, 10
EVERY_TENTH = 10  # is solved by CBC, a process for each; the others by HiGHS inside this one


def seeds(block: int) -> range:
    return range(block * INSTANCES // BLOCKS, (block + 1) * INSTANCES // BLOCKS)


def solver_for(seed: int) -> str:
    return "cbc" if seed % EVERY_TENTH == 0 else "highs"


def test_the_instances_are_what_they_should_be() -> None:
    """500 instances that never need what they were made to test."""
    problems = [random_instance(seed) for seed in range(INSTANCES)]
    neurons = [problem.neurons for problem in problems]
    assert {len(problem.layers) for problem in problems} == {1, 2, 3, 4}
    assert {len(problem.gpu_bytes) for problem in problems} == {1, 2}
    assert sum(any(fewest for fewest in problem.min_gpu_neurons) for problem in neurons) > 300
    assert sum(problem.fewest_gpu_bytes > 0 for problem in problems) > 100
    assert sum(problem.pinned is not None for problem in neurons) > 100
    assert sum(any(len(set(b.sizes.tolist())) > 1 for b in problem.layers) for problem in neurons) > 300
    assert 300 < sum(best_seconds(problem) is not None for problem in problems) < 490


@pytest.mark.parametrize("block", range(BLOCKS))
def test_latency_equals_brute_force(block: int) -> None:
    """A constraint that is missing, flipped or off by one, a unit that is counted twice, a bound that is none."""
    for seed in seeds(block):
        problem = random_instance(seed)
        best = best_seconds(problem)
        if best is None:
            with pytest.raises(PlacementError, match="--vram"):
                solve_latency(problem, 30, solver_for(seed), gap=0.0)
            continue
        solution = solve_latency(problem, 30, solver_for(seed), gap=0.0)
        assert solution.token_seconds == pytest.approx(best, rel=1e-9), f"seed {seed}"
        assert solution.status == "optimal" and problem.is_feasible(solution.answer), f"seed {seed}"
        assert max(lower_bound(problem).seconds, solution.lower_bound) <= best * (1 + 1e-9), f"seed {seed}"


@pytest.mark.parametrize("block", range(BLOCKS))
def test_firings_equal_brute_force(block: int) -> None:
    """The paper's program with several GPUs and pins."""
    for seed in seeds(block):
        problem = random_instance(seed).neurons
        best = best_firings(problem)
        if best is None:
            with pytest.raises(PlacementError, match="--vram"):
                solve(problem, 30, solver_for(seed))
            continue
        solution = solve(problem, 30, solver_for(seed))
        assert solution.value == best and problem.is_feasible(solution.choice), f"seed {seed}"
        assert best <= upper_bound(problem) and solution.value <= solution.upper_bound, f"seed {seed}"


def outlined(problem: LatencyProblem, monkeypatch: pytest.MonkeyPatch) -> LatencyProblem:
    monkeypatch.setattr("pi_toolkit.solver.latency_solve._EXACT_PAIRS", 0)
    return problem


def test_the_outlined_program_never_claims_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models are solved in outline; its bound must hold, and what it finds must be a placement."""
    reached = 0
    for seed in range(100):
        problem = outlined(random_instance(seed), monkeypatch)
        best = best_seconds(problem)
        if best is None:
            continue
        try:
            solution = solve_latency(problem, 30, "highs")
        except PlacementError:  # a placement that only just exists can escape the rounding
            continue
        assert solution.lower_bound <= best * (1 + 1e-9) <= solution.token_seconds * (1 + 2e-9), f"seed {seed}"
        assert problem.is_feasible(solution.answer)
        reached += solution.token_seconds <= best * 1.02
    assert reached > 50


def test_greedy_is_feasible_and_its_gap_is_true() -> None:
    for seed in range(200):
        problem = random_instance(seed)
        best = best_seconds(problem)
        try:
            solution = solve_latency(problem, 30, "greedy")
        except PlacementError:
            continue
        assert best is not None and solution.status == "greedy" and solution.fallback_reason is None
        assert solution.lower_bound <= best * (1 + 1e-9) <= solution.token_seconds * (1 + 2e-9), f"seed {seed}"
