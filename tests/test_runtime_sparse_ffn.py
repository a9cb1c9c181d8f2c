"""The reference kernel against a loop over tokens and neurons that cannot be misread."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch

from pi_toolkit.profiler.model_families import Activation
from pi_toolkit.runtime.kernels import sparse_ffn_reference as kernel
from pi_toolkit.runtime.kernels.sparse_ffn_reference import NeuronRows

THRESHOLD = 1.0
FATRELU_THRESHOLD = 0.4
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
ACT = {
    "relu": lambda z: max(0.0, z),
    "fatrelu": lambda z: z if z > FATRELU_THRESHOLD else 0.0,
    "drelu": lambda z: max(0.0, z),
    "silu": lambda z: z / (1.0 + math.exp(-z)),
    "gelu": lambda z: z * 0.5 * (1.0 + math.erf(z / math.sqrt(2.0))),
}


def random_rows(
    neurons: int,
    hidden: int,
    gated: bool,
    bias: bool,
    dtype: torch.dtype = torch.float32,
    activation: Activation = "relu",
) -> NeuronRows:
    generator = torch.Generator().manual_seed(neurons * 1000 + hidden)

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) / hidden**0.5).to(dtype)

    return NeuronRows(
        up=draw(neurons, hidden),
        down=draw(neurons, hidden),
        gate=draw(neurons, hidden) if gated else None,
        up_bias=draw(neurons) * 3 if bias else None,
        activation=activation,
        activation_threshold=FATRELU_THRESHOLD if activation == "fatrelu" else 0.0,
    )


def loop_ffn(x: torch.Tensor, rows: NeuronRows, candidates: torch.Tensor) -> torch.Tensor:
    """Neuron by neuron and token by token, in float64."""
    output = torch.zeros(x.shape, dtype=torch.float64)
    act = ACT[rows.activation]
    for t in range(len(x)):
        for j in range(len(rows)):
            if not candidates[t, j]:
                continue
            up = rows.up[j].double() @ x[t].double()
            if rows.gate is not None:
                factor = act(float(up)) if rows.activation == "drelu" else float(up)
                h = act(float(rows.gate[j].double() @ x[t].double())) * factor
            else:
                h = act(float(up) + (float(rows.up_bias[j]) if rows.up_bias is not None else 0.0))
            output[t] += h * rows.down[j].double()
    return output


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


KINDS = [
    pytest.param(True, False, id="gated"),
    pytest.param(False, False, id="plain"),
    pytest.param(False, True, id="bias"),
]
SMOOTH: list[Activation] = ["silu", "gelu"]


def test_every_activation_is_tested() -> None:
    """An activation that is added without a line in the loop."""
    assert set(ACT) == set(get_args(Activation))


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("gated", "bias"), KINDS)
@pytest.mark.parametrize(("tokens", "neurons", "hidden"), [(1, 1, 1), (1, 97, 33), (3, 64, 32), (5, 130, 7)])
@pytest.mark.parametrize("activation", ["relu", "fatrelu"])
def test_every_mode_equals_the_loop(
    tokens: int, neurons: int, hidden: int, gated: bool, bias: bool, dtype: torch.dtype, activation: Activation
) -> None:
    """Wrong text from a mode, a bias, a shape off the block size or a dtype."""
    rows = random_rows(neurons, hidden, gated, bias, dtype, activation)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    everything = torch.ones(tokens, neurons, dtype=torch.bool)
    assert_close(kernel.dense(x, rows), loop_ffn(x, rows, everything), dtype)
    assert_close(kernel.exact(x, rows), loop_ffn(x, rows, everything), dtype)
    scores = torch.randn(tokens, neurons, generator=torch.Generator().manual_seed(2)) + 1
    want = loop_ffn(x, rows, scores >= THRESHOLD)
    assert_close(kernel.predicted(x, rows, scores, THRESHOLD), want, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("tokens", "neurons", "hidden"), [(1, 1, 1), (1, 97, 33), (3, 64, 32), (5, 130, 7)])
def test_drelu_equals_the_loop_in_every_mode(tokens: int, neurons: int, hidden: int, dtype: torch.dtype) -> None:
    """A negative up product that is added, with the gate alone deciding."""
    rows = random_rows(neurons, hidden, gated=True, bias=False, dtype=dtype, activation="drelu")
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)
    everything = torch.ones(tokens, neurons, dtype=torch.bool)
    assert_close(kernel.dense(x, rows), loop_ffn(x, rows, everything), dtype)
    assert_close(kernel.exact(x, rows), loop_ffn(x, rows, everything), dtype)
    scores = torch.randn(tokens, neurons, generator=torch.Generator().manual_seed(2)) + 1
    want = loop_ffn(x, rows, scores >= THRESHOLD)
    assert_close(kernel.predicted(x, rows, scores, THRESHOLD), want, dtype)


@pytest.mark.parametrize("activation", SMOOTH)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("gated", "bias"), KINDS)
def test_smooth_activations_equal_the_loop(activation: Activation, gated: bool, bias: bool, dtype: torch.dtype) -> None:
    """Another approximation of the function, or the activation on the wrong factor."""
    rows = random_rows(97, 33, gated, bias, dtype, activation)
    x = torch.randn(3, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert_close(kernel.dense(x, rows), loop_ffn(x, rows, torch.ones(3, 97, dtype=torch.bool)), dtype)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, kernel.GATHER_UP_TO, 0.9, 1.0])
@pytest.mark.parametrize(("gated", "bias"), KINDS)
def test_gathering_and_reading_everything_agree(share: float, gated: bool, bias: bool) -> None:
    """A switch of strategy at some density that changes the result; no candidate at all; all candidates."""
    rows = random_rows(100, 16, gated, bias)
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(3))
    scores = torch.zeros(2, 100)
    scores[:, : round(100 * share)] = 2.0
    assert_close(kernel.predicted(x, rows, scores, THRESHOLD), loop_ffn(x, rows, scores >= THRESHOLD))


def test_a_score_at_the_threshold_is_a_candidate() -> None:
    """PowerInfer's boundary: a score equal to the threshold counts; the next smaller number does not."""
    rows = random_rows(2, 8, gated=False, bias=True)
    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(4))
    below = float(torch.nextafter(torch.tensor(THRESHOLD), torch.tensor(0.0)))
    got = kernel.predicted(x, rows, torch.tensor([[THRESHOLD, below]]), THRESHOLD)
    assert_close(got, loop_ffn(x, rows, torch.tensor([[True, False]])))


def test_a_biased_neuron_that_is_no_candidate_adds_nothing() -> None:
    """relu(bias) of a skipped OPT neuron leaking into the output."""
    rows = NeuronRows(up=torch.zeros(4, 3), down=torch.ones(4, 3), up_bias=torch.full((4,), 5.0))
    scores = torch.tensor([[0.0, 0.0, 2.0, 0.0]])
    assert kernel.predicted(torch.ones(1, 3), rows, scores, THRESHOLD).tolist() == [[5.0, 5.0, 5.0]]


def test_a_token_keeps_its_own_mask_in_a_batch() -> None:
    """Another token's candidates changing this token's result, so that text depends on the batch."""
    rows = random_rows(64, 16, gated=True, bias=False)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(5))
    scores = torch.randn(6, 64, generator=torch.Generator().manual_seed(6))
    together = kernel.predicted(x, rows, scores, THRESHOLD)
    alone = torch.cat([kernel.predicted(x[t : t + 1], rows, scores[t : t + 1], THRESHOLD) for t in range(6)])
    torch.testing.assert_close(together, alone)


def test_a_skipped_neuron_that_overflows_adds_nothing() -> None:
    """0 · inf = NaN where a mask is multiplied instead of applied."""
    huge = torch.finfo(torch.float32).max
    rows = NeuronRows(up=torch.full((3, 2), huge), down=torch.ones(3, 2), gate=torch.full((3, 2), huge))
    got = kernel.predicted(torch.ones(1, 2), rows, torch.zeros(1, 3), THRESHOLD)
    assert got.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("mode", [kernel.dense, kernel.exact])
def test_fatrelu_at_zero_is_relu_bit_for_bit(mode: Callable[[torch.Tensor, NeuronRows], torch.Tensor]) -> None:
    """A ReLU model converted to FATReLU's notation that answers something else."""
    rows, x = (
        random_rows(97, 33, gated=True, bias=False),
        torch.randn(3, 33, generator=torch.Generator().manual_seed(1)),
    )
    assert torch.equal(mode(x, replace(rows, activation="fatrelu")), mode(x, rows))
