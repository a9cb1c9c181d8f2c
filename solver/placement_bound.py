"""An upper bound on what any placement can reach, computed without the integer program's solver.

Price the GPU's memory at t firings per neuron. Whatever t ≥ 0 is, no placement is worth more than

    t · capacity + Σ_l max(0, best firings of layer l minus t times its neurons, given none or at least C_l of them)

and the inner maximum is easy, because groups are sorted: all groups that are worth their price, or, when these are
fewer than C_l neurons, the hottest C_l. The bound is convex in t, so bisection on its slope finds the best price. (It
is the Lagrangian dual of eqs. 2, 6 and 7, equal to the linear relaxation.)
"""

import math
from dataclasses import dataclass

import numpy as np

from .placement_problem import PlacementProblem

_BISECTIONS = 100
_ROUNDING = 1e-12  # float64 sums of up to 10^5 groups err by less


@dataclass(frozen=True)
class _LayerCurve:
    """Firings and neurons of the hottest groups, from none to all, and both at C_l (a fraction of a group allowed)."""

    firings: np.ndarray
    neurons: np.ndarray
    density: np.ndarray
    fewest: float
    firings_at_fewest: float

    def best(self, price: float) -> tuple[float, float]:
        """Largest firings − price · neurons, and the neurons that reach it."""
        worth_it = int(np.searchsorted(-self.density, -price))
        firings, neurons = float(self.firings[worth_it]), float(self.neurons[worth_it])
        if neurons < self.fewest:
            firings, neurons = self.firings_at_fewest, self.fewest
        gain = firings - price * neurons
        return (gain, neurons) if gain > 0 else (0.0, 0.0)


def upper_bound(problem: PlacementProblem) -> int | float:
    """No feasible choice has a larger :meth:`PlacementProblem.value`; an int where all impacts are."""
    curves = [_curve(problem, layer) for layer in problem.open_layers()]
    capacity = problem.gpu_capacity // problem.unit * problem.unit
    cheap, dear = 0.0, max((float(curve.density[0]) for curve in curves), default=0.0) + 1.0
    bound = math.inf
    for _ in range(_BISECTIONS):
        price = (cheap + dear) / 2
        best = [curve.best(price) for curve in curves]
        bound = min(bound, price * capacity + sum(gain for gain, _ in best))
        if sum(neurons for _, neurons in best) > capacity:
            cheap = price
        else:
            dear = price
    bound *= 1 + _ROUNDING
    return math.floor(bound) if all(groups.impacts.dtype.kind == "i" for groups in problem.layers) else bound


def _curve(problem: PlacementProblem, layer: int) -> _LayerCurve:
    groups = problem.layers[layer]
    firings = np.concatenate([[0.0], groups.impacts.cumsum(dtype=np.float64)])
    neurons = np.concatenate([[0.0], groups.sizes.cumsum(dtype=np.float64)])
    fewest = float(-(-(problem.min_gpu_neurons[layer] or 0) // problem.unit) * problem.unit)
    return _LayerCurve(
        firings, neurons, groups.impacts / groups.sizes, fewest, float(np.interp(fewest, neurons, firings))
    )
