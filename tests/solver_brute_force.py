"""The best placement of tiny instances by trying every one, in numpy, and the random instances to try.

It knows the constraints and the time of a token from the paper and the design alone, and shares no code with the solver.
"""

import itertools

import numpy as np

from pi_toolkit.solver.bundle import Bundles
from pi_toolkit.solver.latency_problem import LatencyProblem
from pi_toolkit.solver.memory import UnitBytes
from pi_toolkit.solver.placement_problem import PlacementProblem
from pi_toolkit.solver.token_time import Speeds

MAX_BUNDLES = 10  # in all layers of an instance with one GPU, 6 with two


def random_instance(seed: int) -> LatencyProblem:
    """1–4 layers, 1–2 GPUs; C_l, the CPU's memory, pins, missing predictors, tied heads and short last groups at random."""
    rng = np.random.default_rng(seed)
    gpus, layers = int(rng.integers(1, 3)), int(rng.integers(1, 5))
    group, neuron = int(rng.integers(2, 6)), int(rng.integers(1, 20))
    most = max(1, (MAX_BUNDLES if gpus == 1 else 6) // layers)
    sizes = [int(rng.integers(1, most * group + 1)) for _ in range(layers)]
    bundles, pinned = [], []
    for neurons in sizes:
        counts = np.sort(rng.integers(0, int(rng.choice([2, 5, 1000, 10**7])), neurons))[::-1]
        reads = counts / (counts.max() + 1) * rng.uniform(0.2, 1)
        pin = int(rng.integers(0, neurons + 1)) if rng.random() < 0.15 else None
        starts = np.arange(0, neurons, group)
        if pin:
            starts = np.concatenate([np.arange(0, pin, group), np.arange(pin, neurons, group)])
        of = np.diff(starts, append=neurons)
        bundles.append(
            Bundles(
                rng.permutation(neurons),
                of,
                of * neuron,
                np.add.reduceat(counts, starts),
                np.add.reduceat(reads, starts) * neuron,
            )
        )
        pinned.append(None if pin is None else int((starts < pin).sum()))
    thresholds = [None if rng.random() < 0.15 else int(rng.integers(0, neurons + 1)) for neurons in sizes]
    attention = tuple(int(size) for size in rng.integers(1, 60, layers))
    predictor = tuple(int(size) for size in rng.integers(1, 20, layers) * (rng.random(layers) < 0.7))
    units = UnitBytes(
        attention=attention,
        kv_cache=0,
        predictor=predictor,
        neuron=neuron,
        head=int(rng.integers(1, 80)),
        embedding=int(rng.integers(1, 80)),
        head_is_embedding=bool(rng.random() < 0.3),
    )
    everything = sum(attention) + sum(predictor) + units.head + sum(sizes) * neuron
    budgets = tuple(int(rng.uniform(0, 1.2) * everything / gpus) for _ in range(gpus))
    cpu_bytes = 10**9
    if rng.random() < 0.4:
        cpu_bytes = units.embedding + int(rng.uniform(0.2, 1.0) * everything)
    speeds = Speeds(
        cpu_bytes_per_second=100.0,
        gpu_bytes_per_second=tuple(float(rng.choice([120.0, 1000.0, 1500.0])) for _ in range(gpus)),
        sync_seconds=float(rng.choice([0.0, 0.02, 0.3])),
        overhead_seconds_per_layer=float(rng.choice([0.0, 0.1])),
    )
    pins = tuple(pinned) if any(pin is not None for pin in pinned) else None
    return LatencyProblem(
        PlacementProblem(tuple(bundles), budgets, 0, tuple(thresholds), pins), units, speeds, cpu_bytes
    )


def neuron_choices(problem: PlacementProblem, layer: int) -> np.ndarray:
    """int [choices, bundles]: every assignment of the layer's bundles to devices (0 CPU, 1 first GPU …) that C_l and pins
    allow."""
    bundles, pin = problem.layers[layer], problem.pins[layer]
    devices = len(problem.gpu_bytes) + 1
    choices = np.array(list(itertools.product(range(devices), repeat=len(bundles))))
    if pin is not None:
        return choices[(choices[:, :pin] > 0).all(axis=1) & (choices[:, pin:] == 0).all(axis=1)]
    neurons, fewest = (choices > 0) @ bundles.sizes, problem.min_gpu_neurons[layer]
    return choices[(neurons == 0) | (False if fewest is None else neurons >= fewest)]


def best_firings(problem: PlacementProblem) -> float | None:
    """Most firings on GPUs, None when no choice is feasible."""
    table = None
    for layer, bundles in enumerate(problem.layers):
        choices = neuron_choices(problem, layer)
        used = [(choices == gpu + 1) @ bundles.num_bytes for gpu in range(len(problem.gpu_bytes))]
        table = _combine(
            table, np.column_stack(used), -((choices > 0) @ bundles.impacts).astype(float), problem.gpu_bytes
        )
    fits = table[0].sum(axis=1) >= problem.fewest_gpu_bytes
    return -float(table[1][fits].min()) if fits.any() else None


def best_seconds(problem: LatencyProblem) -> float | None:
    """The shortest time of a token, None when no placement is feasible."""
    gpus, units, speeds = len(problem.gpu_bytes), problem.units, problem.speeds
    price = np.array([1 / speeds.cpu_bytes_per_second, *(1 / speed for speed in speeds.gpu_bytes_per_second)])
    table = None
    for layer, bundles in enumerate(problem.layers):
        choices = neuron_choices(problem.neurons, layer)
        seconds = np.max([(choices == d) @ bundles.read_bytes * price[d] for d in range(gpus + 1)], axis=0)
        neuron_bytes = np.column_stack([(choices == d) @ bundles.num_bytes for d in range(gpus + 1)])
        all_used, all_seconds = [], []
        for attention, predictor in itertools.product(range(gpus + 1), repeat=2):
            if units.predictor[layer] == 0 and predictor > 0:
                continue
            if attention > 0 and predictor > 0 and attention != predictor:
                continue
            split = (choices != attention).any(axis=1)
            if units.predictor[layer]:
                split |= predictor != attention
            used = neuron_bytes.copy()
            used[:, attention] += units.attention[layer]
            used[:, predictor] += units.predictor[layer]
            dense = units.attention[layer] * price[attention] + units.predictor[layer] * price[predictor]
            all_used.append(used)
            all_seconds.append(seconds + dense + speeds.sync_seconds * split + speeds.overhead_seconds_per_layer)
        limits = (problem.cpu_bytes - units.embedding, *problem.gpu_bytes)
        table = _combine(table, np.concatenate(all_used), np.concatenate(all_seconds), limits)
    heads = np.zeros((gpus + 1, gpus + 1), dtype=np.int64)
    for device in range(gpus + 1):
        heads[device, device] = 0 if device == 0 and units.head_is_embedding else units.head
    used, seconds = _combine(
        table, heads, units.head * price, (problem.cpu_bytes - units.embedding, *problem.gpu_bytes)
    )
    return float(seconds.min()) if len(seconds) else None


def _combine(table, used, cost, limits):
    """All sums of two tables of (bytes per device, cost), the cheapest of each bytes, within *limits*."""
    if table is not None:
        used = (table[0][:, None, :] + used[None, :, :]).reshape(-1, used.shape[1])
        cost = (table[1][:, None] + cost[None, :]).reshape(-1)
    fits = (used <= np.array(limits)).all(axis=1)
    used, cost = used[fits], cost[fits]
    order = np.lexsort((cost, *used.T))
    used, cost = used[order], cost[order]
    first = np.ones(len(used), dtype=bool)
    first[1:] = (np.diff(used, axis=0) != 0).any(axis=1)
    return used[first], cost[first]
