"""Which of several GPUs holds what, once it is decided what lives on GPUs at all.

Layers keep together: attention and predictor of a layer go on one GPU, its neurons to the same one while there is room,
and neighbouring layers follow each other, so that hidden states change the GPU rarely.
"""

from collections.abc import Sequence

import numpy as np

from .placement_problem import Choice, PlacementProblem


def home_gpus(layer_bytes: Sequence[int], gpu_bytes: Sequence[int]) -> np.ndarray:
    """int [layers], ascending: the GPU that each layer belongs to, so that every GPU gets a share of *layer_bytes* in
    proportion to its room."""
    middle = np.cumsum(np.array(layer_bytes, dtype=np.float64)) - np.array(layer_bytes, dtype=np.float64) / 2
    total = float(sum(layer_bytes))
    shares = np.cumsum(np.array(gpu_bytes, dtype=np.float64)) / max(float(sum(gpu_bytes)), 1.0)
    return np.minimum(np.searchsorted(shares, middle / total if total else middle), len(gpu_bytes) - 1)


def assign_bundles(problem: PlacementProblem, chosen: Sequence[np.ndarray], homes: np.ndarray) -> Choice | None:
    """A GPU for every bundle that is *chosen*, bool [bundles] per layer: that of *homes* where there is room, else another
    one. None when they do not all fit, which can happen because a bundle is never divided."""
    rooms = [int(room) for room in problem.gpu_bytes]
    choice = problem.nothing()
    if not rooms:
        return None if any(wanted.any() for wanted in chosen) else tuple(choice)
    homeless: list[tuple[int, int, int]] = []
    for layer, (bundles, wanted) in enumerate(zip(problem.layers, chosen, strict=True)):
        ids = np.flatnonzero(wanted)
        fits = bundles.num_bytes[ids].cumsum() <= rooms[homes[layer]]
        choice[layer][ids[fits]] = homes[layer]
        rooms[homes[layer]] -= int(bundles.num_bytes[ids[fits]].sum())
        homeless += [(-int(bundles.num_bytes[b]), layer, int(b)) for b in ids[~fits]]
    for negative_bytes, layer, b in sorted(homeless):
        gpu = int(np.argmax(rooms))
        if rooms[gpu] < -negative_bytes:
            return None
        choice[layer][b] = gpu
        rooms[gpu] += negative_bytes
    return tuple(choice)


def drop_unassigned(problem: PlacementProblem, chosen: Sequence[np.ndarray], homes: np.ndarray) -> Choice | None:
    """As :func:`assign_bundles`, but gives up the coldest bundles until the rest fits; None if that breaks a constraint."""
    chosen = [wanted.copy() for wanted in chosen]
    density = [bundles.impacts / bundles.num_bytes for bundles in problem.layers]
    while (choice := assign_bundles(problem, chosen, homes)) is None:
        coldest = [
            (density[layer][ids[-1]], layer, ids[-1]) for layer, c in enumerate(chosen) if len(ids := np.flatnonzero(c))
        ]
        _, layer, b = min(coldest)
        chosen[layer][b] = False
    return choice if problem.is_feasible(choice) else None
