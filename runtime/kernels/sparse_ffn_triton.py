"""The sparse FFN on a GPU, NVIDIA or AMD, in Triton: what :mod:`.sparse_ffn_reference` computes, from packed rows.

Four tokens are computed at once, more in groups of four. Everything runs on the device: the candidates of the tokens are
listed there, with a count beside them, so that the calls can be captured in a CUDA graph. Products and sums are float32
whatever the weights' kind, in an order that depends on shapes alone: a run gives the same bits as the one before, and a token
the same bits in every batch.

    dense      gather_gemv over all rows of gate and up → gather_axpy over all rows of down → add_chunks
    exact      gather_gemv over all rows of gate → list_active → gather_gemv over up → gather_axpy → add_chunks
    predicted  list_active by the scores → gather_gemv over gate and up → gather_axpy → add_chunks

Ungated neurons have their up rows in the place of the gates, and nothing in that of up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pi_toolkit.profiler.model_families import Activation

from .packed_matrix import PackedMatrix
from .sparse_ffn_reference import Mode
from .triton_active import list_active
from .triton_gather_axpy import add_chunks, gather_axpy
from .triton_gather_gemv import DOUBLE_RELU, GELU, NONE, SILU, THRESHOLD, gather_gemv
from .triton_tiling import Tiling, tiling

if TYPE_CHECKING:
    import torch

    from ..placed_ffn import NeuronTier

TOKENS_AT_ONCE = 4
MAX_TOKENS = 16  # every four of them read the weights; products of whole matrices, which serve more, read them once
ACTIVATIONS: dict[Activation, int] = {
    "relu": THRESHOLD.value,
    "fatrelu": THRESHOLD.value,
    "drelu": DOUBLE_RELU.value,
    "silu": SILU.value,
    "gelu": GELU.value,
}
ONE_WARP = {"num_warps": 1, "num_stages": 1}
TWO_WARPS = {"num_warps": 2, "num_stages": 1}


def sparse_ffn(
    neurons: "NeuronTier",
    x: "torch.Tensor",
    mode: Mode,
    scores: "torch.Tensor | None",
    threshold: float,
    sizes: Tiling | None = None,
) -> "torch.Tensor":
    """What *neurons* add: float32 [tokens, hidden] from *x* [tokens, hidden], of at most :data:`MAX_TOKENS` tokens.

    *scores* [tokens, k] are those of mode predicted: a token's candidates have at least *threshold*. *sizes* replaces the
    table's, for tests.
    """
    import torch

    if scores is not None and scores.stride(1) != 1:  # a predictor on the CPU has its tokens side by side
        scores = scores.clone(memory_format=torch.contiguous_format)

    def run(few: "torch.Tensor", first: int) -> "torch.Tensor":
        work = _Chunks.of(few, len(neurons), sizes or tiling(neurons.first.kind, few.shape[1], len(few)))
        return _run(work, neurons, mode, None if scores is None else scores[first : first + len(few)], threshold)

    return _in_groups(x, run)


def multiply(packed: PackedMatrix, x: "torch.Tensor", sizes: Tiling | None = None) -> "torch.Tensor":
    """x · Wᵀ: float32 [tokens, rows] from [tokens, columns], of at most :data:`MAX_TOKENS` tokens."""

    def run(few: "torch.Tensor", _: int) -> "torch.Tensor":
        work = _Chunks.of(few, packed.rows, sizes or tiling(packed.kind, packed.columns, len(few)))
        y = work.activations()
        _products(work, packed, None, None, ("first", NONE.value, 0.0), y, _Active(None, None), None, 0.0)
        return y[:, : packed.rows]

    return _in_groups(x, run)


def _in_groups(x: "torch.Tensor", run: "Callable[[torch.Tensor, int], torch.Tensor]") -> "torch.Tensor":
    """What *run* makes of each few tokens of *x*, given with the number of the first of them."""
    import torch

    with torch.cuda.device_of(x):  # Triton launches on the current device, whatever its arguments lie on
        parts = [run(x[first : first + TOKENS_AT_ONCE], first) for first in range(0, len(x), TOKENS_AT_ONCE)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _run(
    work: "_Chunks", neurons: "NeuronTier", mode: Mode, scores: "torch.Tensor | None", threshold: float
) -> "torch.Tensor":
    h, everyone, gated = work.activations(), _Active(None, None), neurons.up is not None
    if mode == "predicted":
        assert scores is not None, "predictors name candidates in mode predicted"
        active = _list(work, scores, threshold, None)
        _activate(work, neurons, "both" if gated else "first", h, active, scores, threshold)
    elif mode == "exact":
        fires = work.activations()
        _activate(work, neurons, "first", fires, everyone)
        active = _list(work, fires, 0.0, h)
        if gated:
            _activate(work, neurons, "up", h, active)
    else:
        active = everyone
        _activate(work, neurons, "both" if gated else "first", h, active)
    return _add_rows(work, neurons.down, h, active)


@dataclass(frozen=True)
class _Active:
    """What ``list_active`` made, or nothing for all neurons."""

    index: "torch.Tensor | None"
    counts: "torch.Tensor | None"


@dataclass(frozen=True)
class _Chunks:
    """Tokens' inputs and the neurons' chunks."""

    x: "torch.Tensor"
    neurons: int
    sizes: Tiling
    length: int

    @classmethod
    def of(cls, x: "torch.Tensor", neurons: int, sizes: Tiling) -> "_Chunks":
        assert 0 < len(x) <= TOKENS_AT_ONCE, "tokens come in groups"
        return cls(x.float().contiguous(), neurons, sizes, sizes.chunk_length(neurons))

    @property
    def count(self) -> int:
        return -(-self.neurons // self.length)

    @property
    def padded_tokens(self) -> int:
        """The next power of two, which tiles have to be."""
        return 1 << (len(self.x) - 1).bit_length()

    def activations(self) -> "torch.Tensor":
        """A buffer float32 [tokens, places]."""
        return self.x.new_empty(len(self.x), self.count * self.length)


def _list(work: _Chunks, values: "torch.Tensor", threshold: float, listed: "torch.Tensor | None") -> _Active:
    """Neurons that any token's *values* make active; without *listed* the values are scores."""
    import torch

    index = torch.empty(work.count * work.length, dtype=torch.int32, device=values.device)
    counts = torch.empty(work.count, dtype=torch.int32, device=values.device)
    assert values.stride(1) == 1, "scores of one token lie side by side"
    list_active[(work.count,)](
        values,
        values.stride(0),
        float(threshold),
        index,
        counts,
        listed,
        0 if listed is None else listed.stride(0),
        work.neurons,
        work.length,
        len(work.x),
        BY_SCORE=listed is None,
        TOKENS=work.padded_tokens,
        LANES=512,
        num_warps=4,
    )
    return _Active(index, counts)


def _activate(
    work: _Chunks,
    neurons: "NeuronTier",
    reads: Literal["first", "both", "up"],
    h: "torch.Tensor",
    active: _Active,
    scores: "torch.Tensor | None" = None,
    threshold: float = 0.0,
) -> None:
    """Write activations of *active* neurons to *h*, or multiply those that are there by up · x."""
    how = reads, ACTIVATIONS[neurons.activation], neurons.activation_threshold
    _products(work, neurons.first, neurons.up, neurons.up_bias, how, h, active, scores, threshold)


def _products(
    work: _Chunks,
    first: PackedMatrix,
    up: PackedMatrix | None,
    bias: "torch.Tensor | None",
    how: tuple[Literal["first", "both", "up"], int, float],
    h: "torch.Tensor",
    active: _Active,
    scores: "torch.Tensor | None",
    threshold: float,
) -> None:
    reads, activation, activation_threshold = how
    gather_gemv[(min(work.sizes.rows_at_once, work.length), work.count)](
        *_rows(first),
        *_rows(first if up is None else up),
        bias,
        work.x,
        active.index,
        active.counts,
        scores,
        0 if scores is None else scores.stride(0),
        float(threshold),
        h,
        h.stride(0),
        activation,
        float(activation_threshold),
        work.neurons,
        work.length,
        len(work.x),
        **_row_layout(first),
        READS=reads,
        GATHER=active.index is not None,
        HAS_BIAS=bias is not None,
        TOKENS=work.padded_tokens,
        BLOCKS=work.sizes.gemv_blocks,
        **TWO_WARPS,
    )


def _add_rows(work: _Chunks, down: PackedMatrix, h: "torch.Tensor", active: _Active) -> "torch.Tensor":
    """Σ h · down over the active neurons: float32 [tokens, columns]."""
    tokens, columns = work.x.shape
    sums, y = work.x.new_empty(work.count, tokens, columns), work.x.new_empty(tokens, columns)
    pieces = -(-columns // (64 * work.sizes.axpy_blocks))
    gather_axpy[(pieces, work.count)](
        *_rows(down),
        active.index,
        active.counts,
        h,
        h.stride(0),
        sums,
        work.neurons,
        work.length,
        tokens,
        **_row_layout(down),
        GATHER=active.index is not None,
        TOKENS=work.padded_tokens,
        BLOCKS=work.sizes.axpy_blocks,
        UNROLL=work.sizes.axpy_unroll,
        **ONE_WARP,
    )
    width = 64
    add_chunks[(-(-columns // width), tokens)](
        sums, y, work.count, tokens, COLUMNS=columns, WIDTH=width, UNROLL=32, **ONE_WARP
    )
    return y


def _rows(packed: PackedMatrix) -> "tuple[torch.Tensor, torch.Tensor, int, int]":
    """Values and scales of a matrix's rows as tensors to point into, and how far rows are apart in each."""
    import torch

    if packed.head_bytes == 0:
        values = packed.values()
        return values, values, values.stride(0), 0
    scales = packed.data.view(torch.float16)
    return packed.data, scales, packed.data.stride(0), scales.stride(0)


def _row_layout(packed: PackedMatrix) -> dict[str, int | str]:
    """Constants of the kernels that describe a row."""
    return {
        "COLUMNS": packed.columns,
        "PADDED": packed.stored_columns,
        "HEAD": packed.head_bytes,
        "KIND": packed.kind if packed.head_bytes else "plain",
    }
