"""Triton kernels on the CPU, in Triton's interpreter, against the reference; run by test_runtime_triton_kernels.py.

Not collected with the other tests: whether functions are interpreted is decided when Triton is imported, for a whole process.
"""

import os
from typing import get_args

import pytest
import torch

from pi_toolkit.profiler.model_families import Activation
from pi_toolkit.runtime.kernels import sparse_ffn_triton as kernel
from pi_toolkit.runtime.kernels.native import address, extension, kernels, matrix
from pi_toolkit.runtime.kernels.packed_matrix import KINDS, Kind, pack
from pi_toolkit.runtime.kernels.sparse_ffn_reference import Mode
from pi_toolkit.runtime.kernels.triton_tiling import Tiling
from sparse_ffn_cases import COMPUTATIONS, CPU, Form, draw, hidden_sizes, make_neurons, wanted

assert os.environ.get("TRITON_INTERPRET") == "1", (
    "python -m pytest tests/test_runtime_triton_kernels.py runs these checks"
)

# Small and odd, so that few neurons make several chunks, rounds, pieces and groups of rows.
SMALL = Tiling(chunks=2, rows_at_once=3, gemv_blocks=2, axpy_blocks=2, axpy_unroll=3)
THRESHOLD = 0.5


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("activation", "form", "mode"), COMPUTATIONS)
def test_every_kind_and_activation(kind: Kind, activation: Activation, form: Form, mode: Mode) -> None:
    """A nibble, a sign, a scale, a bias or an activation function that is not the reference's."""
    (hidden,) = hidden_sizes(kind, 70)
    neurons = make_neurons(kind, 18, hidden, activation, form)
    x, scores = draw(1, hidden, seed=5), draw(1, 18, seed=6)
    got = kernel.sparse_ffn(neurons, x, mode, scores, THRESHOLD, SMALL)
    assert_close(got, wanted(neurons, x, mode, scores, THRESHOLD))


@pytest.mark.parametrize("kind", ["float32", "q8_0", "q4_0"])
@pytest.mark.parametrize(("neurons", "hidden"), [(1, 1), (16, 33), (35, 160)])
def test_shapes_off_the_tiles(kind: Kind, neurons: int, hidden: int) -> None:
    """A remainder of a piece, of a group of 128 quants or of a chunk."""
    (hidden,) = hidden_sizes(kind, hidden)
    made = make_neurons(kind, neurons, hidden, "relu", "gated")
    x, scores = draw(1, hidden, seed=5), draw(1, neurons, seed=6)
    got = kernel.sparse_ffn(made, x, "predicted", scores, THRESHOLD, SMALL)
    assert_close(got, wanted(made, x, "predicted", scores, THRESHOLD))


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("candidates", [0, 1, 18])
def test_no_candidate_one_and_all(candidates: int, form: Form) -> None:
    """An empty list that is not written at all, and a full one."""
    neurons, x = make_neurons("float32", 18, 40, "relu", form), draw(2, 40, seed=5)
    scores = torch.zeros(2, 18)
    scores[0, 18 - candidates :] = THRESHOLD
    got = kernel.sparse_ffn(neurons, x, "predicted", scores, THRESHOLD, SMALL)
    assert_close(got, wanted(neurons, x, "predicted", scores, THRESHOLD))


@pytest.mark.parametrize(
    ("tokens", "mode"), [(2, "dense"), (2, "exact"), (3, "exact"), (3, "predicted"), (4, "dense"), (5, "predicted")]
)
def test_small_batches(tokens: int, mode: Mode) -> None:
    """A token that gets another one's candidates, and more tokens than there are."""
    neurons, x = make_neurons("float16", 18, 40, "relu", "gated"), draw(tokens, 40, seed=5)
    scores = draw(tokens, 18, seed=6)
    got = kernel.sparse_ffn(neurons, x, mode, scores, THRESHOLD, SMALL)
    assert_close(got, wanted(neurons, x, mode, scores, THRESHOLD))


@pytest.mark.parametrize(("kind", "mode"), [("float32", "predicted"), ("q4_0", "exact")])
def test_same_bits_in_every_batch_and_with_any_programs(kind: Kind, mode: Mode) -> None:
    """A text that depends on who else is being served, or on how many programs share the rows."""
    neurons, x, scores = make_neurons(kind, 18, 96, "relu", "gated"), draw(3, 96, seed=5), draw(3, 18, seed=6)
    together = kernel.sparse_ffn(neurons, x, mode, scores, THRESHOLD, SMALL)
    others = Tiling(chunks=2, rows_at_once=1, gemv_blocks=2, axpy_blocks=2, axpy_unroll=5)
    alone = [kernel.sparse_ffn(neurons, x[[t]], mode, scores[[t]], THRESHOLD, others) for t in range(3)]
    assert torch.equal(together, torch.cat(alone))


def test_the_table_of_sizes() -> None:
    """Tests that pass with sizes nobody runs with."""
    neurons, x = make_neurons("q4_0", 70, 160, "relu", "gated"), draw(1, 160, seed=5)
    scores = draw(1, 70, seed=6)
    got = kernel.sparse_ffn(neurons, x, "predicted", scores, THRESHOLD)
    assert_close(got, wanted(neurons, x, "predicted", scores, THRESHOLD))


def test_scores_that_are_a_slice() -> None:
    """The scores of a tier that is not the layer's first."""
    neurons, x = make_neurons("float32", 18, 40, "relu", "gated"), draw(2, 40, seed=5)
    scores = draw(2, 40, seed=6)[:, 11:29]
    got = kernel.sparse_ffn(neurons, x, "predicted", scores, THRESHOLD, SMALL)
    assert_close(got, wanted(neurons, x, "predicted", scores, THRESHOLD))


def test_scores_of_a_predictor_on_the_cpu() -> None:
    """Tokens side by side, which scores keep on their way to the GPU."""
    neurons, x, scores = make_neurons("float32", 18, 40, "relu", "gated"), draw(2, 40, seed=5), draw(18, 2, seed=6).T
    got = kernel.sparse_ffn(neurons, x, "predicted", scores, THRESHOLD, SMALL)
    assert_close(got, wanted(neurons, x, "predicted", scores, THRESHOLD))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_skipped_neuron_that_overflows_adds_nothing() -> None:
    """0 · inf = NaN where a row that is no candidate of a token is added as zero times something."""
    neurons, x = make_neurons("float32", 18, 40, "relu", "gated"), draw(2, 40, seed=5)
    neurons.first.values()[3] = neurons.up.values()[3] = 1e30  # type: ignore[union-attr]
    scores = torch.zeros(2, 18)
    scores[1, 3] = 1.0
    got = kernel.sparse_ffn(neurons, x.abs(), "predicted", scores, THRESHOLD, SMALL)
    assert got[0].abs().max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_product_with_a_matrix(kind: Kind) -> None:
    """Predictors and dense maps in blocks: the float32 product, within what rounding x to int8 can do to the CPU kernel's.

    CPU kernels round x to int8 in blocks of 32 where weights are blocks, by at most half a step of max|x| / 127.
    """
    (columns,) = hidden_sizes(kind, 150)
    weight, x = pack(draw(21, columns, seed=1), kind, CPU), draw(2, columns, seed=2)
    got, values = kernel.multiply(weight, x, SMALL).double(), weight.values().double()
    assert_close(got, x.double() @ values.T)
    native = kernels(1)
    assert native is not None, "the tests need a compiler at installation"
    on_cpu = torch.empty(2, 21)
    for t in range(2):
        native.multiply(matrix(extension(), weight), address(x[t]), 0, address(on_cpu[t]))
    steps = torch.nn.functional.pad(x, (0, -columns % 32)).view(2, -1, 32).abs().amax(dim=2).double() / 254
    sizes = torch.nn.functional.pad(values, (0, -columns % 32)).abs().view(21, -1, 32).sum(dim=2)
    bound = steps @ sizes.T if kind in ("q8_0", "q4_0") else 0.0
    assert ((got - on_cpu).abs() <= bound + 1e-5).all()
