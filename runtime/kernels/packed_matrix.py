"""A matrix of weights as rows of bytes: in plain floating point, or in blocks packed for the native kernels.

One copy of the weights serves everything: native kernels read the rows where they are, products of many tokens take the
rows as a strided tensor (F32, BF16) or in tiles that are converted on the way (F16, blocks).

    float32, bfloat16, float16   the values
    q8_0, q4_0                   F16 scales of all blocks of 32 values, padded to 64 bytes; then the quants of the row,
                                 padded with zeros to 128 values. q8_0: one int8 each. q4_0: 64 bytes per 128 values, byte i
                                 with value i in its low and value 64 + i in its high nibble, 8 added to both
"""

import mmap
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from pi_toolkit.profiler.gguf_types import TensorType, tensor_bytes
from pi_toolkit.profiler.quantisation import (
    QuantisedKind,
    QuantisedMatrix,
    SelectedRows,
    TurnedMatrix,
    dense,
    not_finite,
    quantise,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    Rows = torch.Tensor | QuantisedMatrix | TurnedMatrix | SelectedRows

Kind = Literal["float32", "bfloat16", "float16", "q8_0", "q4_0"]
KINDS: tuple[Kind, ...] = ("float32", "bfloat16", "float16", "q8_0", "q4_0")  # in the order of row_kernels.h
BLOCK, GROUP, LINE = 32, 128, 64
# Values converted at once for a product of many tokens: 8 MiB as float32, which stays in the caches.
TILE_VALUES = 2**21
HUGE_PAGE = 2**21


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """``data`` uint8 [rows, bytes of a row]; rows may be further apart than they are long."""

    kind: Kind
    columns: int
    data: "torch.Tensor"

    @property
    def rows(self) -> int:
        return len(self.data)

    @property
    def device(self) -> "torch.device":
        return self.data.device

    def values(self, first: int = 0, end: int | None = None) -> "torch.Tensor":
        """Rows [first, end) as floating point [rows, columns]: a view in the stored type, or float32 for blocks."""
        rows = self.data[first:end]
        dtype = _dtype(self.kind)
        return _unpack(self.kind, rows, self.columns) if dtype is None else rows.view(dtype)

    def select(self, index: "torch.Tensor") -> "torch.Tensor":
        """float32 [..., columns] of the rows at *index*, int64 [...] on the CPU."""
        rows = self.data[index.flatten().to(self.device)]
        values = PackedMatrix(self.kind, self.columns, rows).values().float()
        return values.view(*index.shape, self.columns)

    @property
    def head_bytes(self) -> int:
        """Bytes of a row before its values: the scales of blocks."""
        return 0 if _dtype(self.kind) else _scales_bytes(self.columns)

    @property
    def stored_columns(self) -> int:
        """Values of a row with the padding of blocks."""
        return self.columns if _dtype(self.kind) else _padded(self.columns, GROUP)

    @property
    def is_plain(self) -> bool:
        """Whether products read the values where they are, without a conversion."""
        return _dtype(self.kind) == self.product_dtype

    @property
    def product_dtype(self) -> "torch.dtype":
        """What products of many tokens are computed in.

        On a CPU torch multiplies F16 some 600 times slower than float32 (43 s against 0.07 s for one 7B down projection), and
        BF16 four times faster, which blocks of few bits lose nothing by.
        """
        import torch

        if self.kind == "float16":
            return torch.float16 if self.device.type == "cuda" else torch.float32
        return torch.float32 if self.kind == "float32" else torch.bfloat16

    def multiply(self, x: "torch.Tensor") -> "torch.Tensor":
        """x · Wᵀ: [tokens, rows] from [tokens, columns], in the type of *x*."""
        return self._multiply(x, self.product_dtype)

    def multiply_exactly(self, x: "torch.Tensor") -> "torch.Tensor":
        """The same with every product and sum in float32."""
        import torch

        return self._multiply(x, torch.float32)

    def _multiply(self, x: "torch.Tensor", dtype: "torch.dtype") -> "torch.Tensor":
        import torch

        factors = x.to(dtype)
        if _dtype(self.kind) == dtype:
            return (factors @ self.values().T).to(x.dtype)
        tiles = row_tiles(self.rows, self.columns)
        return torch.cat([factors @ self.values(a, b).to(dtype).T for a, b in tiles], dim=-1).to(x.dtype)


def row_tiles(rows: int, columns: int) -> "Iterator[tuple[int, int]]":
    """[first, end) of tiles of at most :data:`TILE_VALUES` values."""
    step = max(1, TILE_VALUES // columns)
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


def row_bytes(kind: Kind, columns: int) -> int:
    """Bytes of one packed row."""
    dtype = _dtype(kind)
    if dtype is not None:
        return columns * dtype.itemsize
    return _scales_bytes(columns) + _padded(columns, GROUP) // (1 if kind == "q8_0" else 2)


def allocate(rows: int, bytes_per_row: int, device: "torch.device") -> "torch.Tensor":
    """Uninitialised uint8 [rows, bytes_per_row]; on a CPU in huge pages where the system has them.

    Rows picked at random cost a page walk each with pages of 4 KiB: 14 instead of 10 GB/s per core (4096 BF16 values per
    row, a tenth of the rows, one Zen 5 core).
    """
    import torch

    size = rows * bytes_per_row
    if device.type != "cpu" or size < HUGE_PAGE:
        return torch.empty(rows, bytes_per_row, dtype=torch.uint8, device=device)
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(rows, bytes_per_row, dtype=torch.uint8)
    # Private, because shared memory, mmap's default, gets no huge pages.
    memory = mmap.mmap(-1, _padded(size, HUGE_PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size).view(rows, bytes_per_row)


def fill(target: "torch.Tensor", kind: Kind, source: "Rows") -> PackedMatrix:
    """Pack *source* [rows, columns] into *target*, uint8 [rows, at least row_bytes]; natively where that is possible.

    Floating point that is to become blocks is quantised; blocks of one type become another, and turned ones blocks of
    rows, by way of float32. Raises ``GgufError`` for values that are not finite and rows that are no whole blocks.
    """
    import torch

    from .native import kernels

    rows, columns = source.shape
    target = target[:, : row_bytes(kind, columns)]
    packed = PackedMatrix(kind, columns, target)
    if target.device.type != "cpu":  # packed here and sent there
        target.copy_(pack(source, kind, torch.device("cpu")).data)
        return packed
    native = kernels(torch.get_num_threads())
    if native is None:
        fill_plainly(packed, source)
        return packed
    if kind == "q8_0" or kind == "q4_0":
        tensor_bytes((columns,), TensorType[kind.upper()])
    stored = _Stored.of(source)
    order = 0 if stored.order is None else stored.order.ctypes.data
    where = (stored.data.data_ptr(), stored.data.stride(0) * stored.data.itemsize, stored.turned, order)
    if not native.pack_weights(
        KINDS.index(stored.kind), *where, rows, columns, KINDS.index(kind), target.data_ptr(), target.stride(0)
    ):
        raise not_finite()
    return packed


def fill_plainly(packed: PackedMatrix, source: "Rows") -> None:
    """:func:`fill` in torch, tile by tile."""
    import torch

    values = source.copied() if isinstance(source, SelectedRows) else source
    if isinstance(values, TurnedMatrix):
        values = values.dequantise(torch.float32)
    for first, end in row_tiles(packed.rows, packed.columns):
        tile = values.rows(first, end) if isinstance(values, QuantisedMatrix) else values[first:end]
        if packed.kind == "q8_0" or packed.kind == "q4_0":
            packed.data[first:end] = _pack(_as_blocks(tile, packed.kind), packed.columns)
        else:
            packed.data.view(getattr(torch, packed.kind))[first:end] = dense(tile)


@dataclass(frozen=True)
class _Stored:
    """A matrix in memory as the native kernels describe it: ``data`` [rows or, where it is turned, columns, …]; row r of what
    is wanted is row ``order[r]`` (int64) of it, or row r."""

    kind: Kind
    data: "torch.Tensor"
    turned: bool
    order: np.ndarray | None = None

    @classmethod
    def of(cls, source: "Rows") -> "_Stored":
        """A view of *source*, or a copy where its values have gaps between them or are of a type of their own."""
        if isinstance(source, SelectedRows):
            order = np.ascontiguousarray(source.order, np.int64)
            assert not len(order) or 0 <= order.min() <= order.max() < len(source.stored), "no row beyond the matrix"
            stored = cls.of(source.stored)
            return cls(stored.kind, stored.data, False, order)
        if isinstance(source, TurnedMatrix):
            return cls(source.stored.kind, _bytes(source.stored.blocks), True)
        if isinstance(source, QuantisedMatrix):
            return cls(source.kind, _bytes(source.blocks), False)
        name = str(source.dtype).removeprefix("torch.")
        kind = next((kind for kind in KINDS if kind == name), None)
        if kind is None:
            return cls.of(source.float())
        if source.stride(1) == 1:
            return cls(kind, source, False)
        return cls(kind, source.T, True) if source.stride(0) == 1 else cls(kind, source.contiguous(), False)


def _bytes(blocks: np.ndarray) -> "torch.Tensor":
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(blocks)


def pack(source: "Rows", kind: Kind, device: "torch.device") -> PackedMatrix:
    """*source* [rows, columns] as a matrix of its own on *device*."""
    rows, columns = source.shape
    return fill(allocate(rows, row_bytes(kind, columns), device), kind, source)


def _as_blocks(tile: "torch.Tensor | QuantisedMatrix", kind: QuantisedKind) -> QuantisedMatrix:
    if isinstance(tile, QuantisedMatrix) and tile.kind == kind:
        return tile
    return QuantisedMatrix(kind, (len(tile), tile.shape[1]), quantise(dense(tile), TensorType[kind.upper()]))


def _dtype(kind: str) -> "torch.dtype | None":
    """None for block types."""
    import torch

    return getattr(torch, kind, None)


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _scales_bytes(columns: int) -> int:
    return _padded(_padded(columns, GROUP) // BLOCK * 2, LINE)


def _pack(matrix: QuantisedMatrix, columns: int) -> "torch.Tensor":
    """GGUF's blocks (18 or 34 bytes, scale first) to packed rows.

    A q4_0 block holds value j in the low and value j + 16 in the high nibble of its byte j; so 16 packed bytes take a
    half of each byte of one block and the same half of the block two further on.
    """
    import torch

    rows, blocks = matrix.shape[0], columns // BLOCK
    groups, head = _padded(columns, GROUP) // GROUP, _scales_bytes(columns)
    stored = torch.from_numpy(np.ascontiguousarray(matrix.blocks)).view(rows, blocks, -1)
    packed = torch.zeros(rows, row_bytes(matrix.kind, columns), dtype=torch.uint8)
    packed[:, : 2 * blocks] = stored[:, :, :2].reshape(rows, -1)
    quants = stored[:, :, 2:]
    if matrix.kind == "q8_0":
        packed[:, head : head + columns] = quants.reshape(rows, -1)
        return packed
    if blocks % 4:  # whole groups of zeros, which are stored as 8
        quants = torch.cat([quants, torch.full((rows, -blocks % 4, 16), 0x88, dtype=torch.uint8)], dim=1)
    quants = quants.reshape(rows, groups, 4, 16)
    front, back = quants[:, :, :2], quants[:, :, 2:]
    halves = packed[:, head:].view(rows, groups, 2, 2, 16)
    halves[:, :, :, 0] = (front & 15) | (back << 4)
    halves[:, :, :, 1] = (front >> 4) | (back & 0xF0)
    return packed


def _unpack(kind: str, data: "torch.Tensor", columns: int) -> "torch.Tensor":
    """float32 [rows, columns] of packed rows."""
    import torch

    rows, head = len(data), _scales_bytes(columns)
    padded = _padded(columns, GROUP)
    scales = data[:, : 2 * (padded // BLOCK)].contiguous().view(torch.float16).float()
    quants = data[:, head:]
    if kind == "q8_0":
        values = quants.contiguous().view(torch.int8).float()
    else:
        nibbles = quants.reshape(rows, -1, 1, LINE)
        values = torch.cat([nibbles & 15, nibbles >> 4], dim=2).float().sub_(8.0)
    return (values.reshape(rows, -1, BLOCK) * scales[:, :, None]).reshape(rows, padded)[:, :columns]
