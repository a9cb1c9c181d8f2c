"""Captured graphs of decoding steps: hundreds of launches of a token become one.

A step is run eagerly the first time, which compiles its kernels and allocates its buffers, captured the second time and
replayed from then on. Where the driver refuses to capture, all steps go on eagerly, and that is said once.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
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
                note(f"the driver does not capture the step in a graph, so every step is launched anew: {error}")
                return step()
        graph.graph.replay()
        return graph.output

    def _capture(self, step: "Callable[[], torch.Tensor]") -> StepGraph:
        """Capturing computes nothing; all graphs share one pool of memory, since only one runs at a time."""
        import torch

        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        # Other threads may go on using the GPU while this one captures.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            output = step()
        return StepGraph(graph, output, self.side.take_captured() if self.side else [])
