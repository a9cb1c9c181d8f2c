"""The mixed-integer program of the objective latency, stated in PuLP: every bundle and every other unit is a binary variable.

It is exact and for models of some hundred bundles; :mod:`.latency_outline` is for larger ones.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from .latency_problem import Answer, LatencyProblem
from .mip_solvers import SOLVERS_SHARE, SolverUnusableError, is_one, solve_program
from .token_time import CPU

# Bytes and seconds are scaled so that these are the largest that occur: far above the solvers' absolute tolerances.
_LARGEST_BYTES, _LARGEST_SECONDS = 2.0**20, 1e5


@dataclass(frozen=True)
class _Program:
    """The program and its variables."""

    program: pulp.LpProblem
    attention: dict[tuple[int, int], Any]
    predictor: dict[tuple[int, int], Any]
    head: dict[int, Any]
    bundles: dict[tuple[int, int, int], Any]


def latency_program(problem: LatencyProblem) -> _Program:
    """
    Sets      l in L   layers          d in D   GPUs          b in B_l   bundles of layer l, hottest first
    Given     A_l, P_l, H  bytes of attention with KV cache, predictor, head    m_lb, r_lb  bytes, bytes read of a bundle
              M_d, R   bytes of room on GPU d, bytes the CPU cannot hold    c_d, c   seconds per byte on GPU d, CPU
              C_l      fewest neurons worth a synchronisation (eq. 4)                T           seconds of one
    Choose    a_ld, p_ld, h_d   1 if attention, predictor, head live on GPU d, else they are on the CPU
              x_lbd    1 if the bundle lives on GPU d        y_l  1 if bundles of layer l are on GPUs
              s_l      1 if layer l is divided               t_l  seconds of the neurons of layer l
    With      k_ld = sum_b m_lb x_lbd, g_ld = sum_b r_lb x_lbd: bytes, and bytes read, on GPU d
    Minimise  sum_l [c A_l − sum_d (c − c_d) A_l a_ld] + the same of P_l p_ld and H h_d + sum_l (t_l + T s_l)
    With      cpu_part_l       t_l >= c (sum_b r_lb − sum_d g_ld)       gpu_part_ld    t_l >= c_d g_ld
              memory_d         sum_l (A_l a_ld + P_l p_ld + k_ld) + H h_d <= M_d
              cpu_memory       the same summed over d, H only where it has bytes of its own on the CPU, >= R
              one_place        sum_d a_ld, sum_d p_ld, sum_d h_d, sum_d x_lbd <= 1
              together_ld      p_ld + sum_{e≠d} a_le <= 1               attention and predictor on no two GPUs
              worthwhile_l     sum_bd n_lb x_lbd >= C_l y_l             opened_lb      sum_d x_lbd <= y_l       (7, 8)
              divided          s_l >= a_ld − p_ld, p_ld − a_ld, x_lbd − a_ld, a_ld − x_lbd
    """
    units, price, neurons = problem.units, problem.seconds_per_byte, problem.neurons
    D, L = range(len(problem.gpu_bytes)), range(len(problem.layers))
    with_predictor = [layer for layer in L if units.predictor[layer]]
    on_gpus = [layer for layer in L if problem.open_to_gpu(layer)]
    byte, second = scales(problem)

    program = pulp.LpProblem("latency", pulp.LpMinimize)
    a = {(i, d): _binary(program, f"a_{i}_{d}") for i in L for d in D}
    p = {(i, d): _binary(program, f"p_{i}_{d}") for i in with_predictor for d in D}
    h = {d: _binary(program, f"h_{d}") for d in D}
    y = {i: _binary(program, f"y_{i}") for i in on_gpus if neurons.pins[i] is None}
    s = {i: _binary(program, f"s_{i}") for i in L}
    t = {i: program.add_variable(f"t_{i}", lowBound=0) for i in L}
    x: dict[tuple[int, int, int], Any] = {}
    k: dict[tuple[int, int], Any] = {}
    g: dict[tuple[int, int], Any] = {}
    for layer in on_gpus:
        _add_bundles(program, problem, layer, byte, x, k, g, y)

    saved = {d: float(price[CPU] - price[d]) * second for d in D}
    A, P = problem.attention_bytes, problem.predictor_bytes
    fixed = float((A.sum() + P.sum() + units.head) * price[CPU] * second)
    fixed += problem.speeds.overhead_seconds_per_layer * len(L) * second
    gains = [float(A[i]) * saved[d] * a[i, d] for i, d in a] + [float(P[i]) * saved[d] * p[i, d] for i, d in p]
    gains += [units.head * saved[d] * h[d] for d in D]
    sync = scaled_sync(problem, second)
    program += fixed - pulp.lpSum(gains) + pulp.lpSum(t.values()) + sync * pulp.lpSum(s.values()), "seconds"

    for layer in L:
        reads = float(problem.layer_reads[layer])
        on_gpu = pulp.lpSum(g[layer, d] for d in D) if layer in on_gpus else 0
        cpu_seconds, gpu_unit = float(price[CPU]) * second, second / byte
        program += t[layer] >= cpu_seconds * reads - float(price[CPU]) * gpu_unit * on_gpu, f"cpu_part_{layer}"
        for d in D if layer in on_gpus else ():
            program += t[layer] >= float(price[d]) * gpu_unit * g[layer, d], f"gpu_part_{layer}_{d}"

    used = [
        pulp.lpSum(float(A[i]) * byte * a[i, d] for i in L)
        + pulp.lpSum(float(P[i]) * byte * p[i, d] for i in with_predictor)
        + pulp.lpSum(k[i, d] for i in on_gpus)
        for d in D
    ]
    for d in D:
        program += used[d] + units.head * byte * h[d] <= problem.gpu_bytes[d] * byte, f"memory_{d}"
    if problem.fewest_gpu_bytes:
        heads = pulp.lpSum(problem.head_cpu_bytes * byte * h[d] for d in D)
        program += pulp.lpSum(used) + heads >= problem.fewest_gpu_bytes * byte, "cpu_memory"

    program += pulp.lpSum(h.values()) <= 1, "one_place_head"
    for layer in L:
        program += pulp.lpSum(a[layer, d] for d in D) <= 1, f"one_place_attention_{layer}"
        for d in D:
            if layer in with_predictor:
                program += s[layer] >= a[layer, d] - p[layer, d], f"divided_attention_{layer}_{d}"
                program += s[layer] >= p[layer, d] - a[layer, d], f"divided_predictor_{layer}_{d}"
                elsewhere = pulp.lpSum(a[layer, e] for e in D if e != d)
                program += p[layer, d] + elsewhere <= 1, f"together_{layer}_{d}"
            if layer not in on_gpus:
                program += s[layer] >= a[layer, d], f"divided_neurons_{layer}_{d}"
            for b in range(len(problem.layers[layer])) if layer in on_gpus else ():
                program += s[layer] >= a[layer, d] - x[layer, b, d], f"divided_below_{layer}_{b}_{d}"
                program += s[layer] >= x[layer, b, d] - a[layer, d], f"divided_above_{layer}_{b}_{d}"
    for layer in with_predictor:
        program += pulp.lpSum(p[layer, d] for d in D) <= 1, f"one_place_predictor_{layer}"
    return _Program(program, a, p, h, x)


def _add_bundles(
    program: pulp.LpProblem,
    problem: LatencyProblem,
    layer: int,
    byte: float,
    x: dict[tuple[int, int, int], Any],
    k: dict[tuple[int, int], Any],
    g: dict[tuple[int, int], Any],
    y: dict[int, Any],
) -> None:
    """Binary variables of every bundle; k and g become sums of them."""
    bundles, pin = problem.layers[layer], problem.neurons.pins[layer]
    D, B = range(len(problem.gpu_bytes)), range(len(bundles))
    for b in B:
        for d in D:
            x[layer, b, d] = _binary(program, f"x_{layer}_{b}_{d}")
    for d in D:
        k[layer, d] = pulp.lpSum(float(bundles.num_bytes[b]) * byte * x[layer, b, d] for b in B)
        g[layer, d] = pulp.lpSum(float(bundles.read_bytes[b]) * byte * x[layer, b, d] for b in B)
    if pin is not None:
        for b in B:
            program += pulp.lpSum(x[layer, b, d] for d in D) == int(b < pin), f"pinned_{layer}_{b}"
        return
    fewest = problem.neurons.min_gpu_neurons[layer] or 0
    on_gpu = pulp.lpSum(int(bundles.sizes[b]) * x[layer, b, d] for b in B for d in D)
    program += on_gpu >= fewest * y[layer], f"worthwhile_{layer}"
    for b in B:
        program += pulp.lpSum(x[layer, b, d] for d in D) <= y[layer], f"opened_{layer}_{b}"


def _binary(program: pulp.LpProblem, name: str) -> Any:
    return program.add_variable(name, cat=pulp.LpBinary)


def solve_exact(
    problem: LatencyProblem, solver: str, time_limit_seconds: float, gap: float
) -> tuple[Answer, bool] | None:
    """An answer and whether it is proven to be within the relative *gap* of the best; None when the solver found that there
    is none. Raises ``SolverUnusableError``."""
    made = latency_program(problem)
    proved = solve_program(made.program, solver, time_limit_seconds, SOLVERS_SHARE * gap)
    if proved is None:
        return None
    answer = problem.on_cpu()
    attention, predictor, head = _dense_devices(made, len(problem.layers))
    for (layer, b, d), variable in made.bundles.items():
        if is_one(variable):
            answer.bundles[layer][b] = d
    found = Answer(attention, predictor, head, answer.bundles)
    if not problem.is_feasible(found):
        raise SolverUnusableError("the solver's answer breaks a constraint: raise --time-limit")
    return found, proved


def _dense_devices(made: _Program, layers: int) -> tuple[np.ndarray, np.ndarray, int]:
    attention, predictor, head = np.full(layers, CPU), np.full(layers, CPU), CPU
    for devices, variables in ((attention, made.attention), (predictor, made.predictor)):
        for (layer, d), variable in variables.items():
            if is_one(variable):
                devices[layer] = d
    for d, variable in made.head.items():
        head = d if is_one(variable) else head
    return attention, predictor, head


def scales(problem: LatencyProblem) -> tuple[float, float]:
    """What bytes and seconds are multiplied by, so that the largest are far above the solvers' absolute tolerances and far
    below where their doubles round; that of bytes is a power of two, which rounds nothing."""
    largest = max(max(problem.gpu_bytes, default=1) / _LARGEST_BYTES, 1.0)
    everything = float((problem.attention_bytes + problem.predictor_bytes).sum()) + float(problem.layer_reads.sum())
    seconds = (everything + problem.units.head) * float(problem.seconds_per_byte.max())
    return 2.0 ** -int(np.ceil(np.log2(largest))), _LARGEST_SECONDS / seconds


def scaled_sync(problem: LatencyProblem, second: float) -> float:
    """T_sync in scaled seconds, at most twice what everything else can take: the fewest divided layers win then anyway."""
    return min(problem.speeds.sync_seconds * second, 2 * _LARGEST_SECONDS)
