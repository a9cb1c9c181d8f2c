"""What this machine can do: sequential reading, the sparse kernel beside it, and a GPU's memory and bus.

Buffers are far larger than the caches, and the best of several passes counts, because whatever else happens on a machine
only ever takes speed away.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .kernels.native import MODES, address, extension, matrix
from .kernels.packed_matrix import PackedMatrix, allocate, fill, row_bytes
from .placed_ffn import NeuronTier

if TYPE_CHECKING:
    from types import ModuleType

    import torch

READ_BYTES = 2**30  # thirty times a large L3 cache
COLUMNS = 4096
PASS_SECONDS = 0.4  # of measuring per figure


@dataclass(frozen=True)
class SparseLayers:
    """The shape the sparse kernel is measured with: that of a 7B LLaMA, 270 MB of BF16 per layer."""

    hidden: int = 4096
    neurons: int = 11008
    layers: int = 6


LAYERS = SparseLayers()


def best_bytes_per_second(num_bytes: float, job: Callable[[], object], seconds: float | None = None) -> float:
    """The fastest of at least three runs of *job*, which reads *num_bytes*; the first run does not count."""
    job()
    best, runs, end = float("inf"), 0, time.perf_counter() + (PASS_SECONDS if seconds is None else seconds)
    while runs < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        job()
        best, runs = min(best, time.perf_counter() - began), runs + 1
    return num_bytes / best


class ReadBuffer:
    """A large float32 matrix that is read from beginning to end."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        rows, self.num_bytes = max(1, num_bytes // (4 * COLUMNS)), max(1, num_bytes // (4 * COLUMNS)) * 4 * COLUMNS
        data = allocate(rows, 4 * COLUMNS, torch.device("cpu"))
        self._matrix = PackedMatrix("float32", COLUMNS, data)
        self._matrix.values().fill_(1.0)  # memory that was never written to is one page of zeros
        self._x, self._y = torch.ones(COLUMNS), torch.empty(rows)

    def by_kernel(self, threads: int, seconds: float | None = None) -> float | None:
        """Bytes per second of a matrix–vector product of the native kernels; None without them."""
        module = extension()
        if module is None:
            return None
        kernels, weights = module.Kernels(threads), matrix(module, self._matrix)
        job = lambda: kernels.multiply(weights, address(self._x), 0, address(self._y))  # noqa: E731
        return best_bytes_per_second(self.num_bytes, job, seconds)

    def by_sum(self, threads: int, seconds: float | None = None) -> float:
        """Bytes per second of torch's sum."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return best_bytes_per_second(self.num_bytes, self._matrix.values().sum, seconds)
        finally:
            torch.set_num_threads(before)


class SparseKernel:
    """BF16 layers of gated neurons that all fire, of which a random share are candidates, others in every pass."""

    DRAWS = 4

    def __init__(self, size: SparseLayers) -> None:
        import torch

        self._size, self._row = size, row_bytes("bfloat16", size.hidden)
        self._module: ModuleType | None = extension()
        tile = torch.rand(size.neurons, size.hidden).add_(0.5)
        cpu = torch.device("cpu")
        self._tensors: list[Any] = []
        for _ in range(size.layers):
            first = fill(allocate(size.neurons, self._row, cpu), "bfloat16", tile)
            pairs = allocate(size.neurons, 2 * self._row, cpu)
            up, down = (fill(pairs[:, part], "bfloat16", tile) for part in (slice(self._row), slice(self._row, None)))
            self._tensors.append((first, up, down))
        self._x, self._y = torch.ones(size.hidden), torch.empty(size.hidden)

    def bytes_per_second(self, threads: int, density: float) -> float | None:
        """Of the rows of the candidates, which are all that is read; None without native kernels."""
        import torch

        if self._module is None:
            return None
        module, size = self._module, self._size
        kernels = module.Kernels(threads)
        neurons = [NeuronTier(first, up, down, None, "relu", 0.0).native(module) for first, up, down in self._tensors]
        count = max(1, round(density * size.neurons))
        scores = [_random_scores(size.neurons, count, seed) for seed in range(self.DRAWS * size.layers)]
        passes = 0

        def job() -> None:
            nonlocal passes
            for number, layer in enumerate(neurons):
                chosen = scores[(passes * size.layers + number) % len(scores)]
                kernels.sparse_ffn(
                    layer, MODES.index("predicted"), address(self._x), address(chosen), 0.5, address(self._y)
                )
            passes += 1

        speed = best_bytes_per_second(3 * self._row * count * size.layers, job)
        assert torch.isfinite(self._y).all(), "the measured kernel computes"
        return speed


def _random_scores(neurons: int, candidates: int, seed: int) -> "torch.Tensor":
    """1 for the candidates, 0 for the others."""
    import torch

    scores = torch.zeros(neurons)
    scores[torch.randperm(neurons, generator=torch.Generator().manual_seed(seed))[:candidates]] = 1.0
    return scores


@dataclass(frozen=True)
class GpuSpeed:
    name: str
    memory_bytes: int
    bytes_per_second: float
    pcie_bytes_per_second: float
    sync_seconds: float
    context_bytes: int


def measure_gpus() -> list[GpuSpeed]:
    """Every GPU that torch sees, one after the other."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [_measure_gpu(torch.device(f"cuda:{number}")) for number in range(count)]


def _measure_gpu(device: "torch.device") -> GpuSpeed:
    """A sum over its memory, copies from pinned memory, and one tiny kernel with the wait for it."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    one = torch.ones(1, device=device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    values = torch.ones(min(READ_BYTES, free_bytes // 4) // 4, device=device)
    pinned = torch.ones(min(READ_BYTES // 4, values.numel() * 4) // 4, pin_memory=True)
    target = values[: len(pinned)]

    def waiting(job: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            job()
            torch.cuda.synchronize(device)

        return run

    return GpuSpeed(
        name=properties.name,
        memory_bytes=properties.total_memory,
        bytes_per_second=best_bytes_per_second(values.nbytes, waiting(values.sum)),
        pcie_bytes_per_second=best_bytes_per_second(
            pinned.nbytes, waiting(lambda: target.copy_(pinned, non_blocking=True))
        ),
        sync_seconds=1 / best_bytes_per_second(1, waiting(lambda: one.add_(1))),
        context_bytes=total_bytes - free_bytes,
    )
