"""The greedy placement: the baseline the integer program must reach, and the answer when its solver is unusable."""

import numpy as np

from .placement_problem import Choice, PlacementProblem


def greedy_placement(problem: PlacementProblem) -> Choice | None:
    """The best of several greedy fillings, or None when none of them meets all constraints.

    Layers are opened in the order of the impact per neuron of their hottest C_l neurons. For every number of open
    layers each gets its C_l, and the rest of the GPU goes to the hottest groups of the open layers.
    """
    sizes = np.concatenate([groups.sizes for groups in problem.layers])
    impacts = np.concatenate([groups.impacts for groups in problem.layers])
    layer_of = np.repeat(np.arange(len(problem.layers)), [len(groups.sizes) for groups in problem.layers])
    hottest_first = np.argsort(-impacts / sizes, kind="stable")

    open_layers = problem.open_layers()
    at_threshold = {layer: _groups_at_threshold(problem, layer) for layer in open_layers}
    open_layers.sort(key=lambda layer: -_impact_per_neuron(problem, layer, at_threshold[layer]))
    opened, forced = np.zeros(len(problem.layers), dtype=bool), problem.nothing()
    best, best_value = None, -1
    for layer in [None, *open_layers]:
        if layer is not None:
            opened[layer] = True
            forced[layer][: at_threshold[layer]] = True
        chosen = np.concatenate(forced)
        room = problem.gpu_capacity - int(sizes[chosen].sum())
        if room < 0:
            break
        candidates = hottest_first[opened[layer_of[hottest_first]] & ~chosen[hottest_first]]
        _fill(chosen, sizes, candidates, room)
        value = impacts[chosen].sum()
        if value > best_value and sizes[chosen].sum() >= problem.fewest_on_gpu:
            best, best_value = chosen, value
    if best is None:
        return None
    return tuple(np.split(best, np.flatnonzero(np.diff(layer_of)) + 1))


def _fill(chosen: np.ndarray, sizes: np.ndarray, candidates: np.ndarray, room: int) -> None:
    """Set *chosen* for *candidates* in their order, passing over those that no longer fit."""
    while len(candidates := candidates[sizes[candidates] <= room]):
        fits = sizes[candidates].cumsum() <= room
        chosen[candidates[fits]] = True
        room -= int(sizes[candidates[fits]].sum())
        candidates = candidates[~fits]


def _groups_at_threshold(problem: PlacementProblem, layer: int) -> int:
    """How many groups, hottest first, reach C_l."""
    fewest = problem.min_gpu_neurons[layer]
    return int(np.searchsorted(problem.layers[layer].sizes.cumsum(), fewest)) + 1 if fewest else 0


def _impact_per_neuron(problem: PlacementProblem, layer: int, num_groups: int) -> float:
    """Of the first groups; of the hottest where C_l is 0."""
    groups, first = problem.layers[layer], max(num_groups, 1)
    return float(groups.impacts[:first].sum() / groups.sizes[:first].sum())
