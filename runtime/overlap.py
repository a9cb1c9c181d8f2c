"""Hot and cold neurons of one layer at the same time: the GPU computes its part while the CPU computes the other.

    main stream   … x, scores ─┬─ hot part ──────────────────────┬─ sum …
    side stream                └─ x, scores to the host ─ cold part ─ its sums back ─┘

The side stream begins when the layer's input is there and is waited for only by the sum, so the copies and the CPU hide
behind the hot part. In the eager path the host waits for the copy out and computes; while a graph is captured the cold
part becomes a node of the graph (see :mod:`.host_function`) and the host waits for nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pi_toolkit.profiler.errors import HostFunctionError

from .host_function import HostFunctions, driver
from .kernels.native import MODES, address, extension, kernels
from .kernels.sparse_ffn_reference import Mode
from .prompt_streaming import PromptStream

if TYPE_CHECKING:
    import torch

    from .placed_ffn import NeuronTier


# For fewer, a CPU reads its rows and little else, and memory is faster than a bus.
FEWEST_STREAMED_TOKENS = 16


class SideStream(Protocol):
    """A stream beside the one that the model's layers are queued on."""

    pinned: bool  # whether host buffers have to be page-locked for its copies

    @property
    def captures(self) -> bool:
        """Whether a call can become a node of a graph."""

    def fork(self) -> None:
        """What is queued here next comes after all that the main stream holds now."""

    def copy(self, target: "torch.Tensor", source: "torch.Tensor") -> None:
        """Queue a copy between device and host."""

    def call(self, part: "ColdPart") -> None:
        """Compute *part* on the host after what is queued here, before what is queued next."""

    def join(self) -> None:
        """What the main stream is given next comes after all that is queued here."""

    def mark(self) -> Callable[[], None]:
        """A call lets the host wait for what is queued here now."""

    def take_captured(self) -> list[object]:
        """What the graph captured since the last call points to; whoever keeps the graph keeps these."""


@dataclass(frozen=True, eq=False)
class ColdPart:
    """The FFN of the neurons in *tier*, on the CPU, between fixed host buffers: ``x`` and ``partial`` float32 [tokens,
    hidden], ``scores`` float32 [tokens, neurons of the tier] in mode predicted."""

    tier: "NeuronTier"
    mode: Mode
    threshold: float
    x: "torch.Tensor"
    scores: "torch.Tensor | None"
    partial: "torch.Tensor"

    def __call__(self) -> None:
        self.partial.copy_(self.tier(self.x, self.mode, self.scores, self.threshold))

    def native(self) -> Any:
        """The same as a C function with its data, or None without native kernels; valid while this object and the result
        live."""
        import torch

        module, made = extension(), kernels(torch.get_num_threads())
        if module is None or made is None:
            return None
        neurons = self.tier.native(module)
        buffers = address(self.x), address(self.scores), self.threshold, address(self.partial), len(self.x)
        return made.host_task(neurons, MODES.index(self.mode), *buffers)


@dataclass(eq=False)
class Overlap:
    """Runs the cold part of a layer beside the rest. One for all layers of a GPU: they take turns with its buffers.

    With a ``stream``, the cold neurons of long prompts may be multiplied on the GPU too.
    """

    side: SideStream
    stream: PromptStream | None = None
    _buffers: "dict[str, torch.Tensor]" = field(default_factory=dict)

    def __call__(
        self,
        hot: "Callable[[], torch.Tensor | None]",
        cold: "NeuronTier",
        x: "torch.Tensor",
        scores: "torch.Tensor | None",
        mode: Mode,
        threshold: float,
    ) -> "torch.Tensor":
        """The sum of what *hot* returns and what *cold* adds: float32 [tokens, hidden] on the device of *x*.

        *x* [tokens, hidden] and *scores* [tokens, neurons of *cold*] are on the device; *hot* queues its work on the main
        stream and may have nothing to add.
        """
        import torch

        if self.stream and len(x) >= FEWEST_STREAMED_TOKENS and self.stream.pays(len(x), cold):
            beside, streamed = hot(), self.stream(cold, x, scores, threshold)
            return streamed if beside is None else beside + streamed
        part = ColdPart(
            cold,
            mode,
            threshold,
            x=self._host("x", x.shape),
            scores=None if scores is None else self._host("scores", scores.shape),
            partial=self._host("partial", x.shape),
        )
        returned = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        self.side.fork()
        self.side.copy(part.x, x)
        if part.scores is not None and scores is not None:
            self.side.copy(part.scores, scores)
        beside = hot()
        self.side.call(part)
        self.side.copy(returned, part.partial)
        self.side.join()
        return returned if beside is None else beside + returned

    def _host(self, name: str, shape: "torch.Size") -> "torch.Tensor":
        """A float32 host buffer of *shape*, the start of one that only grows."""
        import torch

        size = shape.numel()
        if name not in self._buffers or self._buffers[name].numel() < size:
            # A graph keeps the buffers it was captured with; a larger one does not take them away.
            self._buffers[name] = torch.empty(size, dtype=torch.float32, pin_memory=self.side.pinned)
        return self._buffers[name][:size].view(shape)


def overlap_on(device: "torch.device") -> Overlap:
    """The overlap of one GPU's layers."""
    import torch

    side = GpuSideStream(device, driver(is_hip=torch.version.hip is not None))
    return Overlap(side, PromptStream(side, device))


class GpuSideStream:
    """A second stream of a CUDA or ROCm device."""

    pinned = True

    def __init__(self, device: "torch.device", host_functions: HostFunctions | None) -> None:
        import torch

        self.device, self.host_functions = device, host_functions
        self.stream = torch.cuda.Stream(device)
        self._captured: list[object] = []

    @property
    def captures(self) -> bool:
        return self.host_functions is not None and extension() is not None

    def fork(self) -> None:
        import torch

        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def copy(self, target: "torch.Tensor", source: "torch.Tensor") -> None:
        import torch

        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def call(self, part: ColdPart) -> None:
        import torch

        if not torch.cuda.is_current_stream_capturing():
            self.stream.synchronize()  # for the copies out; the hot part goes on
            return part()
        task = part.native()
        if task is None or self.host_functions is None:
            raise HostFunctionError("the cold part cannot be a node of a graph without native kernels and a driver")
        self._captured += [part, task]
        self.host_functions.launch(self.stream.cuda_stream, task.function, task.data)
        return None

    def join(self) -> None:
        import torch

        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def mark(self) -> Callable[[], None]:
        return self.stream.record_event().synchronize

    def take_captured(self) -> list[object]:
        captured, self._captured = self._captured, []
        return captured
