"""The GGUF v3 container, which placements (``.gpuidx``) and model files (``.gguf``) are both written in.

Little endian. PowerInfer's files differ from GGUF in their first four bytes only.

    magic       4 bytes  "GGUF", or "PWRI" in PowerInfer's files
    version     u32      3
    n_tensors   u64
    n_kv        u64
    n_kv key-value pairs        string key, u32 value type, value       array = u32 item type, u64 length, items
    n_tensors tensor infos      string name, u32 n_dims, u64 dims[n_dims] (fastest axis first), u32 type, u64 offset
    zeros up to a multiple of the alignment (u32 ``general.alignment``, 32 without it), then the tensors' data, each
    followed by zeros up to the same multiple; an offset counts from the start of the data
    string = u64 length and that many bytes of UTF-8

The files come from strangers: every count, length, dimension and offset is held against the bytes that are really there
before anything is allocated, and data is handed out as views into a read-only memory map.
"""

import math
import mmap
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np

from .atomic_write import atomic_file
from .errors import GgufError

VERSION, DEFAULT_ALIGNMENT = 3, 32
Magic = Literal["GGUF", "PWRI"]
_REMEDY = "make or download the file again"
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
_NUMPY_DTYPES = {TensorType.F32: "<f4", TensorType.F16: "<f2", TensorType.I32: "<i4", TensorType.BF16: "<u2"}
_LONGEST_GREETING = 64  # bytes that tell apart what is no GGUF file at all
_NUMBER_FORMATS = dict(zip(ValueType, "BbHhIifB??Qqd", strict=True))


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


class GgufFile:
    """An open container: ``key_values`` and ``tensors`` by name in file order, data as views into the file."""

    def __init__(
        self, buffer: mmap.mmap, key_values: dict[str, KeyValue], tensors: dict[str, TensorInfo], starts: dict[str, int]
    ) -> None:
        self.key_values, self.tensors = key_values, tensors
        self._buffer, self._starts = buffer, starts

    def value(self, name: str, value_type: ValueType, item_type: ValueType | None = None) -> Any:
        """The value of *name*; raises ``GgufError`` when it is absent or of another type."""
        found = self.key_values.get(name)
        if found is None or (found.type, found.item_type) != (value_type, item_type):
            wanted = value_type.name if item_type is None else f"{value_type.name} of {item_type.name}"
            raise GgufError(f"the file has no key {name!r} of type {wanted}: {_REMEDY}")
        return found.value

    def data(self, name: str) -> np.ndarray:
        """Read-only view: F32, F16, I32, and BF16 as uint16, in the tensor's shape; block types as uint8 [..., row bytes]."""
        info = self.tensors[name]
        raw = np.frombuffer(self._buffer, np.uint8, info.num_bytes, self._starts[name])
        if info.type in _NUMPY_DTYPES:
            return raw.view(_NUMPY_DTYPES[info.type]).reshape(info.shape)
        return raw.reshape(*info.shape[:-1], tensor_bytes(info.shape[-1:], info.type))

    def drop_pages(self, name: str) -> None:
        """Take a tensor's pages out of this process; views of it stay valid and read them from the file again."""
        begin = self._starts[name] // mmap.PAGESIZE * mmap.PAGESIZE
        length = self._starts[name] + self.tensors[name].num_bytes - begin
        if length and hasattr(mmap, "MADV_DONTNEED"):
            self._buffer.madvise(mmap.MADV_DONTNEED, begin, length)


def read_magic(path: Path) -> Magic:
    """Which of the two kinds of file *path* is; raises ``GgufError`` for anything else."""
    try:
        with path.open("rb") as file:
            begin = file.read(_LONGEST_GREETING)
    except OSError as error:
        raise GgufError(f"{str(path)!r} cannot be read ({error.strerror}): check the path") from error
    for magic in ("GGUF", "PWRI"):
        if begin[:4] == magic.encode():
            return magic
    raise GgufError(f"{str(path)!r} {_foreign(begin, 'GGUF or PWRI')}")


def read(path: Path, magic: Magic) -> GgufFile:
    """Open *path*; raises ``GgufError`` for anything that is not a complete, well-formed container of that *magic*."""
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise GgufError(f"{str(path)!r} cannot be read ({error.strerror}): check the path") from error
    except ValueError:  # mmap's word for an empty file
        raise GgufError(f"{str(path)!r} is empty: {_REMEDY}") from None
    try:
        return _parse(buffer, magic)
    except GgufError as error:
        raise GgufError(f"{str(path)!r}: {error.message}") from None


def write(
    path: Path,
    magic: Magic,
    key_values: Sequence[KeyValue],
    tensors: Sequence[TensorInfo],
    arrays: Iterable[np.ndarray],
) -> None:
    """Write *path* atomically: keys and tensors in the given order, data padded to 32 bytes.

    *arrays* yields one contiguous array per tensor, of exactly its bytes; a generator keeps only one in memory.
    """
    header = encode_header(magic, key_values, tensors)
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(header.ljust(_padded(len(header), DEFAULT_ALIGNMENT), b"\0"))
        for info, array in zip(tensors, arrays, strict=True):
            if array.nbytes != info.num_bytes:
                raise GgufError(f"tensor {info.name!r} has {array.nbytes} bytes for {info.num_bytes}: report this bug")
            file.write(np.ascontiguousarray(array).data)
            file.write(bytes(_padded(info.num_bytes, DEFAULT_ALIGNMENT) - info.num_bytes))


def encode_header(magic: Magic, key_values: Sequence[KeyValue], tensors: Sequence[TensorInfo]) -> bytes:
    """Everything before the data, without the padding; raises ``GgufError`` for a name that is there twice."""
    _refuse_duplicates([item.name for item in key_values], "key")
    _refuse_duplicates([info.name for info in tensors], "tensor")
    header = bytearray(magic.encode() + struct.pack("<IQQ", VERSION, len(tensors), len(key_values)))
    for item in key_values:
        header += _string(item.name) + struct.pack("<I", item.type) + _encode(item)
    offset = 0
    for info in tensors:
        dims = info.shape[::-1]
        number = I32_IN_CURRENT_GGML if (magic, info.type) == ("GGUF", TensorType.I32) else info.type
        header += _string(info.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)
        offset += _padded(info.num_bytes, DEFAULT_ALIGNMENT)
    return bytes(header)


def _padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def _string(text: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise GgufError(f"the text {text[:40]!a} is no valid Unicode: mend the name or the tokenizer") from error
    return struct.pack("<Q", len(encoded)) + encoded


def _encode(item: KeyValue) -> bytes:
    if item.type == ValueType.STRING:
        return _string(item.value)
    if item.type != ValueType.ARRAY:
        return struct.pack("<" + _NUMBER_FORMATS[item.type], item.value)
    assert item.item_type is not None
    head = struct.pack("<IQ", item.item_type, len(item.value))
    if item.item_type == ValueType.STRING:
        return head + b"".join(_string(text) for text in item.value)
    return head + np.asarray(item.value, "<" + _NUMBER_FORMATS[item.item_type]).tobytes()


def _refuse_duplicates(names: Sequence[str], what: str) -> None:
    if len(set(names)) != len(names):
        raise GgufError(f"a {what} is there twice: {_REMEDY}")


class _Cursor:
    """Reads forward through the header and never past the end of the file."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer, self.position = buffer, 0

    def take(self, num_bytes: int, what: str) -> int:
        """Step over *num_bytes* and return where they begin."""
        begin = self.position
        if num_bytes > len(self.buffer) - begin:
            raise GgufError(f"the file ends within {what}: {_REMEDY}")
        self.position = begin + num_bytes
        return begin

    def number(self, value_type: ValueType, what: str) -> Any:
        layout = "<" + _NUMBER_FORMATS[value_type]
        begin = self.take(struct.calcsize(layout), what)
        if value_type == ValueType.BOOL and self.buffer[begin] > 1:
            raise GgufError(f"{what} is neither true nor false: {_REMEDY}")
        return struct.unpack_from(layout, self.buffer, begin)[0]

    def count(self, limit: int, what: str, value_type: ValueType = ValueType.U64) -> int:
        count = self.number(value_type, what)
        if count > limit:
            raise GgufError(f"{what} of {count} is beyond the limit of {limit}: {_REMEDY}")
        return count

    def string(self, limit: int, what: str) -> str:
        length = self.count(limit, f"the length of {what}")
        begin = self.take(length, what)
        try:
            return self.buffer[begin : begin + length].decode()
        except UnicodeDecodeError:
            raise GgufError(f"{what} is not UTF-8: {_REMEDY}") from None

    def strings(self, length: int, what: str) -> list[str]:
        """*length* strings in one tight loop: a vocabulary has 100,000 of them, and every opening of a file reads it."""
        buffer, position, end, size_of = self.buffer, self.position, len(self.buffer), struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(length):
            try:
                begin = position + 8
                behind = begin + size_of(buffer, position)[0]
                if behind > end:
                    raise ValueError
                found.append(buffer[begin:behind].decode())
            except (struct.error, ValueError):
                self.position = position
                self.string(end, what)  # which knows the sentence
                raise AssertionError("a string that cannot be read was read") from None
            position = behind
        self.position = position
        return found


def _foreign(begin: bytes, wanted: str) -> str:
    """What a file is that begins otherwise; the two things that downloads leave behind are named."""
    if not begin:
        return f"is empty: {_REMEDY}"
    if begin.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the file itself: fetch it with git lfs pull"
    if begin.lstrip()[:5].lower() in (b"<!doc", b"<html", b"<?xml"):
        return "is a web page, not the file itself: download it again"
    return f"begins with {begin[:4]!r} instead of {wanted!r}: give a file of that kind"


def _parse(buffer: mmap.mmap, magic: Magic) -> GgufFile:
    cursor = _Cursor(buffer)
    begin = cursor.take(4, "its magic")
    if buffer[begin : begin + 4] != magic.encode():
        raise GgufError(_foreign(buffer[:_LONGEST_GREETING], magic))
    version = cursor.number(ValueType.U32, "its version")
    if version != VERSION:
        raise GgufError(f"has GGUF version {version} and this release reads {VERSION}: convert the file")
    num_tensors = cursor.count(MAX_TENSORS, "a number of tensors")
    num_key_values = cursor.count(MAX_KEY_VALUES, "a number of keys")
    key_values = [_read_key_value(cursor) for _ in range(num_key_values)]
    _refuse_duplicates([item.name for item in key_values], "key")
    infos_and_offsets = [_read_tensor_info(cursor, magic) for _ in range(num_tensors)]
    _refuse_duplicates([info.name for info, _ in infos_and_offsets], "tensor")
    by_name = {item.name: item for item in key_values}
    alignment = _alignment(by_name.get("general.alignment"))
    data_start = _padded(cursor.position, alignment)
    starts, end = {}, 0
    for info, offset in infos_and_offsets:
        if offset != _padded(end, alignment):
            raise GgufError(f"tensor {info.name!r} is not where the one before it ends: {_REMEDY}")
        starts[info.name], end = data_start + offset, offset + info.num_bytes
        if data_start + end > len(buffer):
            raise GgufError(f"the file ends within tensor {info.name!r}: {_REMEDY}")
    if len(buffer) > data_start + _padded(end, alignment):
        raise GgufError(f"the file goes on after its last tensor: {_REMEDY}")
    return GgufFile(buffer, by_name, {info.name: info for info, _ in infos_and_offsets}, starts)


def _read_key_value(cursor: _Cursor) -> KeyValue:
    name = cursor.string(MAX_NAME_BYTES, "a key's name")
    value_type = _value_type(cursor, name)
    if value_type == ValueType.STRING:
        return KeyValue(name, value_type, cursor.string(len(cursor.buffer), f"key {name!r}"))
    if value_type != ValueType.ARRAY:
        return KeyValue(name, value_type, cursor.number(value_type, f"key {name!r}"))
    item_type = _value_type(cursor, name)
    if item_type == ValueType.ARRAY:
        raise GgufError(f"key {name!r} is an array of arrays: {_REMEDY}")
    smallest = 8 if item_type == ValueType.STRING else struct.calcsize("<" + _NUMBER_FORMATS[item_type])
    length = cursor.count(len(cursor.buffer) // smallest, f"the length of key {name!r}")
    if item_type == ValueType.STRING:
        strings = cursor.strings(length, f"an item of key {name!r}")
        return KeyValue(name, value_type, strings, item_type)
    begin = cursor.take(length * smallest, f"key {name!r}")
    stored = "u1" if item_type == ValueType.BOOL else "<" + _NUMBER_FORMATS[item_type]
    values = np.frombuffer(cursor.buffer, stored, length, begin)
    if item_type == ValueType.BOOL:
        if (values > 1).any():
            raise GgufError(f"an item of key {name!r} is neither true nor false: {_REMEDY}")
        values = values.astype(bool)
    return KeyValue(name, value_type, values, item_type)


def _value_type(cursor: _Cursor, name: str) -> ValueType:
    number = cursor.number(ValueType.U32, f"the type of key {name!r}")
    try:
        return ValueType(number)
    except ValueError:
        raise GgufError(f"key {name!r} has the unknown type {number}: {_REMEDY}") from None


def _read_tensor_info(cursor: _Cursor, magic: Magic) -> tuple[TensorInfo, int]:
    name = cursor.string(MAX_NAME_BYTES, "a tensor's name")
    what = f"the description of tensor {name!r}"
    num_dims = cursor.count(MAX_DIMENSIONS, what, ValueType.U32)
    if num_dims == 0:
        raise GgufError(f"tensor {name!r} has no dimensions: {_REMEDY}")
    dims = [cursor.count(2**48, what) for _ in range(num_dims)]
    number = cursor.number(ValueType.U32, what)
    # Number 18 is a quantised type in files by current ggml, which numbers I32 as 26.
    known = number in set(TensorType) and not (magic == "GGUF" and number == TensorType.I32)
    if not known and number != I32_IN_CURRENT_GGML:
        raise GgufError(f"tensor {name!r} has the unknown type {number}: convert the file to F16, Q8_0 or Q4_0")
    tensor_type = TensorType(number) if known else TensorType.I32
    info = TensorInfo(name, tuple(dims[::-1]), tensor_type)
    tensor_bytes(info.shape, tensor_type)
    return info, cursor.number(ValueType.U64, what)


def _alignment(item: KeyValue | None) -> int:
    if item is None:
        return DEFAULT_ALIGNMENT
    usable = item.type == ValueType.U32 and 0 < item.value <= MAX_ALIGNMENT and item.value & (item.value - 1) == 0
    if not usable:
        raise GgufError(f"states an alignment of {item.value!r}, which is no usable power of two: {_REMEDY}")
    return item.value
