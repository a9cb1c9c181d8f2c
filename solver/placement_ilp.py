"""The integer program that places neuron groups (PowerInfer §6, eqs. 1–8), stated in PuLP and solved by CBC.

It contains the model and the reading of the solver's answer. What things cost is in :mod:`.costs` and :mod:`.memory`.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pulp

from pi_toolkit.profiler.errors import PlacementError

from .placement_problem import Choice, PlacementProblem

# Firings are scaled to at most this, so that CBC's absolute tolerances (1e-7 to 1e-5) are far below one group's worth.
_LARGEST_COEFFICIENT = 1e6
_INTEGRALITY_TOLERANCE = 1e-5
# Groups sorted by impact make the relaxation nearly integral: plain branch and bound from the primal simplex took 2–6 s
# for 96 layers × 768 groups where CBC's default heuristics, cuts and presolve took 7–35 s (two cores of a shared server).
_CBC_OPTIONS = ["randomSeed 1", "randomCbcSeed 1", "preprocess off", "cuts off", "heuristicsOnOff off", "primalSimplex"]


class CbcUnusableError(PlacementError):
    """CBC is missing, crashed, ran out of time without an answer, or answered nonsense."""


@dataclass(frozen=True)
class CbcAnswer:
    """A feasible choice; ``proved``: CBC showed that none is better."""

    choice: Choice
    proved: bool


def placement_program(problem: PlacementProblem) -> tuple[pulp.LpProblem, dict[tuple[int, int], Any]]:
    """
    Sets      l in L   layers where C_l exists and fits      g in G_l   neuron groups of layer l, hottest first
    Given     v_lg     impact: summed firing counts          n_lg       neurons (each of the same bytes)
              B        neurons that fit on the GPU           R          neurons that do not fit on the CPU
              C_l      fewest neurons worth a synchronisation
    Choose    x_lg     1 if the group lives on the GPU       y_l        1 if layer l uses the GPU at all
                       (a_GPU,n of its neurons; a_CPU,n = 1 − a_GPU,n, which is eq. 3)
    Maximise  sum_lg v_lg x_lg                                          (2)
    With      gpu_memory       sum_lg n_lg x_lg        <= B             (6, GPU)
              cpu_memory       sum_lg n_lg x_lg        >= R             (6, CPU)
              worthwhile_l     sum_g n_lg x_lg         >= C_l y_l       (7; C_l from 4 and 5)
              opened_lg        x_lg                    <= y_l           (8, tighter than K y_l)

    Neurons are counted in units of the largest common divisor of the groups' sizes.
    """
    L = problem.open_layers()
    v = {layer: problem.layers[layer].impacts for layer in L}
    unit = problem.unit
    n = {layer: problem.layers[layer].sizes // unit for layer in L}
    B, R = problem.gpu_capacity // unit, -(-problem.fewest_on_gpu // unit)
    C = {layer: -(-(problem.min_gpu_neurons[layer] or 0) // unit) for layer in L}
    G = {layer: range(len(n[layer])) for layer in L}
    LG = [(layer, group) for layer in L for group in G[layer]]
    scale = _scale([v[layer] for layer in L])

    program = pulp.LpProblem("placement", pulp.LpMaximize)
    x = dict(zip(LG, program.add_variable_dict("x", (range(len(LG)),), cat=pulp.LpBinary).values(), strict=True))
    y = program.add_variable_dict("y", (L,), cat=pulp.LpBinary)

    gpu_neurons = {layer: pulp.lpSum(int(n[layer][g]) * x[layer, g] for g in G[layer]) for layer in L}
    program += pulp.lpSum(float(v[layer][g]) * scale * x[layer, g] for layer, g in LG), "gpu_firings"
    program += pulp.lpSum(gpu_neurons.values()) <= B, "gpu_memory"
    program += pulp.lpSum(gpu_neurons.values()) >= R, "cpu_memory"
    for layer in L:
        program += gpu_neurons[layer] >= C[layer] * y[layer], f"worthwhile_{layer}"
        for g in G[layer]:
            program += x[layer, g] <= y[layer], f"opened_{layer}_{g}"
    return program, x


def _scale(impacts: list[np.ndarray]) -> float:
    """1 for whole numbers that are small enough, else what brings the largest impact to the largest coefficient."""
    largest = max(float(layer.max()) for layer in impacts)
    if largest == 0 or (largest <= _LARGEST_COEFFICIENT and all(layer.dtype.kind == "i" for layer in impacts)):
        return 1.0
    return _LARGEST_COEFFICIENT / largest


def solve_with_cbc(problem: PlacementProblem, time_limit_seconds: float) -> CbcAnswer | None:
    """CBC's answer, or None when it finds that no choice meets the constraints; raises ``CbcUnusableError``.

    One thread and fixed seeds: the same problem gives the same answer, unless the time limit cuts the search short.
    """
    try:
        solver = pulp.COIN_CMD(
            path=_cbc_path(), msg=False, gapRel=0, timeLimit=time_limit_seconds, options=_CBC_OPTIONS
        )
        program, x = placement_program(problem)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as solver.tmpDir, _started_processes_end():
            program.solve(solver)
    except (pulp.PulpSolverError, OSError, ImportError, ValueError, IndexError) as error:
        raise CbcUnusableError(f"CBC cannot be used ({error}): reinstall it with pip install 'pulp[cbc]'") from error
    # PuLP's `status` says "Optimal" after a time-out, and `sol_status` may say so too over fractional values.
    if program.sol_status == pulp.LpSolutionInfeasible:
        return None
    if program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise CbcUnusableError(f"CBC found no placement within {time_limit_seconds:g} s: raise --time-limit")
    choice = _read_choice(problem, x)
    in_time = time.monotonic() - began < time_limit_seconds
    return CbcAnswer(choice, program.sol_status == pulp.LpSolutionOptimal and in_time)


@contextmanager
def _started_processes_end() -> Iterator[None]:
    """On any exception, end what this thread started inside the block: PuLP only waits for CBC, which would go on
    computing for nobody until its time limit."""
    before = _children()
    try:
        yield
    except BaseException:
        for process in _children() - before:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        raise


def _children() -> set[int]:
    """Processes this thread started; none where the system does not list them (other than Linux)."""
    try:
        return {int(process) for process in Path("/proc/thread-self/children").read_text("ascii").split()}
    except OSError:
        return set()


def _cbc_path() -> str:
    import cbcbox

    path = cbcbox.cbc_bin_path()
    if not Path(path).is_file():
        raise FileNotFoundError(f"no binary at {path}")
    return path


def _read_choice(problem: PlacementProblem, x: dict[tuple[int, int], Any]) -> Choice:
    choice = problem.nothing()
    for (layer, group), variable in x.items():
        value = variable.value()
        if value is None or abs(value - round(value)) > _INTEGRALITY_TOLERANCE:
            raise CbcUnusableError("CBC's answer is not integral: raise --time-limit")
        choice[layer][group] = round(value) == 1
    if not problem.is_feasible(choice):
        raise CbcUnusableError("CBC's answer breaks a constraint: raise --time-limit")
    return tuple(choice)
