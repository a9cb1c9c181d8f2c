"""A lower bound on the time of a token under any placement, computed without a solver of programs.

The GPUs are taken together: their memory as one, attention, predictors and head at the speed of the fastest, the neurons
of a layer at the speed of all. Price that memory at π seconds per byte. Whatever π is, no placement is quicker than

    Σ_l min over layer l of (time + π · its GPU bytes)  +  min over the head  −  π · room

with the room of the GPUs for π ≥ 0, and for π < 0 the bytes that the CPU has no memory for. The minimum over a layer is
that of three cases: all of it on the CPU; all on GPUs; divided, at the cost of a synchronisation. In the last the hottest
bundles are on GPUs, as many as are worth their price, at least C_l, a fraction of a bundle allowed, and none beyond
those that make the GPUs' part as long as the CPU's. The bound is concave in π, so bisection on its slope finds the best
price. (It is the Lagrangian dual of the program in :mod:`.latency_program`.)
"""

import math
from dataclasses import dataclass

import numpy as np

from .latency_problem import LatencyProblem

_BISECTIONS = 80
_ROUNDING = 1e-12


@dataclass(frozen=True)
class LayerOption:
    """What a layer would do at a price: bytes on GPUs, of them bundles', and the units that are there."""

    cost: float
    gpu_bytes: float
    bundle_bytes: float
    attention: bool
    predictor: bool


@dataclass(frozen=True)
class Dual:
    """The bound in seconds, and what the layers and the head do at a price at which the GPUs' memory suffices."""

    seconds: float
    layers: list[LayerOption]
    head: bool


@dataclass(frozen=True)
class _Layer:
    """``bytes_at``, ``reads_at``: bytes and expected reads of the first bundles, from none to all; ``saving``: seconds per
    byte that moving each bundle takes off the CPU's part."""

    attention: int
    predictor: int
    bytes_at: np.ndarray
    reads_at: np.ndarray
    saving: np.ndarray
    balanced_bytes: float
    balanced_seconds: float
    fewest_bytes: float
    pinned_bytes: float | None
    closed: bool

    def option(self, price: float, cpu: float, gpu: float, sync_seconds: float) -> LayerOption:
        reads, all_bytes = self.reads_at[-1], self.bytes_at[-1]
        dense = self.attention + self.predictor
        options = []
        if not self.pinned_bytes:
            options.append(LayerOption((dense + reads) * cpu, 0.0, 0.0, False, False))
        if not self.closed and (self.pinned_bytes is None or self.pinned_bytes == all_bytes):
            whole = dense + all_bytes
            options.append(
                LayerOption((dense + reads) * gpu + price * whole, whole, all_bytes, True, self.predictor > 0)
            )
        dense_pays = gpu + price < cpu
        seconds, bundle_bytes = self._divided(price, cpu)
        gpu_bytes = bundle_bytes + (dense if dense_pays else 0)
        cost = sync_seconds + seconds + price * bundle_bytes + dense * (min(cpu, gpu + price))
        options.append(LayerOption(cost, gpu_bytes, bundle_bytes, dense_pays, dense_pays and self.predictor > 0))
        return min(options, key=lambda option: option.cost)

    def _divided(self, price: float, cpu: float) -> tuple[float, float]:
        """Seconds and GPU bytes of the neurons of a layer that is divided."""
        if self.pinned_bytes is not None:
            return self._seconds(self.pinned_bytes, cpu), self.pinned_bytes
        if self.closed:
            return self._seconds(0.0, cpu), 0.0
        if price < 0:
            wanted = float(self.bytes_at[-1])
        else:
            wanted = min(float(self.bytes_at[np.searchsorted(-self.saving, -price)]), self.balanced_bytes)
        wanted = max(wanted, self.fewest_bytes)
        some, none = self._seconds(wanted, cpu), self._seconds(0.0, cpu)
        return (some, wanted) if some + price * wanted < none else (none, 0.0)

    def _seconds(self, bundle_bytes: float, cpu: float) -> float:
        """Of the neurons, with the hottest *bundle_bytes* on GPUs, or fewer reads there, if that is quicker."""
        on_cpu = self.reads_at[-1] - float(np.interp(bundle_bytes, self.bytes_at, self.reads_at))
        return max(on_cpu * cpu, self.balanced_seconds)


def lower_bound(problem: LatencyProblem) -> Dual:
    """No feasible answer has fewer :meth:`LatencyProblem.seconds`."""
    prices = problem.seconds_per_byte
    cpu, gpus = float(prices[-1]), prices[:-1]
    gpu = float(gpus.min()) if len(gpus) else math.inf
    together = 1.0 / float((1.0 / gpus).sum()) if len(gpus) else math.inf
    layers = [_layer(problem, layer, cpu, together) for layer in range(len(problem.layers))]
    room, needed = sum(problem.gpu_bytes), problem.fewest_gpu_bytes
    overhead = problem.speeds.overhead_seconds_per_layer * len(layers)

    def at(price: float) -> tuple[float, float, list[LayerOption], bool]:
        options = [layer.option(price, cpu, gpu, problem.speeds.sync_seconds) for layer in layers]
        head_bytes = problem.units.head if price >= 0 else problem.head_cpu_bytes
        on_cpu, on_gpu = problem.units.head * cpu, problem.units.head * gpu + price * head_bytes
        used = sum(option.gpu_bytes for option in options) + (head_bytes if on_gpu < on_cpu else 0)
        bound = sum(option.cost for option in options) + min(on_cpu, on_gpu)
        return bound - price * (room if price >= 0 else needed), used, options, on_gpu < on_cpu

    if not len(gpus):
        on_cpu = [
            LayerOption((layer.attention + layer.predictor + layer.reads_at[-1]) * cpu, 0.0, 0.0, False, False)
            for layer in layers
        ]
        seconds = sum(option.cost for option in on_cpu) + problem.units.head * cpu + overhead
        return Dual(seconds * (1 - _ROUNDING), on_cpu, False)

    best, used, options, head = at(0.0)
    if needed > used:  # the CPU's memory decides: π below 0
        low, high = -4 * (cpu + gpu) - 4 * problem.speeds.sync_seconds, 0.0
    elif used > room:
        low, high = 0.0, 4 * (cpu + gpu) + 4 * problem.speeds.sync_seconds
    else:
        low = high = 0.0
    for _ in range(_BISECTIONS if low < high else 0):
        price = (low + high) / 2
        bound, used, tried, tried_head = at(price)
        best = max(best, bound)
        if used > (room if price >= 0 else needed):
            low = price
            options, head = (tried, tried_head) if price < 0 else (options, head)
        else:
            high = price
            options, head = (tried, tried_head) if price >= 0 else (options, head)
    return Dual((best + overhead) * (1 - _ROUNDING), options, head)


def _layer(problem: LatencyProblem, layer: int, cpu: float, together: float) -> _Layer:
    bundles, pin = problem.layers[layer], problem.neurons.pins[layer]
    bytes_at = np.concatenate([[0.0], bundles.num_bytes.cumsum(dtype=np.float64)])
    reads_at = np.concatenate([[0.0], bundles.read_bytes.cumsum(dtype=np.float64)])
    balanced_reads = reads_at[-1] * cpu / (cpu + together) if math.isfinite(together) else 0.0
    return _Layer(
        attention=problem.units.attention[layer],
        predictor=problem.units.predictor[layer],
        bytes_at=bytes_at,
        reads_at=reads_at,
        saving=bundles.read_bytes / bundles.num_bytes * cpu,
        balanced_bytes=float(np.interp(balanced_reads, reads_at, bytes_at)),
        balanced_seconds=(reads_at[-1] - balanced_reads) * cpu,
        fewest_bytes=float(problem.neurons.threshold_bytes(layer)),
        pinned_bytes=None if pin is None else float(bytes_at[pin]),
        closed=not problem.open_to_gpu(layer),
    )
