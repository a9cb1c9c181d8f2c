"""What a GGUF container is made of: kinds of values, types of tensors, and the bytes they take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from .errors import GgufError

VERSION, DEFAULT_ALIGNMENT = 3, 32
Magic = Literal["GGUF", "PWRI"]
# Far above any real file (a 400-layer model has some 5000 tensors), far below what would exhaust the memory.
MAX_TENSORS, MAX_KEY_VALUES, MAX_NAME_BYTES, MAX_DIMENSIONS, MAX_ALIGNMENT = 2**17, 2**16, 2**10, 4, 2**16


class ValueType(IntEnum):
    """Type of a key's value."""

    U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


class TensorType(IntEnum):
    """Type of a tensor's values, in the numbering of ``ggml`` at the time PowerInfer branched off."""

    F32, F16, Q4_0, Q4_1 = 0, 1, 2, 3
    Q5_0, Q5_1, Q8_0 = 6, 7, 8
    Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = 10, 11, 12, 13, 14
    I32 = 18
    BF16 = 30  # younger than PowerInfer, whose engine does not know it


I32_IN_CURRENT_GGML = 26
# values and bytes of one block
BLOCKS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.Q2_K: (256, 84),
    TensorType.Q3_K: (256, 110),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
    TensorType.I32: (1, 4),
    TensorType.BF16: (1, 2),
}
# numpy has no BF16: its values are handed out as their bits.
NUMPY_DTYPES = {TensorType.F32: "<f4", TensorType.F16: "<f2", TensorType.I32: "<i4", TensorType.BF16: "<u2"}
NUMBER_FORMATS = dict(zip(ValueType, "BbHhIifB??Qqd", strict=True))


@dataclass(frozen=True)
class KeyValue:
    """One key: an array's ``value`` is a list of strings or a numpy vector, and ``item_type`` says of what."""

    name: str
    type: ValueType
    value: Any
    item_type: ValueType | None = None


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: ``shape`` as numpy has it (the fastest axis last, counted in values)."""

    name: str
    shape: tuple[int, ...]
    type: TensorType

    @property
    def num_bytes(self) -> int:
        return tensor_bytes(self.shape, self.type)


def tensor_bytes(shape: Sequence[int], tensor_type: TensorType) -> int:
    """Bytes of a tensor; raises ``GgufError`` unless its rows are whole blocks."""
    values, num_bytes = BLOCKS[tensor_type]
    if shape[-1] % values:
        raise GgufError(
            f"rows of {shape[-1]} values are no whole number of {tensor_type.name} blocks of {values}: use another type"
        )
    return math.prod(shape) // values * num_bytes


def padded(num_bytes: int, alignment: int) -> int:
    """The next multiple of *alignment*."""
    return -(-num_bytes // alignment) * alignment


def refuse_duplicates(names: Sequence[str], what: str) -> None:
    """Raise ``GgufError`` if two of *names* are equal."""
    if len(set(names)) != len(names):
        raise GgufError(f"a {what} is there twice: make or download the file again")
