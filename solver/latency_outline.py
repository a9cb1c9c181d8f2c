"""The program of the objective latency for models of thousands of bundles, in outline: of each layer, which of three cases
it is in, and how many bytes are on every GPU. Its optimum is a lower bound, and its answer a plan that
:mod:`.latency_greedy` makes exact.

*Cases.* A layer lies on the CPU, or on one GPU, or is divided, which costs a synchronisation; w_l, u_ld and v_l are the
weights of the cases, and everything that belongs to one is limited by its weight. That is the convex hull of a layer's
possibilities, far tighter than rows such as s_l ≥ a_ld − k_ld / bytes.

*Tangents.* The reads that k bytes can take off the CPU are at most those of the hottest bundles, a concave curve in k, which
lies below each of its tangents. With some of them the curve is close where they touch.

*Counts.* Layers are so alike that branching on single ones never ends. So what is integral are sums over all layers – how
many attention blocks and predictors each GPU holds, how many layers are whole, divided, opened – and the head. That is
still a lower bound, and hardly below the true optimum, because with whole sums at most a few layers remain between two
cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from .latency_greedy import Plan
from .latency_problem import LatencyProblem
from .latency_program import scaled_sync, scales
from .mip_solvers import solve_program
from .token_time import CPU

Tangents = Sequence[Sequence[int]]  # per layer: numbers of leading bundles at which the curve is touched


@dataclass(frozen=True)
class Outline:
    """What the program says: a plan, and its optimum in seconds, None when it was not proven."""

    plan: Plan
    optimum_seconds: float | None


@dataclass(frozen=True)
class _Layer:
    """Variables of one layer: the weights of its cases, and what is on each GPU while it is divided."""

    whole: dict[int, Any]
    divided: Any
    opened: Any
    attention: dict[int, Any]
    predictor: dict[int, Any]
    bundle_bytes: dict[int, Any]
    seconds: Any


def outline_program(problem: LatencyProblem, tangents: Tangents) -> tuple[pulp.LpProblem, list[_Layer], dict[int, Any]]:
    """
    Sets      l in L   layers          d in D   GPUs          j in J_l   tangents: reads ≤ α_lj + β_lj · bytes
    Given     A_l, P_l, H   bytes of attention, predictor, head          K_l, G_l   bytes, and bytes read, of all bundles
              M_d, R   bytes of room on GPU d, bytes the CPU cannot hold    c_d, c   seconds per byte on GPU d, CPU
              C_l      bytes of the fewest neurons worth a synchronisation           T           seconds of one
    Choose    w_l + sum_d u_ld + v_l = 1    weights: on the CPU, whole on GPU d, divided
              o_l <= v_l                    divided with bundles on GPUs
              a_ld, p_ld <= v_l             attention, predictor on GPU d while divided        h_d          head on GPU d
              k_ld, g_ld                    bytes of bundles, bytes read of them, on GPU d while divided
              t_l                           seconds of the neurons while divided
    Minimise  sum_l [c (A_l + P_l + G_l) w_l + sum_d c_d (A_l + P_l + G_l) u_ld + t_l + T v_l
                     + c (A_l + P_l) v_l − sum_d (c − c_d) (A_l a_ld + P_l p_ld)]  +  c H − sum_d (c − c_d) H h_d
    With      cpu_part_l     t_l >= c (G_l v_l − sum_d g_ld)             gpu_part_ld    t_l >= c_d g_ld
              tangent_lj     sum_d g_ld <= α_lj o_l + β_lj sum_d k_ld    (and each g_ld likewise)
              worthwhile_l   C_l o_l <= sum_d k_ld <= K_l o_l            pinned: sum_d k_ld is what is pinned
              together_ld    p_ld <= v_l − sum_{e≠d} a_le                one place: sum_d a_ld, sum_d p_ld <= v_l
              memory_d       sum_l [A_l (a_ld + u_ld) + P_l (p_ld + u_ld) + k_ld + K_l u_ld] + H h_d <= M_d
              cpu_memory     the same summed over d >= R
              integral       for every d: sum_l (a_ld + u_ld), sum_l (p_ld + u_ld), sum_l u_ld, h_d; sum_l v_l, sum_l o_l
    """
    units, price = problem.units, problem.seconds_per_byte
    D, L = range(len(problem.gpu_bytes)), range(len(problem.layers))
    byte, second = scales(problem)
    cost = [float(price[d]) * second / byte for d in D]  # of a scaled byte, in scaled seconds
    cpu_cost = float(price[CPU]) * second / byte
    sync = scaled_sync(problem, second)
    A, P = problem.attention_bytes * byte, problem.predictor_bytes * byte
    K, G = problem.layer_bytes * byte, problem.layer_reads * byte
    H = units.head * byte

    program = pulp.LpProblem("latency_outline", pulp.LpMinimize)
    h = {d: program.add_variable(f"h_{d}", cat=pulp.LpBinary) for d in D}
    layers = [_add_layer(program, problem, layer, tangents[layer], byte, cpu_cost, cost) for layer in L]

    seconds = []
    for layer, variables in enumerate(layers):
        dense, everything = float(A[layer] + P[layer]), float(A[layer] + P[layer] + G[layer])
        on_gpus = pulp.lpSum(variables.whole.values())
        seconds += [cpu_cost * everything * (1 - on_gpus - variables.divided)]
        seconds += [cost[d] * everything * whole for d, whole in variables.whole.items()]
        seconds += [variables.seconds, (sync + cpu_cost * dense) * variables.divided]
        seconds += [-(cpu_cost - cost[d]) * float(A[layer]) * variables.attention[d] for d in D]
        seconds += [-(cpu_cost - cost[d]) * float(P[layer]) * x for d, x in variables.predictor.items()]
    overhead = problem.speeds.overhead_seconds_per_layer * len(L) * second
    head = cpu_cost * H - pulp.lpSum((cpu_cost - cost[d]) * H * h[d] for d in D)
    program += pulp.lpSum(seconds) + head + overhead, "seconds"

    used = [_on_gpu(layers, d, A, P, K) for d in D]
    for d in D:
        program += used[d] + H * h[d] <= problem.gpu_bytes[d] * byte, f"memory_{d}"
    if problem.fewest_gpu_bytes:
        heads = pulp.lpSum(problem.head_cpu_bytes * byte * h[d] for d in D)
        program += pulp.lpSum(used) + heads >= problem.fewest_gpu_bytes * byte, "cpu_memory"
    program += pulp.lpSum(h.values()) <= 1, "one_place_head"

    counts: dict[str, list[Any]] = {"divided": [x.divided for x in layers], "opened": [x.opened for x in layers]}
    for d in D:
        whole = [x.whole[d] for x in layers if d in x.whole]
        counts[f"whole_{d}"] = whole
        counts[f"attention_{d}"] = [x.attention[d] for x in layers] + whole
        counts[f"predictor_{d}"] = [x.predictor[d] for x in layers if x.predictor] + [
            x.whole[d] for x in layers if x.predictor and d in x.whole
        ]
    for name, terms in counts.items():
        count = program.add_variable(f"count_{name}", lowBound=0, upBound=len(L), cat=pulp.LpInteger)
        program += pulp.lpSum(terms) == count, f"integral_{name}"
    return program, layers, h


def _add_layer(
    program: pulp.LpProblem,
    problem: LatencyProblem,
    layer: int,
    touched: Sequence[int],
    byte: float,
    cpu_cost: float,
    cost: Sequence[float],
) -> _Layer:
    """Variables and rows of one layer; costs are scaled seconds of a scaled byte."""
    bundles, pin = problem.layers[layer], problem.neurons.pins[layer]
    D, open_to_gpu = range(len(problem.gpu_bytes)), problem.open_to_gpu(layer)

    def weight(name: str, allowed: bool = True) -> Any:
        return program.add_variable(f"{name}_{layer}", lowBound=0, upBound=1 if allowed else 0)

    whole = {d: weight(f"u_{d}") for d in D} if open_to_gpu and pin in (None, len(bundles)) else {}
    on_cpu, divided, opened = weight("w", not pin), weight("v"), weight("o", open_to_gpu)
    attention = {d: weight(f"a_{d}") for d in D}
    predictor = {d: weight(f"p_{d}") for d in D} if problem.units.predictor[layer] else {}
    bytes_at = np.concatenate([[0.0], bundles.num_bytes.cumsum(dtype=np.float64)]) * byte
    reads_at = np.concatenate([[0.0], bundles.read_bytes.cumsum(dtype=np.float64)]) * byte
    all_bytes, all_reads = float(bytes_at[-1]), float(reads_at[-1])
    k = {d: program.add_variable(f"k_{d}_{layer}", lowBound=0, upBound=all_bytes) for d in D}
    g = {d: program.add_variable(f"g_{d}_{layer}", lowBound=0, upBound=all_reads) for d in D}
    t = program.add_variable(f"t_{layer}", lowBound=0)

    program += on_cpu + pulp.lpSum(whole.values()) + divided == 1, f"cases_{layer}"
    program += opened <= divided, f"opened_{layer}"
    program += pulp.lpSum(attention.values()) <= divided, f"one_place_attention_{layer}"
    if predictor:
        program += pulp.lpSum(predictor.values()) <= divided, f"one_place_predictor_{layer}"
    for d in predictor if len(D) > 1 else ():
        elsewhere = pulp.lpSum(attention[e] for e in D if e != d)
        program += predictor[d] + elsewhere <= divided, f"together_{d}_{layer}"

    bytes_on, reads_on = pulp.lpSum(k.values()), pulp.lpSum(g.values())
    program += t >= cpu_cost * (all_reads * divided - reads_on), f"cpu_part_{layer}"
    for d in D:
        program += t >= cost[d] * g[d], f"gpu_part_{d}_{layer}"
    slopes = np.append(bundles.read_bytes / bundles.num_bytes, 0.0)
    for j in sorted(set(touched) | {0, len(bundles)}):
        start, slope = float(reads_at[j] - slopes[j] * bytes_at[j]), float(slopes[j])
        program += reads_on <= start * opened + slope * bytes_on, f"tangent_{j}_{layer}"
        for d in D if len(D) > 1 else ():
            program += g[d] <= start * opened + slope * k[d], f"tangent_{j}_{d}_{layer}"
    if pin is not None:
        program += bytes_on == float(bytes_at[pin]) * divided, f"pinned_{layer}"
    else:
        program += bytes_on >= problem.neurons.threshold_bytes(layer) * byte * opened, f"worthwhile_{layer}"
    program += bytes_on <= all_bytes * opened, f"all_{layer}"
    return _Layer(whole, divided, opened, attention, predictor, k, t)


def _on_gpu(layers: list[_Layer], d: int, A: np.ndarray, P: np.ndarray, K: np.ndarray) -> Any:
    """Scaled bytes on GPU d, without the head."""
    terms = []
    for layer, x in enumerate(layers):
        terms += [float(A[layer]) * x.attention[d], x.bundle_bytes[d]]
        if x.predictor:
            terms += [float(P[layer]) * x.predictor[d]]
        if d in x.whole:
            terms += [float(A[layer] + P[layer] + K[layer]) * x.whole[d]]
    return pulp.lpSum(terms)


def solve_outline(
    problem: LatencyProblem,
    tangents: Tangents,
    solver: str,
    time_limit_seconds: float,
    gap: float,
) -> Outline | None:
    """The program's answer; None when the solver found that there is none. Raises ``SolverUnusableError``."""
    program, layers, head = outline_program(problem, tangents)
    proved = solve_program(program, solver, time_limit_seconds, gap)
    if proved is None:
        return None
    byte, second = scales(problem)
    seconds = program.objective.value() / second
    plan = _plan(problem, layers, next((d for d, h in head.items() if round(h.value())), None), byte)
    return Outline(plan, seconds * (1 - gap) if proved else None)


def _plan(problem: LatencyProblem, layers: list[_Layer], head: int | None, byte: float) -> Plan:
    """Whole units out of weights: as many of each kind as the sums say, in the layers of the largest weights."""
    whole = np.array([sum(x.value() for x in layer.whole.values()) for layer in layers])
    divided = np.array([layer.divided.value() for layer in layers])
    attention = np.array([sum(x.value() for x in layer.attention.values()) for layer in layers]) + whole
    predictor = np.array([sum(x.value() for x in layer.predictor.values()) for layer in layers], dtype=np.float64)
    predictor += whole * (problem.predictor_bytes > 0)
    bundle_bytes = np.array([sum(x.value() for x in layer.bundle_bytes.values()) for layer in layers]) / byte
    is_whole = _largest(whole)
    counts = []
    for layer, bundles in enumerate(problem.layers):
        wanted = bundle_bytes[layer] / divided[layer] if divided[layer] > 1e-6 else bundle_bytes[layer]
        ends = bundles.num_bytes.cumsum()
        fitting = int(np.searchsorted(ends, wanted * (1 + 1e-9) + 1e-6, side="right"))
        counts.append(len(bundles) if is_whole[layer] else fitting if divided[layer] > 0.5 else 0)
    homes = _homes(problem, layers, byte)
    return Plan(_largest(attention), _largest(predictor), head is not None, counts, homes, head)


def _homes(problem: LatencyProblem, layers: list[_Layer], byte: float) -> np.ndarray:
    """The GPU on which most bytes of each layer are."""
    homes = []
    for layer, x in enumerate(layers):
        attention, predictor = problem.attention_bytes[layer] * byte, problem.predictor_bytes[layer] * byte
        whole = attention + predictor + problem.layer_bytes[layer] * byte
        on = [
            attention * x.attention[d].value()
            + x.bundle_bytes[d].value()
            + (predictor * x.predictor[d].value() if x.predictor else 0)
            + (whole * x.whole[d].value() if x.whole else 0)
            for d in x.attention
        ]
        homes.append(int(np.argmax(on)))
    return np.array(homes)


def _largest(weights: np.ndarray) -> np.ndarray:
    """bool: as many of the largest *weights* as they sum to; of equal ones the first."""
    chosen = np.zeros(len(weights), dtype=bool)
    chosen[np.argsort(-np.round(weights, 6), kind="stable")[: round(float(weights.sum()))]] = True
    return chosen
