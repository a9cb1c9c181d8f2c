"""The integer program that places bundles (PowerInfer §6, eqs. 1–8), stated in PuLP.

It contains the model and the reading of the solver's answer. What things cost is in :mod:`.costs` and :mod:`.memory`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from .mip_solvers import SOLVERS_SHARE, SolverUnusableError, is_one, solve_program
from .placement_problem import Choice, PlacementProblem

# Firings are scaled to at most this, so that CBC's absolute tolerances (1e-7 to 1e-5) are far below one group's worth.
_LARGEST_COEFFICIENT = 1e6
# Groups sorted by impact make the relaxation nearly integral: plain branch and bound from the primal simplex took 2–6 s
# for 96 layers × 768 groups where CBC's default heuristics, cuts and presolve took 7–35 s (two cores of a shared server).
_CBC_OPTIONS = ["preprocess off", "cuts off", "heuristicsOnOff off", "primalSimplex"]


@dataclass(frozen=True)
class IlpAnswer:
    """A feasible choice; ``proved``: the solver showed that none is better, but for the gap that it was allowed."""

    choice: Choice
    proved: bool


def placement_program(problem: PlacementProblem) -> tuple[pulp.LpProblem, dict[tuple[int, int, int], Any]]:
    """
    Sets      l in L   layers that may use a GPU           b in B_l   bundles of layer l, hottest first
              d in D   GPUs
    Given     v_lb     impact: summed firing counts        m_lb       bytes        n_lb       neurons
              M_d      bytes of room on GPU d              R          bytes that do not fit on the CPU
              C_l      fewest neurons worth a synchronisation
    Choose    x_lbd    1 if the bundle lives on GPU d      y_l        1 if layer l uses GPUs at all
                       (a_d,n of its neurons; a_CPU,n = 1 − Σ_d a_d,n, which is eq. 3)
    Maximise  sum_lbd v_lb x_lbd                                        (2)
    With      memory_d         sum_lb m_lb x_lbd       <= M_d           (6, GPUs)
              cpu_memory       sum_lbd m_lb x_lbd      >= R             (6, CPU)
              worthwhile_l     sum_bd n_lb x_lbd       >= C_l y_l       (7; C_l from 4 and 5)
              opened_lb        sum_d x_lbd             <= y_l           (8, tighter than K y_l; 3: one GPU at most)
              pinned_lb        sum_d x_lbd             == 1             for the leading bundles of pinned layers

    Bytes are counted in units of the largest common divisor of the bundles' bytes, neurons of a layer in that of its bundles'
    neurons: C_l is rounded up to what bundles can make, which tightens the relaxation.
    """
    pins = problem.pins
    free = problem.open_layers()
    L = free + [layer for layer, pin in enumerate(pins) if pin]
    D = range(len(problem.gpu_bytes))
    B = {layer: range(len(problem.layers[layer]) if pins[layer] is None else pins[layer] or 0) for layer in L}
    unit = problem.unit
    v = {layer: problem.layers[layer].impacts for layer in L}
    m = {layer: problem.layers[layer].num_bytes // unit for layer in L}
    share = {layer: int(np.gcd.reduce(problem.layers[layer].sizes)) for layer in L}
    n = {layer: problem.layers[layer].sizes // share[layer] for layer in L}
    M, R = [room // unit for room in problem.gpu_bytes], -(-problem.fewest_gpu_bytes // unit)
    C = {layer: -(-(problem.min_gpu_neurons[layer] or 0) // share[layer]) for layer in free}
    scale = _scale([v[layer] for layer in L])

    program = pulp.LpProblem("placement", pulp.LpMaximize)
    names = [(layer, b, d) for layer in L for b in B[layer] for d in D]
    x = dict(zip(names, program.add_variable_dict("x", (range(len(names)),), cat=pulp.LpBinary).values(), strict=True))
    y = program.add_variable_dict("y", (free,), cat=pulp.LpBinary)

    program += pulp.lpSum(float(v[layer][b]) * scale * x[layer, b, d] for layer, b, d in names), "gpu_firings"
    memory = [pulp.lpSum(int(m[layer][b]) * x[layer, b, d] for layer in L for b in B[layer]) for d in D]
    for d in D:
        program += memory[d] <= M[d], f"memory_{d}"
    program += pulp.lpSum(memory) >= R, "cpu_memory"
    for layer in free:
        on_gpus = pulp.lpSum(int(n[layer][b]) * x[layer, b, d] for b in B[layer] for d in D)
        program += on_gpus >= C[layer] * y[layer], f"worthwhile_{layer}"
    for layer in L:
        for b in B[layer]:
            on_any = pulp.lpSum(x[layer, b, d] for d in D)
            if pins[layer] is None:
                program += on_any <= y[layer], f"opened_{layer}_{b}"
            else:
                program += on_any == 1, f"pinned_{layer}_{b}"
    return program, x


def _scale(impacts: list[np.ndarray]) -> float:
    """1 for whole numbers that are small enough, else what brings the largest impact to the largest coefficient."""
    largest = max((float(layer.max()) for layer in impacts), default=0.0)
    if largest == 0 or (largest <= _LARGEST_COEFFICIENT and all(layer.dtype.kind == "i" for layer in impacts)):
        return 1.0
    return _LARGEST_COEFFICIENT / largest


def solve_ilp(problem: PlacementProblem, solver: str, time_limit_seconds: float, gap: float = 0.0) -> IlpAnswer | None:
    """The answer of *solver*, "cbc" or "highs", which stops within the relative *gap* of the best, or None when it finds that
    no choice meets the constraints; raises ``SolverUnusableError``."""
    program, x = placement_program(problem)
    proved = solve_program(program, solver, time_limit_seconds, SOLVERS_SHARE * gap, _CBC_OPTIONS)
    if proved is None:
        return None
    choice = problem.nothing()
    for (layer, b, d), variable in x.items():
        if is_one(variable):
            choice[layer][b] = d
    if not problem.is_feasible(choice):
        raise SolverUnusableError("the solver's answer breaks a constraint: raise --time-limit")
    return IlpAnswer(tuple(choice), proved)
