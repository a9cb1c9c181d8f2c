"""Triton kernels on a GPU, where there is one: against the reference, run against run, and inside a CUDA graph."""

import pytest
import torch

from pi_toolkit.profiler.model_families import Activation
from pi_toolkit.runtime.kernels.native import multiply
from pi_toolkit.runtime.kernels.packed_matrix import KINDS, Kind, pack
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.kernels.triton_kernels import triton_kernels
from sparse_ffn_cases import COMPUTATIONS, CPU, Form, draw, hidden_sizes, make_neurons, wanted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
GPU = torch.device("cuda")
THRESHOLD = 0.5


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double().cpu(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("activation", "form", "mode"), COMPUTATIONS)
@pytest.mark.parametrize(("tokens", "neurons", "hidden"), [(1, 1111, 1000), (3, 130, 4096), (4, 1, 33)])
def test_every_kind_and_activation(
    kind: Kind, activation: Activation, form: Form, mode: Mode, tokens: int, neurons: int, hidden: int
) -> None:
    """What the interpreter cannot know: the compiled kernels' answers."""
    (hidden,) = hidden_sizes(kind, hidden)
    made = make_neurons(kind, neurons, hidden, activation, form, GPU)
    x, scores = draw(tokens, hidden, seed=5, device=GPU), draw(tokens, neurons, seed=6, device=GPU)
    assert triton_kernels(GPU) is not None, "torch's builds for GPUs come with Triton"
    assert_close(made(x, mode, scores, THRESHOLD), wanted(made, x, mode, scores, THRESHOLD))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_same_bits_on_every_run_and_in_every_batch(kind: Kind, mode: Mode) -> None:
    """A race between programs, or a text that depends on who else is being served."""
    neurons = make_neurons(kind, 3000, 2048, "relu", "gated", GPU)
    x, scores = draw(4, 2048, seed=5, device=GPU), draw(4, 3000, seed=6, device=GPU)
    together = neurons(x, mode, scores, THRESHOLD)
    assert all(torch.equal(together, neurons(x, mode, scores, THRESHOLD)) for _ in range(20))
    alone = [neurons(x[[t]], mode, scores[[t]], THRESHOLD) for t in range(4)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("mode", ["dense", "exact", "predicted"])
def test_replayed_from_a_graph(mode: Mode) -> None:
    """Anything that waits for the host, or that remembers the candidates of the capture."""
    neurons = make_neurons("q4_0", 1500, 2048, "relu", "gated", GPU)
    x, scores = draw(1, 2048, seed=5, device=GPU), torch.zeros(1, 1500, device=GPU)
    neurons(x, mode, scores, THRESHOLD)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = neurons(x, mode, scores, THRESHOLD)
    for seed in (7, 8):
        x.copy_(draw(1, 2048, seed=seed))
        scores.copy_(draw(1, 1500, seed=seed))
        graph.replay()
        assert torch.equal(y, neurons(x, mode, scores, THRESHOLD))


@pytest.mark.parametrize("kind", KINDS)
def test_products_with_a_matrix(kind: Kind) -> None:
    """Predictors and dense maps: few tokens through Triton, many through torch."""
    weight, x = pack(draw(300, 1024, seed=1), kind, GPU), draw(40, 1024, seed=2, device=GPU)
    want = x.double().cpu() @ weight.values().double().cpu().T
    few = torch.cat([multiply(weight, x[first : first + 4], exactly=True) for first in range(0, 40, 4)])
    torch.testing.assert_close(few.double().cpu(), want, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(multiply(weight, x, exactly=True).double().cpu(), want, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_as_on_the_cpu(kind: Kind) -> None:
    """A layout of its own for GPUs, which a tier that moves would have to convert."""
    source = draw(70, 160, seed=1)
    assert torch.equal(pack(source, kind, GPU).data.cpu(), pack(source, kind, CPU).data)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_neurons_on_another_gpu() -> None:
    """A launch on the current device, which cannot read the other one's memory or is slow at it."""
    other = torch.device("cuda:1")
    neurons = make_neurons("float16", 300, 512, "relu", "gated", other)
    x, scores = draw(2, 512, seed=5, device=other), draw(2, 300, seed=6, device=other)
    got = neurons(x, "predicted", scores, THRESHOLD)
    assert got.device == other
    assert_close(got, wanted(neurons, x, "predicted", scores, THRESHOLD))


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_can_be_asked_for(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that compares Triton with itself."""
    monkeypatch.setenv("PI_GPU_KERNELS", "torch")
    neurons = make_neurons(kind, 300, 512, "relu", "gated", GPU)
    x, scores = draw(2, 512, seed=5, device=GPU), draw(2, 300, seed=6, device=GPU)
    assert triton_kernels(GPU) is None
    got = neurons(x, "predicted", scores, THRESHOLD)
    torch.testing.assert_close(
        got.double().cpu(), wanted(neurons, x, "predicted", scores, THRESHOLD), atol=5e-2, rtol=5e-2
    )
