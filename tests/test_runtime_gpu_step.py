"""The step and the overlap of a GPU, emulated on the CPU: a side stream that does nothing before it has to."""

import contextlib
import ctypes
import dataclasses
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import HostFunctionError
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.gpu_step import GpuStep
from pi_toolkit.runtime.host_function import HostFunctions
from pi_toolkit.runtime.kernels.native import extension
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.overlap import ColdPart, Overlap
from pi_toolkit.runtime.placed_ffn import NeuronTier, PlacedFfn
from pi_toolkit.runtime.step_graphs import StepGraphs
from pi_toolkit.runtime.tier_plan import TierPlan
from pi_toolkit.runtime.weights import load_weights
from tiny_models import BAMBOO, CONFIGS, PROSPARSE, VOCABULARY, save_family

CPU = torch.device("cpu")
STEPS = 11  # beyond the sliding window of the tiny Mistral


class LateStream:
    """A side stream that puts everything off: until the host waits for the copies, as an eager stream may, or until the
    join, as a graph may. What is not yet copied holds NaN, which no later sum gets rid of."""

    pinned = False

    def __init__(self, captures: bool) -> None:
        self.captures = captures
        self.log: list[str] = []
        self._queue: list[Callable[[], object]] = []

    def fork(self) -> None:
        self.log.append("fork")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.log.append("copy")
        target.fill_(torch.nan)
        self._queue.append(lambda: target.copy_(source))

    def call(self, part: ColdPart) -> None:
        self.log.append("call")
        part.partial.fill_(torch.nan)
        self._queue.append(part)
        if not self.captures:
            self._drain()

    def join(self) -> None:
        self.log.append("join")
        self._drain()

    def take_captured(self) -> list[object]:
        return []

    def _drain(self) -> None:
        for queued in self._queue:
            queued()
        self._queue = []


def random_predictors(checkpoint: Checkpoint) -> PredictorSet:
    shape, generator = checkpoint.shape, torch.Generator().manual_seed(8)
    fc1 = tuple(torch.randn(32, shape.hidden_size, generator=generator) for _ in shape.ffn_sizes)
    fc2 = tuple(torch.randn(neurons, 32, generator=generator) for neurons in shape.ffn_sizes)
    return PredictorSet(fc1, fc2, 0.5, None, None)


def decoder_for(checkpoint: Checkpoint, mode: Mode, hot_share: float, slots: int = 3) -> Decoder:
    """A decoder with the hottest neurons on a first tier, everything else of the first two layers with them."""
    shape = checkpoint.shape
    hot = tuple(torch.randperm(n)[: int(hot_share * n)].sort().values.numpy() for n in shape.ffn_sizes)
    everywhere = (True,) * shape.num_layers
    plan = TierPlan(CPU, CPU, hot, everywhere, everywhere, True)
    predictors = random_predictors(checkpoint) if mode == "predicted" else None
    weights = load_weights(checkpoint, plan, predictors, "float32")
    return Decoder(shape, weights, slots=slots, context=STEPS + 4, mode=mode)


def gpu_step_of(decoder: Decoder, side: LateStream) -> GpuStep:
    """The step a GPU would run on the same weights and a cache of its own, cold tiers beside hot ones."""
    other = Decoder(decoder.shape, decoder.weights, len(decoder.cache.keys[0]), decoder.cache.context, decoder.mode)
    overlap = Overlap(side)
    layers = tuple(
        dataclasses.replace(layer, ffn=dataclasses.replace(layer.ffn, overlap=overlap))
        for layer in other.weights.layers
    )
    weights = dataclasses.replace(other.weights, layers=layers)
    return GpuStep(decoder.shape, weights, other.cache, other._rotations, None)


@pytest.fixture(scope="module", params=[*CONFIGS, BAMBOO, PROSPARSE])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(save_family(tmp_path_factory.mktemp(request.param), request.param))


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_a_gpus_step_computes_what_the_decoder_does(checkpoint: Checkpoint, mode: Mode) -> None:
    """Sums that are read before they are there, a cache of fixed place that is written elsewhere, keys beyond the mask."""
    shares = (0.0, 0.5, 1.0) if checkpoint.shape.family == "llama" else (0.5,)
    tokens = torch.randint(0, VOCABULARY, (2, STEPS), generator=torch.Generator().manual_seed(1))
    for hot_share in shares:
        decoder = decoder_for(checkpoint, mode, hot_share)
        sides = LateStream(captures=False), LateStream(captures=True)
        steps = [gpu_step_of(decoder, side) for side in sides]
        for t in range(STEPS):
            positions = torch.full((2, 1), t)
            want = decoder.hidden_states(tokens[:, t : t + 1], positions, torch.tensor([1, 2]))[:, 0]
            for step in steps:
                got = step.run(tokens[:, t], positions[:, 0], 1, mode)
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        copies_out = ["copy"] * (2 if mode == "predicted" else 1)
        queued = ["fork", *copies_out, "call", "copy", "join"] * checkpoint.shape.num_layers * STEPS
        assert all(side.log == queued for side in sides)


def tier(neurons: int, hidden: int, seed: int) -> NeuronTier:
    from pi_toolkit.runtime.kernels.packed_matrix import pack

    generator = torch.Generator().manual_seed(seed)
    gate, up, down = (pack(torch.randn(neurons, hidden, generator=generator), "float32", CPU) for _ in range(3))
    return NeuronTier(gate, up, down, None, "relu", 0.0)


@pytest.mark.parametrize("captures", [False, True], ids=["eager", "graph"])
def test_three_tiers_overlap(captures: bool) -> None:
    """A tier that is left out, or that gets another one's scores, where two GPUs and the CPU share a layer."""
    tiers = tuple(tier(neurons, 64, seed) for seed, neurons in enumerate((30, 50, 40)))
    bias, x = torch.randn(64), torch.randn(2, 64)
    from pi_toolkit.runtime.kernels.packed_matrix import pack
    from pi_toolkit.runtime.placed_ffn import PlacedPredictor

    predictor = PlacedPredictor(
        pack(torch.randn(32, 64), "float32", CPU), pack(torch.randn(120, 32), "float32", CPU), 0.5
    )
    alone = PlacedFfn(tiers, bias, predictor)
    beside = PlacedFfn(tiers, bias, predictor, Overlap(LateStream(captures)))
    for mode in ("dense", "exact", "predicted"):
        torch.testing.assert_close(beside(x, x, mode), alone(x, x, mode))


def test_the_hot_part_is_queued_before_the_host_computes() -> None:
    """A host that computes first and lets the GPU wait: hot and cold one after the other."""
    side, when = LateStream(captures=False), []

    def hot() -> torch.Tensor:
        when.extend(side.log)
        return torch.zeros(1, 64)

    Overlap(side)(hot, tier(8, 64, 0), torch.randn(1, 64), None, "dense", 0.0)
    assert when == ["fork", "copy"]


def test_host_buffers_grow_and_are_not_shared_by_graphs_of_another_size() -> None:
    """A graph whose buffers are taken away by a longer prompt, or results of one row read by another."""
    side, cold = LateStream(captures=False), tier(8, 64, 0)
    overlap = Overlap(side)
    for rows in (1, 4, 2, 1):
        x = torch.randn(rows, 64)
        got = overlap(lambda: None, cold, x, None, "dense", 0.0)
        torch.testing.assert_close(got, cold(x, "dense", None, 0.0))


STUB = """
#include <pthread.h>
typedef void (*host_function)(void*);
struct call { host_function function; void* data; };
static void* run(void* call) { ((struct call*)call)->function(((struct call*)call)->data); return 0; }
int cuLaunchHostFunc(void* stream, host_function function, void* data) {
    struct call call = {function, data};
    pthread_t thread;
    if (stream == (void*)13) return 900;
    if (pthread_create(&thread, 0, run, &call)) return 1;
    return pthread_join(thread, 0);
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> HostFunctions:
    """A driver that calls the host's function on a thread of its own, as the real one does."""
    folder = tmp_path_factory.mktemp("driver")
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "the tests need a C compiler"
    (folder / "stub.c").write_text(STUB)
    library = folder / "libstub.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", library, folder / "stub.c"], check=True)
    return HostFunctions(ctypes.CDLL(str(library)), "cuLaunchHostFunc")


@pytest.mark.skipif(extension() is None, reason="the native kernels are not installed")
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_a_cold_part_as_a_host_function(driver: HostFunctions, mode: Mode, tokens: int) -> None:
    """A graph's node that computes something else than the eager path, or only for the buffers' first contents."""
    cold, generator = tier(40, 64, 3), torch.Generator().manual_seed(5)
    part = ColdPart(cold, mode, 0.3, torch.zeros(tokens, 64), torch.zeros(tokens, 40), torch.zeros(tokens, 64))
    assert part.scores is not None
    task: Any = part.native()
    for _token in range(3):
        part.x.copy_(torch.randn(tokens, 64, generator=generator))
        part.scores.copy_(torch.randn(tokens, 40, generator=generator))
        part()
        want = part.partial.clone()
        part.partial.fill_(torch.nan)
        driver.launch(0, task.function, task.data)
        torch.testing.assert_close(part.partial, want, atol=0, rtol=0)


def test_a_driver_that_refuses(driver: HostFunctions) -> None:
    """A refusal that goes unnoticed: a graph without its cold part."""
    with pytest.raises(HostFunctionError, match="900"):
        driver.launch(13, 0, 0)


class FakeGraph:
    """What stands for a captured step: replaying computes it anew into the tensor that capturing returned."""

    captures_left = 100
    replayed = 0

    def __init__(self) -> None:
        if FakeGraph.captures_left == 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        FakeGraph.captures_left -= 1

    def replay(self) -> None:
        FakeGraph.replayed += 1


@pytest.fixture
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_args, **_options: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(FakeGraph, "captures_left", 100)
    monkeypatch.setattr(FakeGraph, "replayed", 0)
    return FakeGraph


def test_a_step_is_captured_once_for_each_key(fake_graphs: type[FakeGraph]) -> None:
    """A step captured before its kernels are compiled, captured on every token, or replayed for another length."""
    graphs, launched = StepGraphs(torch.device("cuda"), None), []
    for key in ("short", "short", "short", "long", "long", "short"):
        graphs.run(key, lambda key=key: launched.append(key) or torch.ones(1))  # type: ignore[misc]
    assert launched == ["short", "short", "long", "long"]  # the second of each is the capture
    assert fake_graphs.replayed == 4


def test_steps_go_on_where_no_graph_can_be_captured(
    fake_graphs: type[FakeGraph], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that is lost, or computed twice, because capturing it failed; a complaint on every token."""
    monkeypatch.setattr(fake_graphs, "captures_left", 0)
    graphs, steps = StepGraphs(torch.device("cuda"), None), []

    def step() -> torch.Tensor:
        steps.append(1)
        return torch.ones(1)

    for _token in range(4):
        assert graphs.run("key", step).item() == 1
    assert len(steps) == 4
    assert capsys.readouterr().err.count("does not capture") == 1
