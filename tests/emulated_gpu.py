"""A GPU that is not there, for tests of everything the product does with one: streams, events, graphs, memory.

Tensors say that they are on "cuda:0", and what is computed with them is queued on streams and computed later, on the CPU.
When is up to a schedule as hostile as a real GPU may be: one stream as late, another as early as the events between them
allow. Memory that is given back is handed out again at once, as torch's allocator does, whatever is still queued. So a copy
or a sum that nobody waited for becomes a wrong number. A captured graph keeps the calls of its streams and plays them back
with the same freedom; what a capture may not contain is refused.

Triton's kernels and attention are replaced by the reference. Neurons are in float32.
"""

import contextlib
import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from pi_toolkit.runtime import gpu_step, overlap, placed_ffn
from pi_toolkit.runtime.kernels import native
from pi_toolkit.runtime.kernels.packed_matrix import PackedMatrix
from pi_toolkit.runtime.step_graphs import capture_stream

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
Schedule = Literal["late", "main first", "side first", "random"]
SCHEDULES = get_args(Schedule)
REFUSED = "CUDA error: operation not permitted when stream is capturing"
UNCOPIED = 255  # bytes of NaN in memory that nobody has written to


@dataclass(eq=False)
class Mark:
    """What an event holds: a place in a stream's queue. ``done``: whether the stream has come past it."""

    stream: "Stream"
    graph: "Graph | None"
    done: bool = False


@dataclass(frozen=True, eq=False)
class Call:
    """Something queued: work, a mark to be passed, or a mark to be waited for."""

    work: Callable[[], object] | None = None
    passed: Mark | None = None
    awaited: Mark | None = None


@dataclass(eq=False)
class Queues:
    """Calls by stream, in the order in which each stream got them; ``gpu`` or a graph at work."""

    schedule: Schedule
    chance: random.Random
    calls: "dict[Stream, deque[Call]]" = field(default_factory=dict)

    def add(self, stream: "Stream", call: Call) -> None:
        self.calls.setdefault(stream, deque()).append(call)

    def step(self, stream: "Stream") -> bool:
        """Do the stream's next call, unless it has none or one that has to wait."""
        queue = self.calls.get(stream)
        if not queue or (queue[0].awaited and not queue[0].awaited.done):
            return False
        call = queue.popleft()
        if call.work:
            call.work()
        if call.passed:
            call.passed.done = True
        return True

    def drain(self, stream: "Stream", until: Mark | None = None) -> None:
        """All of a stream's calls, or those before a mark, and of the others only what they wait for."""
        queue = self.calls.get(stream, deque())
        while queue and not (until and until.done):
            if not self.step(stream):
                awaited = queue[0].awaited
                assert awaited is not None
                self.drain(awaited.stream, awaited)

    def run_ahead(self) -> None:
        """What the schedule does unasked."""
        if self.schedule == "random":
            for _ in range(self.chance.randrange(4)):
                self.step(self.chance.choice(list(self.calls)))
        for stream in list(self.calls):
            first = {"main first": stream.is_main, "side first": not stream.is_main}.get(self.schedule, False)
            while first and self.step(stream):
                pass

    def finish(self) -> None:
        """Everything, in the order of the schedule: streams that go first as far as they can before each call of another."""
        while any(self.calls.values()):
            self.run_ahead()
            order = list(self.calls)
            if self.schedule == "random":
                self.chance.shuffle(order)
            else:
                order.sort(key=lambda stream: stream.is_main == (self.schedule == "side first"))
            done = any(self.step(stream) for stream in order)
            assert done or not any(self.calls.values()), "no call can be done: streams wait for one another"


class Stream:
    """Of :class:`torch.cuda.Stream` what the product uses."""

    def __init__(self, gpu: "EmulatedGpu", is_main: bool = False) -> None:
        self.gpu, self.is_main, self.device = gpu, is_main, GPU
        self.graph: Graph | None = None  # that is captured on this stream now
        self.cuda_stream = gpu.number(self)

    def record_event(self) -> "Event":
        mark = Mark(self, self.graph)
        self.gpu.queue(Call(passed=mark), self)
        return Event(mark)

    def wait_event(self, event: "Event") -> None:
        mark = event.mark
        if mark.graph and mark.graph.capturing and self.graph is None:
            self.graph = mark.graph  # which makes this a stream of the capture
            self.graph.streams.append(self)
        if self.graph is not None and mark.graph is not self.graph:
            raise self.graph.refusal("dependency created on uncaptured work in another stream")
        self.gpu.queue(Call(awaited=mark), self)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        if self.graph is not None:
            raise self.graph.refusal(REFUSED)
        self.gpu.queues.drain(self)


@dataclass(frozen=True)
class Event:
    mark: Mark

    def synchronize(self) -> None:
        if self.mark.graph and self.mark.graph.capturing:
            raise self.mark.graph.refusal("operation not permitted on an event last recorded in a capturing stream")
        self.mark.stream.gpu.queues.drain(self.mark.stream, self.mark)


class Graph:
    """Of :class:`torch.cuda.CUDAGraph` what the product uses."""

    def __init__(self, gpu: "EmulatedGpu") -> None:
        self.gpu, self.pool = gpu, "of a graph"
        self.calls: list[tuple[Stream, Call]] = []
        self.streams: list[Stream] = []
        self.capturing = self.invalid = False

    def refusal(self, message: str) -> RuntimeError:
        self.invalid = True
        return RuntimeError(message)

    @contextlib.contextmanager
    def capture(self, stream: Stream) -> Iterator[None]:
        self.gpu.synchronize()
        before, self.gpu.current = self.gpu.current, stream
        stream.graph, self.streams, self.capturing = self, [stream], True
        try:
            yield
        finally:
            joined = self._joined(stream)
            for member in self.streams:
                member.graph = None
            self.capturing = False
            if self.invalid or not joined:  # and, as torch does, leave the stream the current one
                raise RuntimeError("capture was invalidated" if self.invalid else "unjoined work")
            self.gpu.current = before

    def _joined(self, origin: Stream) -> bool:
        """Whether the origin has waited for the last call of every stream."""
        reached: dict[Stream, dict[Stream, int]] = {stream: {} for stream in self.streams}
        marks: dict[Mark, dict[Stream, int]] = {}
        for number, (stream, call) in enumerate(self.calls):
            mine = reached[stream]
            if call.awaited:
                for other, seen in marks[call.awaited].items():
                    mine[other] = max(mine.get(other, -1), seen)
            if call.work or call.awaited:
                mine[stream] = number
            if call.passed:
                marks[call.passed] = dict(mine)
        return all(reached[origin].get(other, -1) == reached[other].get(other, -1) for other in self.streams)

    def replay(self) -> None:
        assert not self.capturing
        self.gpu.queue(Call(self._run))

    def _run(self) -> None:
        queues = Queues(self.gpu.queues.schedule, self.gpu.queues.chance)
        marks = {call.passed: Mark(stream, None) for stream, call in self.calls if call.passed}
        for stream, call in self.calls:
            passed, awaited = (None if mark is None else marks[mark] for mark in (call.passed, call.awaited))
            queues.add(stream, Call(call.work, passed, awaited))
        queues.finish()


class Lease:
    """A piece of the GPU's memory, shared by all views of a tensor. When the last is gone it goes to whoever asks next on the
    stream or in the graph that it was taken on, and nobody asks whether queued calls still use it."""

    def __init__(self, gpu: "EmulatedGpu", num_bytes: int) -> None:
        size = max(512, 1 << (num_bytes - 1).bit_length()) if num_bytes else 512
        owner = gpu.current.graph.pool if gpu.current.graph else gpu.current
        self._free = gpu.free.setdefault((owner, size), [])
        self.bytes = self._free.pop() if self._free else torch.full((size,), UNCOPIED, dtype=torch.uint8)

    def __del__(self) -> None:
        self._free.append(self.bytes)


class GpuTensor(torch.Tensor):
    """Says that it is on the GPU; ``inside`` is its memory, which only queued calls may look at."""

    inside: torch.Tensor
    lease: Lease
    gpu: "EmulatedGpu"

    @staticmethod
    def __new__(cls, gpu: "EmulatedGpu", inside: torch.Tensor, lease: Lease) -> "GpuTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            device=GPU,
        )
        made.inside, made.lease, made.gpu = inside, lease, gpu
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Indices, copies and numbers, which torch handles by ways that want a real GPU."""
        kwargs = kwargs or {}
        gpu = next(a.gpu for a in tree_flatten((args, kwargs))[0] if isinstance(a, GpuTensor))
        if func is torch.Tensor.__getitem__:
            return gpu.indexed(*args)
        if func is torch.Tensor.__setitem__:
            return gpu.assign(*args)
        if func is torch.Tensor.copy_:
            return gpu.copy(*args, **kwargs)
        if func in (torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__bool__):
            return func(gpu.fetched(args[0]))
        if func is torch.Tensor.__invert__:
            return torch.bitwise_not(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = next(a.gpu for a in tree_flatten((args, kwargs))[0] if isinstance(a, GpuTensor))
        return gpu.__torch_dispatch__(func, types, args, kwargs)


class EmulatedGpu(TorchDispatchMode):
    """The GPU; a context in which torch has one. Use :func:`emulated_gpu`."""

    def __init__(self, schedule: Schedule, seed: int = 0) -> None:
        super().__init__()
        self.queues = Queues(schedule, random.Random(seed))
        self.free: dict[Any, list[torch.Tensor]] = {}
        self.pinned: dict[int, torch.Tensor] = {}  # by address, and kept, so that no address comes twice
        self.handles: list[Stream] = []
        self.calls = {"graphs": 0, "host functions": 0}
        self.main = self.current = Stream(self, is_main=True)

    def number(self, stream: Stream) -> int:
        self.handles.append(stream)
        return len(self.handles)

    # Streams

    def queue(self, call: Call, stream: Stream | None = None) -> None:
        stream = stream or self.current
        if stream.graph is not None:
            stream.graph.calls.append((stream, call))
            return
        assert not (call.work and self.current.graph), "work that a capture leaves out is done once and never replayed"
        self.queues.add(stream, call)
        self.queues.run_ahead()

    def synchronize(self, _device: Any = None) -> None:
        if self.current.graph:
            raise self.current.graph.refusal(REFUSED)
        for stream in list(self.queues.calls):
            self.queues.drain(stream)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph(self, graph: Graph, stream: Stream | None = None, **_: Any) -> Any:
        assert stream is not None, "torch's own stream is of the GPU that was current when the first graph was captured"
        stream.is_main = True
        self.calls["graphs"] += 1
        return graph.capture(stream)

    def launch_host_function(self, handle: int, function: int, data: int) -> None:
        self.calls["host functions"] += 1
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self.queue(Call(lambda: call(data)), self.handles[handle - 1])

    # Tensors

    def allocated(self, like: torch.Tensor) -> GpuTensor:
        """Of the shape, strides and type of *like*."""
        extent = sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True)) + 1
        num_bytes = extent * like.dtype.itemsize if like.numel() else 0
        with _plain():
            lease = Lease(self, num_bytes)
            inside = lease.bytes[:num_bytes].view(like.dtype).as_strided(like.shape, like.stride())
        return GpuTensor(self, inside, lease)

    def kernel(self, compute: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What *compute* makes of the arguments, queued; shapes are found without numbers."""
        meta = tree_map_only(GpuTensor, lambda a: a.inside.to("meta"), (arguments, options))
        meta = tree_map_only(torch.device, lambda _: torch.device("meta"), meta)
        shapes = compute(*meta[0], **meta[1])
        several = isinstance(shapes, tuple | list)
        made = [self.allocated(shape) for shape in (shapes if several else [shapes])]
        inside = tree_map_only(GpuTensor, lambda a: a.inside, (arguments, options))
        inside = tree_map_only(torch.device, lambda _: CPU, inside)
        targets = [tensor.inside for tensor in made]  # and not the tensors: a GPU keeps no memory from being freed

        def work() -> None:
            results = compute(*inside[0], **inside[1])
            for target, result in zip(targets, results if several else [results], strict=True):
                target.copy_(result)

        self.queue(Call(_plainly(work)))
        return type(shapes)(made) if several else made[0]

    def indexed(self, tensor: GpuTensor, index: Any) -> Any:
        if any(isinstance(part, torch.Tensor) for part in (index if isinstance(index, tuple) else (index,))):
            return self.kernel(lambda t, i: t[i], tensor, index)
        with _plain():
            return GpuTensor(self, tensor.inside[index], tensor.lease)

    def assign(self, tensor: GpuTensor, index: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor) and not isinstance(value, GpuTensor):
            value = value.to(GPU)
        target, where, what = tree_map_only(GpuTensor, lambda a: a.inside, (tensor, index, value))
        self.queue(Call(_plainly(lambda: target.__setitem__(where, what))))

    def copy(self, target: Any, source: Any, non_blocking: bool = False) -> Any:
        """Between host and GPU page-locked memory is read or written when the copy's turn comes, other memory at once."""
        to, of = (t.inside if isinstance(t, GpuTensor) else t for t in (target, source))
        host = next((t for t in (target, source) if not isinstance(t, GpuTensor)), None)
        later = host is None or (non_blocking and self.is_pinned(host))
        if not later and self.current.graph:
            raise self.current.graph.refusal(REFUSED)
        if not later and of is host:
            of = of.clone()
        self.queue(Call(_plainly(lambda: to.copy_(of))))
        if not later:
            self.current.synchronize()
        return target

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def fetched(self, tensor: GpuTensor) -> torch.Tensor:
        """What the tensor holds when everything queued so far is done."""
        self.current.synchronize()
        return tensor.inside.clone()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        on_gpu, wanted = any(isinstance(a, GpuTensor) for a in tree_flatten((args, kwargs))[0]), kwargs.get("device")
        pinned = kwargs.pop("pin_memory", False)
        if not on_gpu and (wanted is None or wanted.type != "cuda"):
            with _plain() if pinned else contextlib.nullcontext():
                made = func(*args, **kwargs)
                return self._pinned(made) if pinned else made
        name = func.overloadpacket.__name__
        if name == "_to_copy" and not on_gpu:
            made = self.allocated(func(*args, **(kwargs | {"device": torch.device("meta")})))
            return self.copy(made, args[0])
        if name == "_to_copy" and wanted is not None and wanted.type == "cpu":
            return func(self.fetched(args[0]), **kwargs)
        if name in ("empty", "new_empty", "empty_like", "empty_strided"):
            return self.allocated(func(*_meta(args), **(kwargs | {"device": torch.device("meta")})))
        if name in ("_local_scalar_dense", "nonzero", "equal"):
            raise AssertionError(f"{name} makes the host wait for the GPU")
        written = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if written:
            inside = tree_map_only(GpuTensor, lambda a: a.inside, (args, kwargs))
            self.queue(Call(_plainly(lambda: func(*inside[0], **inside[1]))))
            return written[0]
        if any(argument.alias_info is not None for argument in func._schema.arguments):
            source = next(a for a in args if isinstance(a, GpuTensor))
            with _plain():
                views = func(*tree_map_only(GpuTensor, lambda a: a.inside, args), **kwargs)
            return tree_map_only(torch.Tensor, lambda view: GpuTensor(self, view, source.lease), views)
        return self.kernel(func, *args, **kwargs)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8).fill_(UNCOPIED)
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    # What stands for Triton and for attention

    MAX_TOKENS = 16

    def sparse_ffn(self, tier: Any, x: Any, mode: Any, scores: Any, threshold: float) -> Any:
        def compute(first: Any, up: Any, down: Any, bias: Any, x: Any, scores: Any) -> torch.Tensor:
            if x.device.type == "meta":
                return torch.empty_like(x)
            packed = (None if data is None else PackedMatrix("float32", x.shape[1], data) for data in (first, up, down))
            first, up, down = packed
            neurons = replace(tier, first=first, up=up, down=down, up_bias=bias)
            return neurons._by_reference(x, mode, scores, threshold)

        up = None if tier.up is None else tier.up.data
        return self.kernel(compute, tier.first.data, up, tier.down.data, tier.up_bias, x, scores)

    def multiply(self, packed: PackedMatrix, x: Any) -> Any:
        def compute(data: Any, x: Any) -> torch.Tensor:
            if x.device.type == "meta":
                return x.new_empty(len(x), len(data))
            return x @ PackedMatrix(packed.kind, packed.columns, data).values().float().T

        return self.kernel(compute, packed.data, x)

    def attend(self, query: Any, keys: Any, values: Any, **options: Any) -> Any:
        cudnn = torch.backends.cuda.cudnn_sdp_enabled() and query.dtype.itemsize == 2
        assert not (cudnn and self.current.graph), "not every version of cuDNN's attention can be captured"
        compute = torch._C._nn.scaled_dot_product_attention
        return self.kernel(compute, query, keys, values, **options)


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        yield


def _plainly(work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with _plain():
            work()

    return run


def _meta(arguments: Any) -> Any:
    return tree_map_only(GpuTensor, lambda a: a.inside.to("meta"), arguments)


@contextlib.contextmanager
def emulated_gpu(patch: pytest.MonkeyPatch, schedule: Schedule, seed: int = 0) -> Iterator[EmulatedGpu]:
    """Inside, torch has a GPU, "cuda:0", with Triton and a driver that calls host functions."""
    gpu = EmulatedGpu(schedule, seed)
    nothing = contextlib.nullcontext()
    replaced: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "Stream": lambda _device=None: Stream(gpu),
        "current_stream": lambda _device=None: gpu.current,
        "stream": gpu.on,
        "synchronize": gpu.synchronize,
        "is_current_stream_capturing": lambda: gpu.current.graph is not None,
        "CUDAGraph": lambda: Graph(gpu),
        "graph": gpu.graph,
        "graph_pool_handle": lambda: (0, 1),
        "device": lambda _device: nothing,
    }
    capture_stream.cache_clear()
    patch.setattr(torch, "inference_mode", torch.no_grad)  # whose tensors can be written to by calls that come later
    for name, value in replaced.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(overlap, "driver", lambda is_hip: SimpleNamespace(launch=gpu.launch_host_function))
    for module in (gpu_step, placed_ffn, native):
        patch.setattr(module, "triton_kernels", lambda device: gpu if device.type == "cuda" else None)
    plain = torch.nn.functional.scaled_dot_product_attention
    patch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda query, *rest, **options: (gpu.attend if isinstance(query, GpuTensor) else plain)(
            query, *rest, **options
        ),
    )
    with gpu:
        yield gpu
    capture_stream.cache_clear()
