"""The integer program against brute force, its bound, and what happens when its solver fails."""

import itertools
import stat

import cbcbox
import numpy as np
import pulp
import pytest

from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.solver.neuron_groups import group_neurons
from pi_toolkit.solver.placement_bound import upper_bound
from pi_toolkit.solver.placement_greedy import greedy_placement
from pi_toolkit.solver.placement_ilp import solve_ilp
from pi_toolkit.solver.placement_problem import PlacementProblem
from pi_toolkit.solver.placement_solve import solve
from pi_toolkit.solver.token_time import CPU
from solver_cases import LLAMA_7B, zipf_counts


def random_problem(seed: int) -> PlacementProblem:
    """Up to 12 groups in 1–4 layers: short last groups, tied counts, closed layers, both memory limits."""
    rng = np.random.default_rng(seed)
    group = int(rng.integers(2, 6))
    ffn_sizes = [int(rng.integers(group, 3 * group + 1)) for _ in range(rng.integers(1, 5))]
    highest = int(rng.choice([2, 5, 1000, 10_000_000]))
    counts = [rng.integers(0, highest, neurons) for neurons in ffn_sizes]
    capacity = int(rng.integers(0, sum(ffn_sizes) + 1))
    fewest = int(rng.integers(0, capacity + 1)) if rng.random() < 0.4 else 0
    thresholds = tuple(None if rng.random() < 0.15 else int(rng.integers(0, neurons + 1)) for neurons in ffn_sizes)
    return PlacementProblem(group_neurons(counts, group), (capacity,), fewest, thresholds)


def brute_force(problem: PlacementProblem) -> int | None:
    """The best value over all subsets of groups, by the constraints as the paper prints them."""
    best = None
    sizes = [groups.sizes for groups in problem.layers]
    per_layer = [np.array(list(itertools.product([0, 1], repeat=len(s)))) for s in sizes]
    options = []
    for subsets, s, groups, fewest in zip(per_layer, sizes, problem.layers, problem.min_gpu_neurons, strict=True):
        neurons, value = subsets @ s, subsets @ groups.impacts
        allowed = (neurons == 0) | (False if fewest is None else neurons >= fewest)
        options.append(sorted(set(zip(neurons[allowed].tolist(), value[allowed].tolist(), strict=True))))
    for combination in itertools.product(*options):
        neurons, value = (sum(part) for part in zip(*combination, strict=True))
        if problem.fewest_gpu_bytes <= neurons <= problem.gpu_bytes[0] and (best is None or value > best):
            best = value
    return best


@pytest.mark.parametrize("block", range(10))
def test_equals_brute_force_on_random_instances(block):
    """200 instances: a constraint that is missing, flipped or off by one shows here."""
    for seed in range(20 * block, 20 * block + 20):
        problem = random_problem(seed)
        best = brute_force(problem)
        if best is None:
            with pytest.raises(PlacementError, match="--vram"):
                solve(problem, 30)
            continue
        solution = solve(problem, 30)
        assert (solution.value, solution.status) == (best, "optimal"), f"seed {seed}"
        assert problem.is_feasible(solution.choice)
        assert best <= upper_bound(problem) and best <= solution.upper_bound, f"seed {seed}"


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_a_solver_alone_equals_brute_force(solver):
    """The greedy answer beside it could hide a wrong integer program."""
    for seed in range(300, 340):
        problem = random_problem(seed)
        if not problem.open_layers():
            continue
        answer = solve_ilp(problem, solver, 30)
        assert (None if answer is None else problem.value(answer.choice)) == brute_force(problem), f"seed {seed}"


@pytest.mark.parametrize("threshold", [0, 61, 3000])
@pytest.mark.parametrize("share", [0.02, 0.3])
def test_seven_billion_model_has_a_proven_gap(threshold, share):
    """The gap that is reported is held against the best value any other method here knows."""
    counts = zipf_counts(LLAMA_7B.ffn_sizes)
    capacity = int(share * sum(LLAMA_7B.ffn_sizes))
    problem = PlacementProblem(group_neurons(counts), (capacity,), 0, (threshold,) * 32)
    solution = solve(problem, 60)
    assert solution.status == "optimal" and solution.gap <= 1e-4
    hottest_anywhere = np.sort(np.concatenate(counts))[::-1][:capacity].sum()
    assert greedy_value(problem) <= solution.value <= solution.upper_bound
    assert solution.upper_bound <= upper_bound(problem) <= hottest_anywhere


def greedy_value(problem: PlacementProblem) -> int:
    chosen = greedy_placement(problem)
    return sum(int(groups.impacts[c].sum()) for groups, c in zip(problem.layers, chosen, strict=True))


def two_layer_problem() -> PlacementProblem:
    """Greedy is short of the optimum here: the densest start is a layer whose threshold wastes the memory."""
    counts = [np.array([100, 0, 0, 0]), np.array([60, 60, 60, 60])]
    return PlacementProblem(group_neurons(counts, 1), (4,), 0, (3, 1))


def missing_binary(monkeypatch, tmp_path):
    monkeypatch.setattr(cbcbox, "cbc_bin_path", lambda: str(tmp_path / "no such cbc"))


def crashing_binary(monkeypatch, tmp_path):
    _script(monkeypatch, tmp_path, "exit 3")


def silent_binary(monkeypatch, tmp_path):
    """Ends well and writes no solution."""
    _script(monkeypatch, tmp_path, "exit 0")


def nonsense_binary(monkeypatch, tmp_path):
    """Calls half of every variable optimal, as CBC does with some infeasible models."""
    lines = r'for last; do :; done; { echo "Optimal - objective value 1"; for i in 0 1 2 3 4 5 6 7; do '
    _script(monkeypatch, tmp_path, lines + r'printf "%s X%07d 0.5 0\n" $i $i; done; } > "$last"')


def _script(monkeypatch, tmp_path, body):
    script = tmp_path / "cbc"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(cbcbox, "cbc_bin_path", lambda: str(script))


@pytest.mark.parametrize("failure", [missing_binary, crashing_binary, silent_binary, nonsense_binary])
def test_highs_takes_over_when_cbc_is_unusable(failure, monkeypatch, tmp_path):
    """A placement must not depend on one binary."""
    failure(monkeypatch, tmp_path)
    solution = solve(two_layer_problem(), 5)
    assert (solution.value, solution.status) == (brute_force(two_layer_problem()), "optimal")
    assert solution.fallback_reason.startswith("HiGHS is used instead: CBC")


@pytest.mark.parametrize("failure", [missing_binary, crashing_binary, silent_binary, nonsense_binary])
def test_greedy_takes_over_when_no_solver_is_usable(failure, monkeypatch, tmp_path):
    """And its gap must still be true."""
    best = brute_force(two_layer_problem())
    failure(monkeypatch, tmp_path)
    monkeypatch.setattr(pulp.HiGHS, "available", lambda _: False)
    solution = solve(two_layer_problem(), 5)
    assert solution.status == "greedy" and solution.fallback_reason
    assert solution.value <= best <= solution.upper_bound
    assert solution.gap == pytest.approx((solution.upper_bound - solution.value) / solution.upper_bound)


def test_a_gap_that_is_reached_ends_the_search(monkeypatch):
    """--gap was ignored, and CBC searched for the last millionth until its time limit."""
    counts = zipf_counts(LLAMA_7B.ffn_sizes)
    problem = PlacementProblem(group_neurons(counts), (40_000,), 0, (3000,) * 32)
    loose = solve(problem, 60, allowed_gap=0.05)
    assert 1e-4 < loose.gap <= 0.05 and loose.status == "feasible" and loose.fallback_reason is None
    monkeypatch.setattr("pi_toolkit.solver.placement_solve.solve_ilp", lambda *_: pytest.fail("still searching"))
    usual = solve(problem, 60)
    assert usual.gap <= 1e-4 and usual.status == "optimal" and usual.value >= loose.value


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_the_bound_of_a_solver_that_may_stop_early_is_true(solver, monkeypatch):
    """Its answer was the bound, which is right only where it may not."""
    monkeypatch.setattr("pi_toolkit.solver.placement_solve._EXACT_PAIRS", 0)
    monkeypatch.setattr("pi_toolkit.solver.placement_solve.solve_outlined", lambda *_: None)
    for seed in range(40):
        problem = random_problem(seed)
        best = brute_force(problem)
        if best is not None:
            solution = solve(problem, 30, solver, allowed_gap=0.2)
            assert solution.value <= best <= solution.upper_bound and solution.gap <= 0.2 + 1e-9, f"seed {seed}"


def test_running_out_of_time_falls_back_and_says_so():
    """PuLP calls a run that was stopped by the clock optimal."""
    counts = zipf_counts((11008,) * 32)
    solution = solve(PlacementProblem(group_neurons(counts), (10_000,), 0, (5000,) * 32), 0.001)
    assert solution.status in ("greedy", "feasible")
    assert solution.value <= solution.upper_bound


def test_relative_counts_are_placed():
    """PowerInfer's activation files may hold frequencies instead of counts."""
    counts = [np.array([0.5, 0.001, 0.25, 0.0]), np.array([0.125, 0.0625, 0.0, 0.0])]
    solution = solve(PlacementProblem(group_neurons(counts, 1), (3,), 0, (0, 0)), 5)
    assert solution.value == pytest.approx(0.875) and solution.status == "optimal"
    assert [(devices != CPU).sum() for devices in solution.choice] == [2, 1]


def test_memory_of_the_cpu_forces_cold_neurons_onto_the_gpu():
    """Without eq. 6 for the CPU nothing brings neurons that never fire to the GPU."""
    problem = PlacementProblem(group_neurons([np.array([5, 0, 0, 0])], 1), (3,), 3, (1,))
    solution = solve(problem, 5)
    assert sum(int((devices != CPU).sum()) for devices in solution.choice) == 3


def test_nothing_fits_either_memory():
    with pytest.raises(PlacementError, match=r"does not fit .* --vram"):
        solve(PlacementProblem(group_neurons([np.array([5, 3, 2, 1])], 1), (3,), 4, (1,)), 5)
