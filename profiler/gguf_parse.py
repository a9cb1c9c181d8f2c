"""Reads the header of a GGUF container (:mod:`.gguf_container`), holding every number in it against the bytes there are."""

import mmap
import struct
from typing import Any

import numpy as np

from .errors import GgufError
from .gguf_types import (
    DEFAULT_ALIGNMENT,
    I32_IN_CURRENT_GGML,
    MAX_ALIGNMENT,
    MAX_DIMENSIONS,
    MAX_KEY_VALUES,
    MAX_NAME_BYTES,
    MAX_TENSORS,
    NUMBER_FORMATS,
    VERSION,
    KeyValue,
    Magic,
    TensorInfo,
    TensorType,
    ValueType,
    padded,
    refuse_duplicates,
    tensor_bytes,
)

_REMEDY = "make or download the file again"
LONGEST_GREETING = 64  # bytes that tell apart what is no GGUF file at all


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
        layout = "<" + NUMBER_FORMATS[value_type]
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


def parse_header(buffer: mmap.mmap, magic: Magic) -> tuple[dict[str, KeyValue], dict[str, TensorInfo], dict[str, int]]:
    """Keys, tensors and where each tensor's data begins, by name in file order; raises ``GgufError``."""
    cursor = _Cursor(buffer)
    begin = cursor.take(4, "its magic")
    if buffer[begin : begin + 4] != magic.encode():
        raise GgufError(foreign(buffer[:LONGEST_GREETING], magic))
    version = cursor.number(ValueType.U32, "its version")
    if version != VERSION:
        raise GgufError(f"has GGUF version {version} and this release reads {VERSION}: convert the file")
    num_tensors = cursor.count(MAX_TENSORS, "a number of tensors")
    num_key_values = cursor.count(MAX_KEY_VALUES, "a number of keys")
    key_values = [_read_key_value(cursor) for _ in range(num_key_values)]
    refuse_duplicates([item.name for item in key_values], "key")
    infos_and_offsets = [_read_tensor_info(cursor, magic) for _ in range(num_tensors)]
    refuse_duplicates([info.name for info, _ in infos_and_offsets], "tensor")
    by_name = {item.name: item for item in key_values}
    alignment = _alignment(by_name.get("general.alignment"))
    data_start = padded(cursor.position, alignment)
    starts, end = {}, 0
    for info, offset in infos_and_offsets:
        if offset != padded(end, alignment):
            raise GgufError(f"tensor {info.name!r} is not where the one before it ends: {_REMEDY}")
        starts[info.name], end = data_start + offset, offset + info.num_bytes
        if data_start + end > len(buffer):
            raise GgufError(f"the file ends within tensor {info.name!r}: {_REMEDY}")
    if len(buffer) > data_start + padded(end, alignment):
        raise GgufError(f"the file goes on after its last tensor: {_REMEDY}")
    return by_name, {info.name: info for info, _ in infos_and_offsets}, starts


def foreign(begin: bytes, wanted: str) -> str:
    """What a file is that begins otherwise; the two things that downloads leave behind are named."""
    if not begin:
        return f"is empty: {_REMEDY}"
    if begin.startswith(b"version https://git-lfs"):
        return "is a git-lfs pointer, not the file itself: fetch it with git lfs pull"
    if begin.lstrip()[:5].lower() in (b"<!doc", b"<html", b"<?xml"):
        return "is a web page, not the file itself: download it again"
    return f"begins with {begin[:4]!r} instead of {wanted!r}: give a file of that kind"


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
    smallest = 8 if item_type == ValueType.STRING else struct.calcsize("<" + NUMBER_FORMATS[item_type])
    length = cursor.count(len(cursor.buffer) // smallest, f"the length of key {name!r}")
    if item_type == ValueType.STRING:
        strings = cursor.strings(length, f"an item of key {name!r}")
        return KeyValue(name, value_type, strings, item_type)
    begin = cursor.take(length * smallest, f"key {name!r}")
    stored = "u1" if item_type == ValueType.BOOL else "<" + NUMBER_FORMATS[item_type]
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
