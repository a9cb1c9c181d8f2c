"""Placements that ours is held against: what one would do without counting, in the same memory and under the same
constraints."""

from dataclasses import replace

import numpy as np

from .dense_exchange import beside_neurons
from .dense_units import place_dense_units
from .gpu_assignment import assign_bundles
from .latency_greedy import layers_first, realise
from .latency_problem import Answer, LatencyProblem

_SEED = 0


def layer_wise_answer(problem: LatencyProblem) -> Answer | None:
    """Whole layers on GPUs, in order, until the memory is full (llama.cpp); None where that breaks a constraint."""
    answer = realise(problem, layers_first(problem), fill=False)
    return answer if problem.is_feasible(answer) else None


def random_answer(problem: LatencyProblem) -> Answer | None:
    """Dense units first, as in the paper, then bundles drawn at random (its figure 15, "+Engine"); None where that breaks a
    constraint."""
    neurons, units = problem.neurons, problem.units
    dense = place_dense_units(units, problem.gpu_bytes, problem.layer_bytes.tolist())
    rooms = [budget - used for budget, used in zip(problem.gpu_bytes, dense.gpu_bytes, strict=True)]
    chosen = [np.arange(len(b)) < (pin or 0) for b, pin in zip(problem.layers, neurons.pins, strict=True)]
    room = sum(room // neurons.unit * neurons.unit for room in rooms)
    room -= sum(int(b.num_bytes[c].sum()) for b, c in zip(problem.layers, chosen, strict=True))
    rng = np.random.default_rng(_SEED)
    layers = [layer for layer, pin in enumerate(neurons.pins) if pin is None and problem.open_to_gpu(layer)]
    layers = _that_reach_their_threshold(problem, rng.permutation(layers).tolist(), room)
    for left, layer in zip(range(len(layers), 0, -1), layers, strict=True):
        bundles = problem.layers[layer]
        drawn = rng.permutation(len(bundles))
        drawn = drawn[bundles.num_bytes[drawn].cumsum() <= room / left]
        chosen[layer][drawn] = int(bundles.sizes[drawn].sum()) >= (neurons.min_gpu_neurons[layer] or 0)
        room -= int(bundles.num_bytes[chosen[layer]].sum())
    beside_dense = replace(neurons, gpu_bytes=tuple(rooms))
    choice = assign_bundles(beside_dense, chosen, dense.homes) if problem.gpu_bytes else neurons.nothing()
    if choice is None:
        return None
    answer = beside_neurons(problem, Answer(dense.attention, dense.predictor, dense.head, tuple(choice)))
    return answer if problem.is_feasible(answer) else None


def _that_reach_their_threshold(problem: LatencyProblem, layers: list[int], room: int) -> list[int]:
    """As many of *layers*, from the first, as get C_l neurons when they share *room* equally."""
    fewest = [problem.neurons.threshold_bytes(layer) for layer in layers]
    while layers and max(fewest) > room / len(layers):
        layers, fewest = layers[:-1], fewest[:-1]
    return layers
