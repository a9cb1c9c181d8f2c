"""Captured graphs of decoding steps: hundreds of launches of a token become one.

A step is run eagerly the first time, which compiles its kernels and allocates its buffers, captured the second time and
replayed from then on. Where the driver refuses to capture, all steps go on eagerly, and that is said once.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pi_toolkit.profiler.command_line import note
from pi_toolkit.profiler.errors import HostFunctionError

from .overlap import SideStream

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A graph, where its result lies, and what its nodes point to."""

    graph: Any
    output: "torch.Tensor"
    keep_alive: list[object]


class StepGraphs:
    """Graphs by key. Two steps of the same key read the same tensors and compute the same."""

    def __init__(self, device: "torch.device", side: SideStream | None) -> None:
        self.device, self.side = device, side
        self.refused = False
        self._graphs: dict[Hashable, StepGraph | None] = {}
        self._memory: Any = None

    def run(self, key: Hashable, step: "Callable[[], torch.Tensor]") -> "torch.Tensor":
        """The result of *step*, by its graph where there is one."""
        if self.refused:
            return step()
        if key not in self._graphs:
            self._graphs[key] = None
            return step()
        graph = self._graphs[key]
        if graph is None:
            try:
                graph = self._graphs[key] = self._capture(step)
            except (RuntimeError, HostFunctionError) as error:
                self.refused = True
                if self.side:
                    self.side.take_captured()
                # The end of a capture complains as well, of what has happened inside.
                reason = str(error.__context__ or error).splitlines()[0]
                note(f"the driver does not capture the step in a graph, so every step is launched anew: {reason}")
                return step()
        graph.graph.replay()
        return graph.output

    def _capture(self, step: "Callable[[], torch.Tensor]") -> StepGraph:
        """Capturing computes nothing; all graphs share one pool of memory, since only one runs at a time."""
        import torch

        torch.cuda.synchronize(self.device)
        graph, stream = torch.cuda.CUDAGraph(), capture_stream(self.device)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        # A capture that fails leaves its stream the current one, and the outer block ends that. Other threads may go on
        # using the GPU while this one captures.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self.device)),
            torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"),
        ):
            output = step()
        return StepGraph(graph, output, self.side.take_captured() if self.side else [])


@cache
def capture_stream(device: "torch.device") -> Any:
    """The stream that steps on *device* are captured on. Torch's own is of the device that was current when it was first
    asked for, and captures nothing of another; one of each decoder would leave a workspace of cuBLAS behind."""
    import torch

    return torch.cuda.Stream(device)
