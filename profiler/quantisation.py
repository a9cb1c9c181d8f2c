"""Weights in GGUF's block types: quantised, dequantised, and carried as blocks to the kernels that know them.

Values are quantised and dequantised by the ``gguf`` package, so the bytes are those of llama.cpp's reference quantiser;
what is added here is that matrices pass through in blocks of rows, because the package's intermediate results take
several times the memory of what they are made from.

    Q4_0   18 bytes for 32 values: F16 d, then 16 bytes; value j = ((byte j & 15) − 8)·d, value j+16 the high halves
    Q8_0   34 bytes for 32 values: F16 d, then 32 int8; value j = byte j·d
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from .errors import GgufError
from .gguf_container import BLOCKS, TensorType, tensor_bytes

if TYPE_CHECKING:
    import torch

QuantisedKind = Literal["q4_0", "q8_0"]
KINDS: dict[TensorType, QuantisedKind] = {TensorType.Q4_0: "q4_0", TensorType.Q8_0: "q8_0"}
_VALUES_AT_ONCE = 2**21  # 8 MiB as float32


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """A matrix of *shape* (rows, columns) as blocks: uint8 [rows, bytes of a row], often a view into the file."""

    kind: QuantisedKind
    shape: tuple[int, int]
    blocks: np.ndarray

    def __len__(self) -> int:
        return self.shape[0]

    def dequantise(self, dtype: "torch.dtype") -> "torch.Tensor":
        """The values [rows, columns] in *dtype*."""
        return dequantise(self.blocks, TensorType[self.kind.upper()], dtype)

    def rows(self, first: int, end: int) -> "QuantisedMatrix":
        """Rows [first, end) as a view."""
        return QuantisedMatrix(self.kind, (end - first, self.shape[1]), self.blocks[first:end])

    def select(self, order: np.ndarray) -> "QuantisedMatrix":
        """The rows *order* (int64 indices) as a copy."""
        return QuantisedMatrix(self.kind, (len(order), self.shape[1]), self.blocks[order])

    def __getitem__(self, order: "torch.Tensor") -> "QuantisedMatrix":
        """Rows by a tensor of indices, as a tensor of values would give them."""
        return self.select(order.numpy())

    @property
    def T(self) -> "TurnedMatrix":
        """Rows and columns exchanged, as of a tensor of values; nothing is computed yet."""
        return TurnedMatrix(self)


@dataclass(frozen=True, eq=False)
class TurnedMatrix:
    """The transpose of ``stored``: its blocks run down the columns, so that rows exist as floating point alone."""

    stored: QuantisedMatrix

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.stored.shape
        return columns, rows

    def dequantise(self, dtype: "torch.dtype") -> "torch.Tensor":
        """The values [rows, columns] in *dtype*."""
        return self.stored.dequantise(dtype).T

    def __getitem__(self, order: "torch.Tensor") -> "torch.Tensor":
        """Rows by a tensor of indices, float32."""
        import torch

        return self.dequantise(torch.float32)[order]


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """Rows *order* (int64 [rows]) of ``stored``, whose rows have no gaps; nothing is copied yet."""

    stored: "torch.Tensor | QuantisedMatrix"
    order: np.ndarray

    def __len__(self) -> int:
        return len(self.order)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.order), self.stored.shape[1]

    def copied(self) -> "torch.Tensor | QuantisedMatrix":
        """The rows in memory of their own."""
        return self.stored.select(self.order) if isinstance(self.stored, QuantisedMatrix) else self.stored[self.order]


def select_rows(
    matrix: "torch.Tensor | QuantisedMatrix | TurnedMatrix", order: np.ndarray
) -> "torch.Tensor | SelectedRows":
    """Rows *order* (int64 [rows]) of *matrix*: described where its rows can be read one by one, else copied."""
    import torch

    if isinstance(matrix, QuantisedMatrix) or (isinstance(matrix, torch.Tensor) and matrix.stride(1) == 1):
        return SelectedRows(matrix, order)
    return matrix[torch.from_numpy(order)]


def not_finite() -> GgufError:
    """What a matrix is refused with that has an infinity or a NaN."""
    return GgufError("a weight is not finite and cannot be quantised: use an undamaged model")


def dense(
    tensor: "torch.Tensor | QuantisedMatrix | TurnedMatrix", dtype: "torch.dtype | None" = None
) -> "torch.Tensor":
    """*tensor* as floating point, in *dtype* or, without one, as stored (float32 for blocks)."""
    import torch

    if isinstance(tensor, QuantisedMatrix | TurnedMatrix):
        return tensor.dequantise(dtype or torch.float32)
    return tensor if dtype is None else tensor.to(dtype)


def quantisable(columns: int, tensor_type: TensorType) -> bool:
    """Whether rows of that many values are whole blocks."""
    return columns % BLOCKS[tensor_type][0] == 0


def quantise(matrix: "torch.Tensor", tensor_type: TensorType) -> np.ndarray:
    """Blocks uint8 [rows, bytes of a row] of a matrix [rows, columns] of any floating type.

    Raises ``GgufError`` for rows that are no whole number of blocks and for values that are not finite.
    """
    import gguf

    rows, columns = matrix.shape
    blocks = np.empty((rows, tensor_bytes((columns,), tensor_type)), np.uint8)
    kind = gguf.GGMLQuantizationType[tensor_type.name]
    for first, end in _row_blocks(rows, columns):
        values = matrix[first:end].float().contiguous()
        if not values.isfinite().all():
            raise not_finite()
        blocks[first:end] = gguf.quants.quantize(values.numpy(), kind)
    return blocks


def dequantise(blocks: np.ndarray, tensor_type: TensorType, dtype: "torch.dtype") -> "torch.Tensor":
    """Values [rows, columns] in *dtype* out of blocks uint8 [rows, bytes of a row] of any type in the container."""
    import gguf
    import torch

    values, num_bytes = BLOCKS[tensor_type]
    rows, columns = len(blocks), blocks.shape[1] // num_bytes * values
    result = torch.empty((rows, columns), dtype=dtype)
    kind = gguf.GGMLQuantizationType[tensor_type.name]
    for first, end in _row_blocks(rows, columns):
        # Foreign bytes may hold scales that overflow; what they stand for is then infinite, and no reason to print.
        with np.errstate(all="ignore"):
            result[first:end] = torch.from_numpy(gguf.quants.dequantize(blocks[first:end], kind))
    return result


def _row_blocks(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _VALUES_AT_ONCE // max(columns, 1))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))
