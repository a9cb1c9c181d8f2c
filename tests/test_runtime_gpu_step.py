"""The step and the overlap of a GPU, emulated on the CPU: a side stream that does nothing before it has to."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_cases import CPU, PROMPT, LateStream, decoder_for, drawn, five_placements, gpu_step_of, greedy_tokens, step_of
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import HostFunctionError
from pi_toolkit.runtime.decoder import Decoder
from pi_toolkit.runtime.gpu_step import GpuStep
from pi_toolkit.runtime.host_function import HostFunctions
from pi_toolkit.runtime.kernels.native import extension
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.overlap import ColdPart, Overlap
from pi_toolkit.runtime.placed_ffn import NeuronTier, PlacedFfn
from tiny_models import BAMBOO, CONFIGS, DEMO_MODELS, PROSPARSE, VOCABULARY, save_family

STEPS = 11  # beyond the sliding window of the tiny Mistral


@pytest.fixture(scope="module", params=[*CONFIGS, BAMBOO, PROSPARSE])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(save_family(tmp_path_factory.mktemp(request.param), request.param))


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_a_gpus_step_computes_what_the_decoder_does(checkpoint: Checkpoint, mode: Mode) -> None:
    """Sums that are read before they are there, a cache of fixed place that is written elsewhere, keys beyond the mask."""
    shares = (0.0, 0.5, 1.0) if checkpoint.shape.family == "llama" else (0.5,)
    tokens = torch.randint(0, VOCABULARY, (2, STEPS), generator=torch.Generator().manual_seed(1))
    for hot_share in shares:
        decoder = decoder_for(checkpoint, mode, drawn(checkpoint.shape.ffn_sizes, hot_share), context=STEPS + 4)
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


@pytest.mark.parametrize("captures", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("model", ["relu-llama-5m", "relu-opt-3m"])
def test_greedy_tokens_of_trained_models(model: str, captures: bool) -> None:
    """A placement or a way of launching that changes the text of a real model."""
    checkpoint, new_tokens = Checkpoint(DEMO_MODELS / model), 12
    for mode in ("dense", "exact", "predicted"):
        for placement, hot in five_placements(checkpoint.shape.ffn_sizes).items():
            decoder = decoder_for(checkpoint, mode, hot, context=len(PROMPT) + new_tokens, slots=1)
            want = greedy_tokens(step_of(decoder), PROMPT, new_tokens)
            gpu = gpu_step_of(decoder, LateStream(captures))

            def step(token: int, position: int, gpu: GpuStep = gpu, decoder: Decoder = decoder) -> torch.Tensor:
                hidden = gpu.run(torch.tensor([token]), torch.tensor([position]), 0, decoder.mode)
                return decoder.logits(hidden)[0]

            assert greedy_tokens(step, PROMPT, new_tokens) == want, (mode, placement)


class AsksForNothing(TorchDispatchMode):
    """Refuses what would make a GPU's host wait, and what no graph could hold: contents or lengths of tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refused = torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default
        masks = [i for i in (args[1] if func is torch.ops.aten.index.Tensor else ()) if i is not None]
        assert func not in refused and all(i.dtype != torch.bool for i in masks), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_a_step_asks_the_gpu_for_nothing(checkpoint: Checkpoint, mode: Mode) -> None:
    """A list of candidates or a length that travels to the host: a wait in every layer, and a graph that is refused."""
    decoder = decoder_for(checkpoint, mode, drawn(checkpoint.shape.ffn_sizes, 0.5), context=STEPS + 4)
    step = gpu_step_of(decoder, LateStream(captures=True))
    with torch.inference_mode():
        inputs = step._filled(torch.tensor([3, 4]), torch.tensor([0, 0]))
        with AsksForNothing():
            step._compute(inputs, 0, STEPS, mode)


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
    from pi_toolkit.runtime.placed_predictor import MlpPredictor

    predictor = MlpPredictor(pack(torch.randn(32, 64), "float32", CPU), pack(torch.randn(120, 32), "float32", CPU), 0.5)
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


LIBRARY = "int hipLaunchHostFunc(void* stream, void* function, void* data) {{ return {code}; }}"
DRIVER = """
import ctypes, sys
from pi_toolkit.runtime.host_function import driver
ctypes.CDLL(sys.argv[1])
try:
    driver(is_hip=True).launch(0, 0, 0)
except Exception as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="whether a library is loaded can be asked on Linux")
def test_the_driver_is_the_one_that_torch_has_loaded(tmp_path: Path) -> None:
    """A second copy of HIP's runtime, found under a name that is tried earlier, which knows nothing of torch's streams."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "the tests need a C compiler"
    for folder, name, code in (("torch", "libamdhip64.so.7", 7), ("system", "libamdhip64.so", 1)):
        (tmp_path / folder).mkdir()
        source = tmp_path / folder / "library.c"
        source.write_text(LIBRARY.format(code=code))
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", source.with_name(name), source]
        subprocess.run(command, check=True)
    loaded = str(tmp_path / "torch" / "libamdhip64.so.7")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "system")}
    done = subprocess.run([sys.executable, "-c", DRIVER, loaded], capture_output=True, text=True, env=environment)
    assert "returned 7" in done.stdout, done.stdout + done.stderr
