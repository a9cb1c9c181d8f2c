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

import mmap
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .atomic_write import atomic_file
from .errors import GgufError
from .gguf_parse import LONGEST_GREETING, foreign, parse_header
from .gguf_types import (
    BLOCKS,
    DEFAULT_ALIGNMENT,
    I32_IN_CURRENT_GGML,
    NUMBER_FORMATS,
    NUMPY_DTYPES,
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

__all__ = [
    "BLOCKS",
    "GgufFile",
    "KeyValue",
    "Magic",
    "TensorInfo",
    "TensorType",
    "ValueType",
    "encode_header",
    "read",
    "read_magic",
    "tensor_bytes",
    "write",
]
_REMEDY = "make or download the file again"


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
        if info.type in NUMPY_DTYPES:
            return raw.view(NUMPY_DTYPES[info.type]).reshape(info.shape)
        return raw.reshape(*info.shape[:-1], tensor_bytes(info.shape[-1:], info.type))

    def drop_pages(self, name: str | None = None) -> None:
        """Take a tensor's pages, or all, out of this process; views stay valid and read them from the file again."""
        begin, length = 0, len(self._buffer)
        if name is not None:
            begin = self._starts[name] // mmap.PAGESIZE * mmap.PAGESIZE
            length = self._starts[name] + self.tensors[name].num_bytes - begin
        if length and hasattr(mmap, "MADV_DONTNEED"):
            self._buffer.madvise(mmap.MADV_DONTNEED, begin, length)


def read_magic(path: Path) -> Magic:
    """Which of the two kinds of file *path* is; raises ``GgufError`` for anything else."""
    try:
        with path.open("rb") as file:
            begin = file.read(LONGEST_GREETING)
    except OSError as error:
        raise GgufError(f"{str(path)!r} cannot be read ({error.strerror}): check the path") from error
    for magic in ("GGUF", "PWRI"):
        if begin[:4] == magic.encode():
            return magic
    raise GgufError(f"{str(path)!r} {foreign(begin, 'GGUF or PWRI')}")


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
        return GgufFile(buffer, *parse_header(buffer, magic))
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
        file.write(header.ljust(padded(len(header), DEFAULT_ALIGNMENT), b"\0"))
        for info, array in zip(tensors, arrays, strict=True):
            if array.nbytes != info.num_bytes:
                raise GgufError(f"tensor {info.name!r} has {array.nbytes} bytes for {info.num_bytes}: report this bug")
            file.write(np.ascontiguousarray(array).data)
            file.write(bytes(padded(info.num_bytes, DEFAULT_ALIGNMENT) - info.num_bytes))


def encode_header(magic: Magic, key_values: Sequence[KeyValue], tensors: Sequence[TensorInfo]) -> bytes:
    """Everything before the data, without the padding; raises ``GgufError`` for a name that is there twice."""
    refuse_duplicates([item.name for item in key_values], "key")
    refuse_duplicates([info.name for info in tensors], "tensor")
    header = bytearray(magic.encode() + struct.pack("<IQQ", VERSION, len(tensors), len(key_values)))
    for item in key_values:
        header += _string(item.name) + struct.pack("<I", item.type) + _encode(item)
    offset = 0
    for info in tensors:
        dims = info.shape[::-1]
        number = I32_IN_CURRENT_GGML if (magic, info.type) == ("GGUF", TensorType.I32) else info.type
        header += _string(info.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)
        offset += padded(info.num_bytes, DEFAULT_ALIGNMENT)
    return bytes(header)


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
        return struct.pack("<" + NUMBER_FORMATS[item.type], item.value)
    assert item.item_type is not None
    head = struct.pack("<IQ", item.item_type, len(item.value))
    if item.item_type == ValueType.STRING:
        return head + b"".join(_string(text) for text in item.value)
    return head + np.asarray(item.value, "<" + NUMBER_FORMATS[item.item_type]).tobytes()
