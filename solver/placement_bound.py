"""An upper bound on what any placement can reach, computed without the integer program's solver.

Price the GPUs' memory at t firings per byte. Whatever t ≥ 0 is, no placement is worth more than

    t · room + Σ_l max(0, best firings of layer l minus t times its bytes, given none or at least C_l neurons)

and the inner maximum is easy, because bundles are sorted: all that are worth their price, or, when these are fewer than
C_l neurons, the hottest C_l. The bound is convex in t, so bisection on its slope finds the best price. (It
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
    """Firings and bytes of the hottest bundles, from none to all, and both at C_l (a fraction of a bundle allowed)."""

    firings: np.ndarray
    num_bytes: np.ndarray
    density: np.ndarray
    fewest_bytes: float
    firings_at_fewest: float

    def best(self, price: float) -> tuple[float, float]:
        """Largest firings − price · bytes, and the bytes that reach it."""
        worth_it = int(np.searchsorted(-self.density, -price))
        firings, num_bytes = float(self.firings[worth_it]), float(self.num_bytes[worth_it])
        if num_bytes < self.fewest_bytes:
            firings, num_bytes = self.firings_at_fewest, self.fewest_bytes
        gain = firings - price * num_bytes
        return (gain, num_bytes) if gain > 0 else (0.0, 0.0)


def upper_bound(problem: PlacementProblem) -> int | float:
    """No feasible choice has a larger :meth:`PlacementProblem.value`; an int where all impacts are."""
    pooled = problem.pooled()
    curves = [_curve(pooled, layer) for layer in pooled.open_layers()]
    cheap, dear = 0.0, 2 * max((float(curve.density[0]) for curve in curves), default=0.0) + 1e-300
    bound = math.inf
    for _ in range(_BISECTIONS):
        price = (cheap + dear) / 2
        best = [curve.best(price) for curve in curves]
        bound = min(bound, price * pooled.room + sum(gain for gain, _ in best))
        if sum(num_bytes for _, num_bytes in best) > pooled.room:
            cheap = price
        else:
            dear = price
    bound = (bound + problem.pinned_impact) * (1 + _ROUNDING)
    return math.floor(bound) if all(bundles.impacts.dtype.kind == "i" for bundles in problem.layers) else bound


def _curve(problem: PlacementProblem, layer: int) -> _LayerCurve:
    bundles = problem.layers[layer]
    firings = np.concatenate([[0.0], bundles.impacts.cumsum(dtype=np.float64)])
    num_bytes = np.concatenate([[0.0], bundles.num_bytes.cumsum(dtype=np.float64)])
    fewest = float(problem.threshold_bytes(layer))
    density = bundles.impacts / bundles.num_bytes
    return _LayerCurve(firings, num_bytes, density, fewest, float(np.interp(fewest, num_bytes, firings)))
