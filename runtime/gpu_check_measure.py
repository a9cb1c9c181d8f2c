"""Measures one model of random weights in one split: tokens per second, what each part of a token takes, bytes per second.

A part (the hot neurons, say) is measured over all layers one after the other, so that no layer's weights are still in a
cache when it is their turn again.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pi_toolkit.profiler.model_families import ModelShape

from .bench_replay import activity, replay
from .decoder import Decoder
from .kernels.native import multiply
from .kernels.packed_matrix import row_bytes
from .kernels.sparse_ffn_reference import Mode
from .placed_ffn import PlacedFfn
from .step_graphs import StepGraphs, capture_stream
from .weights import LayerWeights, ModelWeights

if TYPE_CHECKING:
    import torch

PROMPT = tuple(range(10, 42))
WARM_STEPS = 3  # compile, capture, replay
PART_PASSES = 5


@dataclass(frozen=True)
class LayerInput:
    """What a layer's FFN is given, [tokens, hidden] where the layer's attention is."""

    ffn: PlacedFfn
    normed: "torch.Tensor"
    residual: "torch.Tensor"


@dataclass(frozen=True)
class SideReads:
    """What a token reads of one side's neurons, mean over layers and tokens, and the share of them that are computed."""

    bytes_per_layer: float
    computed_share: float


def tokens_per_second(decoder: Decoder, most_tokens: int, most_seconds: float) -> dict[str, Any]:
    """Greedy decoding behind a prompt, each token waited for as a reader would; ``token_ids`` are those of the timed steps
    and those before them, so that two ways can be compared."""
    import torch

    slot = torch.zeros(1, dtype=torch.int64)

    def step(tokens: Sequence[int], first: int) -> int:
        positions = torch.arange(first, first + len(tokens))[None]
        return int(decoder.step(torch.tensor([list(tokens)]), positions, slot)[0].argmax())

    step(PROMPT, 0)  # compiles, measures the bus
    began = time.perf_counter()
    text = [step(PROMPT, 0)]
    prompt_seconds = time.perf_counter() - began
    for _ in range(WARM_STEPS):
        text.append(step(text[-1:], len(PROMPT) + len(text) - 1))
    timed, began = 0, time.perf_counter()
    while timed < most_tokens and (timed < 2 or time.perf_counter() - began < most_seconds):
        text.append(step(text[-1:], len(PROMPT) + len(text) - 1))
        timed += 1
    seconds = time.perf_counter() - began
    return {
        "tokens_per_second": timed / seconds,
        "timed_tokens": timed,
        "prompt_tokens_per_second": len(PROMPT) / prompt_seconds,
        "token_ids": text,
    }


@contextmanager
def launched_anew(decoder: Decoder) -> Iterator[None]:
    """Inside, the decoder's steps use no graph."""
    graphs: StepGraphs | None = decoder.gpu.graphs if decoder.gpu else None
    if decoder.gpu:
        decoder.gpu.graphs = None
    try:
        yield
    finally:
        if decoder.gpu:
            decoder.gpu.graphs = graphs


def path_of(decoder: Decoder) -> str:
    """How the decoder's steps run: by a graph, launched one by one, natively on the CPU, or layer by layer."""
    if decoder.native:
        return "native"
    if decoder.gpu is None:
        return "layer by layer"
    return "graph" if decoder.gpu.graphs and not decoder.gpu.graphs.refused else "eager"


def layer_inputs(weights: ModelWeights, shape: ModelShape, mode: Mode, tokens: Sequence[int]) -> list[LayerInput]:
    """Of every layer, when these tokens run through the model."""
    found = []

    def observe(_: int, ffn: PlacedFfn, normed: "torch.Tensor", residual: "torch.Tensor", _mode: Mode) -> None:
        found.append(LayerInput(ffn, normed.clone(), residual.clone()))

    replay(Decoder(shape, weights, 1, len(tokens), mode), list(tokens), observe)
    return found


def side_reads(inputs: Sequence[LayerInput], mode: Mode) -> dict[str, SideReads]:
    """By side: the rows of neurons that each token reads, counted."""
    totals: dict[str, list[float]] = {}
    for layer in inputs:
        for number, seen in enumerate(activity(layer.ffn, layer.normed, layer.residual, mode)):
            total = totals.setdefault(side_of(layer.ffn, number), [0.0, 0.0, 0.0, 0.0])
            fires, named = float((seen.fires & seen.named).sum()), float(seen.named.sum())
            rows = 3 * named if mode == "dense" else named + 2 * fires
            total[0] += rows * row_bytes(seen.tier.first.kind, seen.tier.first.columns)
            total[1] += fires if mode == "exact" else named
            total[2] += seen.named.numel()
            total[3] += len(layer.normed)
    return {side: SideReads(total[0] / total[3], total[1] / total[2]) for side, total in totals.items()}


def side_of(ffn: PlacedFfn, number: int) -> str:
    """ "hot" on a GPU, and before the last of several tiers where the GPU is emulated; else "cold"."""
    on_gpu = ffn.tiers[number].device.type != "cpu"
    return "hot" if on_gpu or number < len(ffn.tiers) - 1 else "cold"


def part_seconds(inputs: Sequence[LayerInput], weights: ModelWeights, mode: Mode) -> dict[str, float]:
    """Seconds per layer of each part alone, for one token: products of the attention's maps, predictor, hot and cold
    neurons; and of the head. Parts that lie on a GPU in some layers and on the CPU in others count twice, by device."""
    jobs: dict[tuple[str, torch.device], list[Callable[[], object]]] = {}

    def add(name: str, device: "torch.device", job: Callable[[], object]) -> None:
        jobs.setdefault((name, device), []).append(job)

    for layer, given in zip(weights.layers, inputs, strict=True):
        x, predictor = given.normed[-1:].contiguous(), given.ffn.predictor
        add("attention maps", layer.device, partial(_maps, layer, x))
        scores, threshold = [None] * len(given.ffn.tiers), 0.0
        if mode == "predicted" and predictor is not None:
            read = [part[-1:].to(predictor.device).contiguous() for part in (given.normed, given.residual)]
            add("predictor", predictor.device, partial(predictor.scores, *read))
            scores = predictor.scores(*read).split([len(tier) for tier in given.ffn.tiers], dim=1)
            threshold = predictor.threshold
        for number, (tier, mine) in enumerate(zip(given.ffn.tiers, scores, strict=True)):
            own = None if mine is None else mine.to(tier.device)
            name = f"{side_of(given.ffn, number)} neurons"
            add(name, tier.device, partial(tier, x.to(tier.device), mode, own, threshold))
    last = inputs[-1].residual[-1:].to(weights.head.device)
    add("head", last.device, partial(multiply, weights.head, last))
    several = {name for name, _ in jobs if sum(other == name for other, _ in jobs) > 1}
    return {
        f"{name} on {device.type}" if name in several else name: _seconds_per_job(these, device)
        for (name, device), these in jobs.items()
    }


def _maps(layer: LayerWeights, x: "torch.Tensor") -> None:
    layer.query_key_value(x)
    layer.output(x)


def _seconds_per_job(jobs: Sequence[Callable[[], object]], device: "torch.device") -> float:
    """The best of some passes over all jobs; on a GPU by a graph of them, because launching them one by one would take
    longer than they do."""

    def one_pass() -> None:
        for job in jobs:
            job()

    one_pass()
    run, best = _captured(one_pass, device) if device.type == "cuda" else one_pass, float("inf")
    for _ in range(PART_PASSES):
        wait_for(device)
        began = time.perf_counter()
        run()
        wait_for(device)
        best = min(best, time.perf_counter() - began)
    return best / len(jobs)


def _captured(run: Callable[[], None], device: "torch.device") -> Callable[[], None]:
    import torch

    wait_for(device)
    graph, stream, current = torch.cuda.CUDAGraph(), capture_stream(device), torch.cuda.current_stream(device)
    try:
        with (
            torch.cuda.stream(current),  # which a failure would leave for the other
            torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
        ):
            run()
    except RuntimeError:
        return run
    return graph.replay


def wait_for(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bytes_per_second(device: "torch.device", num_bytes: int) -> float:
    """Read and written by a copy within the memory of *device*: the roof that its kernels are held against."""
    import torch

    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds_per_job([lambda: target.copy_(source)], device)


def trace(decoder: Decoder, path: Path) -> None:
    """Three steps in ``torch.profiler``, as a file for chrome://tracing or perfetto."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities) as profiler:
        for position in range(3):
            decoder.step(torch.tensor([[7]]), torch.tensor([[position]]), torch.zeros(1, dtype=torch.int64))
    profiler.export_chrome_trace(str(path))
