"""The greedy placement: the baseline the integer program must reach, and the answer when no solver is usable."""

import numpy as np

from .placement_problem import PlacementProblem

Chosen = tuple[np.ndarray, ...]  # per layer bool [bundles]: which live on a GPU


def greedy_placement(problem: PlacementProblem) -> Chosen | None:
    """The best of several greedy fillings of a :meth:`PlacementProblem.pooled` problem, or None when none of them meets
    all constraints.

    Layers are opened in the order of the impact per byte of their hottest C_l neurons. For every number of open layers
    each gets its C_l, and the rest of the GPU goes to the hottest bundles of the open layers.
    """
    sizes = np.concatenate([bundles.num_bytes for bundles in problem.layers])
    impacts = np.concatenate([bundles.impacts for bundles in problem.layers])
    layer_of = np.repeat(np.arange(len(problem.layers)), [len(bundles) for bundles in problem.layers])
    hottest_first = np.argsort(-impacts / sizes, kind="stable")

    open_layers = problem.open_layers()
    at_threshold = {layer: problem.layers[layer].leading(problem.min_gpu_neurons[layer] or 0) for layer in open_layers}
    open_layers.sort(key=lambda layer: -_impact_per_byte(problem, layer, at_threshold[layer]))
    opened, forced = np.zeros(len(problem.layers), dtype=bool), np.zeros(len(sizes), dtype=bool)
    first_of = np.concatenate([[0], np.cumsum([len(bundles) for bundles in problem.layers])])
    best, best_value = None, -1
    for layer in [None, *open_layers]:
        if layer is not None:
            opened[layer] = True
            forced[first_of[layer] : first_of[layer] + at_threshold[layer]] = True
        chosen = forced.copy()
        room = problem.room - int(sizes[chosen].sum())
        if room < 0:
            break
        candidates = hottest_first[opened[layer_of[hottest_first]] & ~chosen[hottest_first]]
        _fill(chosen, sizes, candidates, room)
        value = impacts[chosen].sum()
        if value > best_value and sizes[chosen].sum() >= problem.fewest_gpu_bytes:
            best, best_value = chosen, value
    return None if best is None else tuple(np.split(best, first_of[1:-1]))


def _fill(chosen: np.ndarray, sizes: np.ndarray, candidates: np.ndarray, room: int) -> None:
    """Set *chosen* for *candidates* in their order, passing over those that no longer fit."""
    while len(candidates := candidates[sizes[candidates] <= room]):
        fits = sizes[candidates].cumsum() <= room
        chosen[candidates[fits]] = True
        room -= int(sizes[candidates[fits]].sum())
        candidates = candidates[~fits]


def _impact_per_byte(problem: PlacementProblem, layer: int, num_bundles: int) -> float:
    """Of the first bundles; of the hottest where C_l is 0."""
    bundles, first = problem.layers[layer], max(num_bundles, 1)
    return float(bundles.impacts[:first].sum() / bundles.num_bytes[:first].sum())
