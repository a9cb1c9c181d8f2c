"""Cold neurons of a prompt on the GPU: their rows cross the bus tile by tile while the tile before is multiplied.

A CPU multiplies a prompt's tokens with every row; a bus carries each row once, however many tokens there are. So from some
number of tokens on the GPU has the answer sooner, although the rows are not its own. Which way a prompt goes is decided by
two speeds of this machine; the results agree up to rounding.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .kernels.packed_matrix import LINE, PackedMatrix

if TYPE_CHECKING:
    import torch

    from .overlap import SideStream
    from .placed_ffn import NeuronTier

TILE_BYTES = 2**24  # of one tile's rows; two of them wait on the host and two on the GPU
PROBE_TOKENS, PROBE_BYTES = 64, 2**26


@dataclass(frozen=True)
class PromptSpeeds:
    """``cpu_flops_per_second`` of products of packed rows with many tokens, ``bus_bytes_per_second`` from host memory that
    is not page-locked to the GPU, with the copy into page-locked memory."""

    cpu_flops_per_second: float
    bus_bytes_per_second: float

    def streaming_pays(self, tokens: int, weight_values: int, weight_bytes: int) -> bool:
        """Whether *weight_bytes* have crossed the bus before the CPU has multiplied them with *tokens* vectors."""
        on_cpu = 2.0 * weight_values * tokens / self.cpu_flops_per_second
        return weight_bytes / self.bus_bytes_per_second < on_cpu


@dataclass(eq=False)
class PromptStream:
    """Two buffers on each side of the bus, in turns; one object for all layers of a GPU. ``speeds`` None: measured when the
    first prompt asks."""

    side: "SideStream"
    device: "torch.device"
    speeds: PromptSpeeds | None = None
    _host: "list[torch.Tensor]" = field(default_factory=list)
    _device: "list[torch.Tensor]" = field(default_factory=list)
    _copied: "list[Callable[[], None] | None]" = field(default_factory=lambda: [None, None])

    def pays(self, tokens: int, cold: "NeuronTier") -> bool:
        """Whether *cold* is better multiplied on the GPU, for a prompt of so many tokens."""
        if self.speeds is None:
            self.speeds = self._measure(cold)
        values = sum(part.rows * part.columns for part in _matrices(cold))
        return self.speeds.streaming_pays(tokens, values, len(cold) * _neuron_bytes(cold))

    def __call__(
        self, cold: "NeuronTier", x: "torch.Tensor", scores: "torch.Tensor | None", threshold: float
    ) -> "torch.Tensor":
        """What *cold* adds, float32 [tokens, hidden] on the GPU, from *x* [tokens, hidden] and *scores* [tokens, k] there.

        The side stream carries a tile while the main stream multiplies the one before. Before it overwrites a buffer of the
        GPU it waits for the products of that buffer, which the main stream holds by then; before the host overwrites its own
        it waits for the copy out of it.
        """
        import torch

        output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        waiting: tuple[slice, NeuronTier] | None = None
        for number, rows in enumerate(_tiles(cold)):
            tile = self._staged(cold, rows, number % 2)
            if waiting:
                self.side.join()  # for the tile before, and not for the one that is queued now
            self.side.fork()
            carried = self._carry(tile, number % 2)
            if waiting:
                output += self._products(waiting, x, scores, threshold)
            waiting = rows, carried
        assert waiting is not None, "a tier has at least one neuron"
        self.side.join()
        return output + self._products(waiting, x, scores, threshold)

    def _products(
        self,
        waiting: "tuple[slice, NeuronTier]",
        x: "torch.Tensor",
        scores: "torch.Tensor | None",
        threshold: float,
    ) -> "torch.Tensor":
        rows, tile = waiting
        return tile.whole_products(x, None if scores is None else scores[:, rows], threshold)

    def _staged(self, cold: "NeuronTier", rows: slice, turn: int) -> "NeuronTier":
        """These neurons in a buffer of the host from which copies need no help of the CPU."""
        if wait := self._copied[turn]:
            wait()
        buffer, _ = self._buffers(turn)
        return _moved(_part(cold, rows), buffer, lambda target, source: target.copy_(source))

    def _carry(self, tile: "NeuronTier", turn: int) -> "NeuronTier":
        """Queue the copies of a staged tile; the neurons as they will be on the GPU."""
        carried = _moved(tile, self._buffers(turn)[1], self.side.copy)
        self._copied[turn] = self.side.mark()
        return carried

    def _buffers(self, turn: int) -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

        if not self._host:
            size = TILE_BYTES + 4 * LINE  # and the gaps between a tile's tensors
            for _ in range(2):
                self._host.append(torch.empty(size, dtype=torch.uint8, pin_memory=self.side.pinned))
                self._device.append(torch.empty(size, dtype=torch.uint8, device=self.device))
        return self._host[turn], self._device[turn]

    def _measure(self, cold: "NeuronTier") -> PromptSpeeds:
        """Both speeds with a part of *cold*, the best of two runs each; a fraction of a second."""
        import torch

        some = _part(cold, slice(0, max(1, PROBE_BYTES // _neuron_bytes(cold))))
        x = torch.ones(PROBE_TOKENS, cold.first.columns)
        flops = 2.0 * PROBE_TOKENS * sum(part.rows * part.columns for part in _matrices(some))
        num_bytes = len(some) * _neuron_bytes(cold)

        def carry() -> None:
            for number, rows in enumerate(_tiles(some)):
                tile = self._staged(some, rows, number % 2)
                self.side.fork()  # the buffers' memory may be that of tensors which queued kernels still use
                self._carry(tile, number % 2)
            for wait in self._copied:
                if wait:
                    wait()

        return PromptSpeeds(
            cpu_flops_per_second=flops / _best_seconds(lambda: some(x, "dense", None, 0.0)),
            bus_bytes_per_second=num_bytes / _best_seconds(carry),
        )


def _best_seconds(job: Callable[[], object]) -> float:
    """Of two runs after one that does not count."""
    job()
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - began)
    return max(min(seconds), 1e-9)


def _matrices(neurons: "NeuronTier") -> list[PackedMatrix]:
    return [part for part in (neurons.first, neurons.up, neurons.down) if part is not None]


def _moved(
    neurons: "NeuronTier", buffer: "torch.Tensor", copy: "Callable[[torch.Tensor, torch.Tensor], object]"
) -> "NeuronTier":
    """The same neurons in *buffer*, uint8, to which *copy* brings or queues their bytes."""
    import torch

    used = 0

    def place(source: "torch.Tensor") -> "torch.Tensor":
        nonlocal used
        target = buffer[used : used + source.numel()].view(source.shape)
        copy(target, source)
        used += -(-source.numel() // LINE) * LINE  # rows begin on whole lines
        return target

    first, up, down = (
        None if part is None else PackedMatrix(part.kind, part.columns, place(part.data))
        for part in (neurons.first, neurons.up, neurons.down)
    )
    bias = None if neurons.up_bias is None else place(neurons.up_bias.view(torch.uint8)).view(torch.float32)
    assert first is not None and down is not None, "every neuron has these rows"
    return replace(neurons, first=first, up=up, down=down, up_bias=bias)


def _neuron_bytes(neurons: "NeuronTier") -> int:
    return sum(part.data.shape[1] for part in _matrices(neurons)) + (0 if neurons.up_bias is None else 4)


def _part(neurons: "NeuronTier", rows: slice) -> "NeuronTier":
    first, down = (PackedMatrix(p.kind, p.columns, p.data[rows]) for p in (neurons.first, neurons.down))
    up = None if neurons.up is None else PackedMatrix(neurons.up.kind, neurons.up.columns, neurons.up.data[rows])
    bias = None if neurons.up_bias is None else neurons.up_bias[rows]
    return replace(neurons, first=first, up=up, down=down, up_bias=bias)


def _tiles(neurons: "NeuronTier") -> "Iterator[slice]":
    step = max(1, TILE_BYTES // _neuron_bytes(neurons))
    return (slice(first, min(first + step, len(neurons))) for first in range(0, len(neurons), step))
