"""Blocks are byte for byte those of llama.cpp's reference quantiser, however a matrix is cut and laid out."""

import gguf
import numpy as np
import pytest
import torch

from pi_toolkit.profiler import quantisation
from pi_toolkit.profiler.errors import GgufError
from pi_toolkit.profiler.gguf_container import BLOCKS, TensorType
from pi_toolkit.profiler.quantisation import QuantisedMatrix, dense, dequantise, quantise

KINDS = (TensorType.Q4_0, TensorType.Q8_0)


def reference(matrix: torch.Tensor, kind: TensorType) -> np.ndarray:
    return gguf.quants.quantize(matrix.float().contiguous().numpy(), gguf.GGMLQuantizationType[kind.name])


@pytest.mark.parametrize("values_at_once", [1, 100, 2**21])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_bytes_are_the_references(kind, dtype, values_at_once, monkeypatch):
    """A rounding of our own, or rows lost between two blocks of rows."""
    monkeypatch.setattr(quantisation, "_VALUES_AT_ONCE", values_at_once)
    torch.manual_seed(0)
    matrix = (torch.randn(37, 96) * torch.logspace(-6, 3, 37)[:, None]).to(dtype)
    matrix[3] = 0
    matrix[4, :32] = -0.0
    assert np.array_equal(quantise(matrix, kind), reference(matrix, kind))
    turned = torch.randn(96, 37).to(dtype).T
    assert np.array_equal(quantise(turned, kind), reference(turned, kind))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_come_back_and_quantise_to_the_same_bytes(kind):
    """A file that changes each time it is converted."""
    matrix = torch.randn(8, 64)
    blocks = quantise(matrix, kind)
    values = dequantise(blocks, kind, torch.float32)
    assert np.array_equal(values.numpy(), gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind.name]))
    assert (values - matrix).abs().max() < (0.5 if kind == TensorType.Q4_0 else 0.05)
    assert np.array_equal(quantise(values, kind), blocks)


def test_blocks_by_hand():
    """One block of each kind, value by value, after the description in the module."""
    values = torch.arange(-8, 24, dtype=torch.float32)[None]  # the largest, 23, sets d = 23 / -8 in Q4_0
    four = quantise(values, TensorType.Q4_0)[0]
    d = float(four[:2].view("<f2")[0])
    assert d == pytest.approx(23 / -8, rel=1e-3)
    low, high = (four[2:] & 15).astype(int) - 8, (four[2:] >> 4).astype(int) - 8
    expected = dequantise(four[None], TensorType.Q4_0, torch.float32)[0]
    np.testing.assert_array_equal(np.concatenate([low * d, high * d]), expected)
    eight = quantise(values, TensorType.Q8_0)[0]
    assert float(eight[:2].view("<f2")[0]) == pytest.approx(23 / 127, rel=1e-3)
    assert eight[2:].view(np.int8)[-1] == 127


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_cannot_be_quantised_is_refused(kind):
    """Half a block, or a NaN that becomes an arbitrary number."""
    with pytest.raises(GgufError, match="no whole number of"):
        quantise(torch.zeros(2, 33), kind)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(GgufError, match="not finite and cannot be quantised"):
            quantise(torch.full((1, 32), bad), kind)


def test_block_sizes_are_llama_cpps():
    """A K-quant file read with rows of the wrong length."""
    for kind, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]] == sizes


@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_other_types_are_dequantised_as_the_reference_does(name):
    """Types of foreign files; the scales are finite because their exponents are."""
    kind = TensorType[name]
    values, num_bytes = BLOCKS[kind]
    blocks = np.random.default_rng(0).integers(0, 60, (5, 2 * num_bytes), np.uint8)
    found = dequantise(blocks, kind, torch.float32)
    assert found.shape == (5, 2 * values)
    assert np.array_equal(found.numpy(), gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]))


def test_rows_of_a_quantised_matrix():
    """Views and copies of rows, where a row is bytes."""
    values = torch.randn(6, 32)
    matrix = QuantisedMatrix("q8_0", (6, 32), quantise(values, TensorType.Q8_0))
    whole = matrix.dequantise(torch.float32)
    assert len(matrix) == 6
    assert torch.equal(matrix.rows(2, 5).dequantise(torch.float32), whole[2:5])
    assert np.shares_memory(matrix.rows(2, 5).blocks, matrix.blocks)
    order = torch.tensor([5, 0, 0, 3])
    assert torch.equal(matrix[order].dequantise(torch.float32), whole[order])
    assert torch.equal(matrix.select(order.numpy()).dequantise(torch.float32), whole[order])
    assert dense(matrix, torch.bfloat16).dtype == torch.bfloat16
    assert dense(values) is values


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_turned_matrix_has_the_values_of_the_transpose(kind):
    """Rows taken for columns where the blocks run the other way."""
    matrix = QuantisedMatrix(kind.name.lower(), (6, 64), quantise(torch.randn(6, 64), kind))
    turned, values = matrix.T, matrix.dequantise(torch.float32).T
    assert (turned.shape, len(turned)) == ((64, 6), 64)
    assert torch.equal(dense(turned), values)
    assert torch.equal(turned[torch.tensor([63, 0])], values[[63, 0]])
