"""The GGUF container: what is written comes back, and every kind of damage is one ``GgufError``."""

import resource
import struct
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_toolkit.profiler.errors import GgufError
from pi_toolkit.profiler.gguf_container import KeyValue, TensorInfo, TensorType, ValueType, read, write

KEY_VALUES = [
    KeyValue("general.architecture", ValueType.STRING, "llama"),
    KeyValue("a.u8", ValueType.U8, 255),
    KeyValue("a.i8", ValueType.I8, -128),
    KeyValue("a.u16", ValueType.U16, 65535),
    KeyValue("a.i16", ValueType.I16, -1),
    KeyValue("a.u32", ValueType.U32, 2**32 - 1),
    KeyValue("a.i32", ValueType.I32, -(2**31)),
    KeyValue("a.f32", ValueType.F32, 0.5),
    KeyValue("a.bool", ValueType.BOOL, True),
    KeyValue("a.u64", ValueType.U64, 2**64 - 1),
    KeyValue("a.i64", ValueType.I64, -(2**63)),
    KeyValue("a.f64", ValueType.F64, 0.1),
    KeyValue("tokens", ValueType.ARRAY, ["<s>", "", "été ▁"], ValueType.STRING),
    KeyValue("flags", ValueType.ARRAY, np.array([True, False]), ValueType.BOOL),
    KeyValue("scores", ValueType.ARRAY, np.array([1.5, -2.0], np.float32), ValueType.F32),
    KeyValue("none", ValueType.ARRAY, np.array([], np.int32), ValueType.I32),
]
TENSORS = [
    (TensorInfo("half", (2, 3), TensorType.F16), np.arange(6, dtype=np.float16).reshape(2, 3)),
    (TensorInfo("empty", (0,), TensorType.I32), np.array([], np.int32)),
    (TensorInfo("full", (4,), TensorType.F32), np.array([1, 2, 3, 4], np.float32)),
    (TensorInfo("blocks", (3, 64), TensorType.Q8_0), np.arange(3 * 68, dtype=np.uint8).reshape(3, 68)),
    (TensorInfo("nibbles", (2, 2, 32), TensorType.Q4_0), np.arange(72, dtype=np.uint8).reshape(2, 2, 18)),
    (TensorInfo("ids", (3,), TensorType.I32), np.array([7, 8, 9], np.int32)),
]


def write_example(path, magic="PWRI"):
    write(path, magic, KEY_VALUES, [info for info, _ in TENSORS], (array for _, array in TENSORS))
    return path


@pytest.mark.parametrize("magic", ["PWRI", "GGUF"])
def test_round_trip_keeps_order_types_and_values(magic, tmp_path):
    file = read(write_example(tmp_path / "x", magic), magic)
    assert list(file.key_values) == [item.name for item in KEY_VALUES]
    assert list(file.tensors.values()) == [info for info, _ in TENSORS]
    for item in KEY_VALUES:
        np.testing.assert_array_equal(file.value(item.name, item.type, item.item_type), item.value)
    for info, array in TENSORS:
        np.testing.assert_array_equal(file.data(info.name), array)
        assert not file.data(info.name).flags.writeable


def test_same_content_same_bytes(tmp_path):
    assert write_example(tmp_path / "a").read_bytes() == write_example(tmp_path / "b").read_bytes()


def test_layout_of_a_file_by_hand(tmp_path):
    """Header, one key, one tensor and its padding, byte by byte: a writer and reader that are wrong together pass every
    round trip."""
    write(
        tmp_path / "x",
        "PWRI",
        [KeyValue("k", ValueType.U32, 5)],
        [TensorInfo("t", (1, 2), TensorType.I32)],
        [np.array([[1, 2]], np.int32)],
    )
    header = b"PWRI" + struct.pack("<IQQ", 3, 1, 1)
    header += struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 5)
    header += struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 2, 1, 18, 0)
    data = struct.pack("<ii", 1, 2)
    assert (tmp_path / "x").read_bytes() == header.ljust(96, b"\0") + data.ljust(32, b"\0")


def test_a_gguf_file_numbers_i32_as_current_ggml(tmp_path):
    """18 is a quantised type there: llama.cpp would read ids as weights."""
    write(tmp_path / "x", "GGUF", [], [TensorInfo("t", (1,), TensorType.I32)], [np.array([3], np.int32)])
    assert struct.unpack_from("<I", (tmp_path / "x").read_bytes(), 24 + 9 + 4 + 8) == (26,)
    (tmp_path / "y").write_bytes(one_tensor(magic=b"GGUF", number=18))
    with pytest.raises(GgufError, match="unknown type 18"):
        read(tmp_path / "y", "GGUF")
    (tmp_path / "z").write_bytes(one_tensor(number=26))
    assert read(tmp_path / "z", "PWRI").data("t").tolist() == [0, 0]


def one_tensor(
    *,
    magic=b"PWRI",
    version=3,
    num_tensors=1,
    num_keys=0,
    keys=b"",
    name=b"t",
    name_length=None,
    dims=(2,),
    num_dims=None,
    number=18,
    offset=0,
    alignment=32,
    data=bytes(32),
):
    """A file of one tensor, any part of which can be wrong."""
    header = magic + struct.pack("<IQQ", version, num_tensors, num_keys) + keys
    header += struct.pack("<Q", len(name) if name_length is None else name_length) + name
    header += struct.pack(f"<I{len(dims)}Q", len(dims) if num_dims is None else num_dims, *dims)
    header += struct.pack("<IQ", number, offset)
    return header.ljust(-(-len(header) // alignment) * alignment, b"\0") + data


def two_tensors(*, second_name=b"u", second_offset=32, data=bytes(64)):
    """A file of two tensors of two values."""
    header = b"PWRI" + struct.pack("<IQQ", 3, 2, 0)
    for name, offset in ((b"t", 0), (second_name, second_offset)):
        header += struct.pack("<Q", 1) + name + struct.pack("<IQIQ", 1, 2, 18, offset)
    return header.ljust(-(-len(header) // 32) * 32, b"\0") + data


def key(name: bytes, value_type: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", value_type) + value


def keys(*encoded: bytes) -> dict:
    return {"num_keys": len(encoded), "keys": b"".join(encoded)}


HUGE = struct.pack("<Q", 2**63)
MALFORMED = {
    "empty file": (b"", "is empty"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs pointer"),
    "web page": (b"<!DOCTYPE html><html><head></head></html>", "is a web page"),
    "other magic": (one_tensor(magic=b"GGML"), "begins with"),
    "dense file where a sparse one belongs": (one_tensor(magic=b"GGUF"), "begins with"),
    "version 2": (one_tensor(version=2), "version 2"),
    "huge number of tensors": (one_tensor(num_tensors=2**60), "number of tensors"),
    "huge number of keys": (one_tensor(num_keys=2**60), "number of keys"),
    "more tensors than there are": (one_tensor(num_tensors=2), "no dimensions"),
    "huge name": (one_tensor(name_length=2**62), "length of a tensor's name"),
    "name past the end": (one_tensor(name_length=900), "ends within a tensor's name"),
    "name that is not UTF-8": (one_tensor(name=b"\xff"), "not UTF-8"),
    "no dimensions": (one_tensor(dims=()), "no dimensions"),
    "many dimensions": (one_tensor(num_dims=5), "beyond the limit"),
    "huge dimension": (one_tensor(dims=(2**63,)), "beyond the limit"),
    "product of dimensions beyond 64 bits": (one_tensor(dims=(2**40, 2**40)), "ends within tensor"),
    "unknown tensor type": (one_tensor(number=99), "unknown type 99"),
    "half a block": (one_tensor(dims=(33,), number=8), "whole number of Q8_0"),
    "offset that is not aligned": (one_tensor(offset=4), "not where"),
    "offset past the end": (one_tensor(offset=2**63), "not where"),
    "truncated data": (one_tensor(dims=(64,)), "ends within tensor"),
    "bytes after the end": (one_tensor(data=bytes(96)), "goes on"),
    "unknown value type": (one_tensor(**keys(key(b"k", 13, b""))), "unknown type 13"),
    "bool that is 2": (one_tensor(**keys(key(b"k", 7, b"\x02"))), "neither true"),
    "bool in an array that is 2": (
        one_tensor(**keys(key(b"k", 9, struct.pack("<IQ", 7, 1) + b"\x02"))),
        "neither true",
    ),
    "huge string": (one_tensor(**keys(key(b"k", 8, HUGE))), "length of key 'k'"),
    "huge array": (one_tensor(**keys(key(b"k", 9, struct.pack("<I", 4) + HUGE))), "length of key 'k'"),
    "huge array of strings": (one_tensor(**keys(key(b"k", 9, struct.pack("<I", 8) + HUGE))), "length of key 'k'"),
    "array of arrays": (one_tensor(**keys(key(b"k", 9, struct.pack("<IQ", 9, 0)))), "array of arrays"),
    "the same key twice": (one_tensor(**keys(key(b"k", 0, b"\0"), key(b"k", 0, b"\0"))), "twice"),
    "alignment of 24": (one_tensor(**keys(key(b"general.alignment", 4, struct.pack("<I", 24)))), "alignment of 24"),
    "alignment of 3": (one_tensor(**keys(key(b"general.alignment", 4, struct.pack("<I", 3)))), "alignment of 3"),
    "alignment of 2^31": (one_tensor(**keys(key(b"general.alignment", 4, struct.pack("<I", 2**31)))), "alignment of 2"),
    "tensors that overlap": (two_tensors(second_offset=0), "tensor 'u' is not where"),
    "a gap between tensors": (two_tensors(second_offset=64, data=bytes(96)), "tensor 'u' is not where"),
    "a tensor twice": (two_tensors(second_name=b"t"), "tensor is there twice"),
    "alignment of 0": (one_tensor(**keys(key(b"general.alignment", 4, bytes(4)))), "alignment of 0"),
    "alignment as text": (one_tensor(**keys(key(b"general.alignment", 8, bytes(8)))), "alignment of ''"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused(case, tmp_path):
    """Each would otherwise be a crash, an exhausted memory or silently wrong data."""
    content, message = MALFORMED[case]
    (tmp_path / "x").write_bytes(content)
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(GgufError, match=message):
        read(tmp_path / "x", "PWRI")
    assert time.process_time() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_the_same_tensor_twice_is_refused(tmp_path):
    info = TensorInfo("t", (8,), TensorType.I32)
    with pytest.raises(GgufError, match="tensor is there twice"):
        write(tmp_path / "x", "PWRI", [], [info, info], [np.zeros(8, np.int32)] * 2)
    assert list(tmp_path.iterdir()) == []


def test_general_alignment_is_honoured(tmp_path):
    align = keys(key(b"general.alignment", 4, struct.pack("<I", 128)))
    (tmp_path / "x").write_bytes(one_tensor(**align, alignment=128, data=struct.pack("<ii", 4, 5)))
    assert read(tmp_path / "x", "PWRI").data("t").tolist() == [4, 5]


def test_missing_file_and_directory(tmp_path):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(GgufError, match="check the path"):
            read(path, "PWRI")


def test_array_of_the_wrong_size_leaves_nothing_behind(tmp_path):
    with pytest.raises(GgufError, match="has 4 bytes for 8"):
        write(tmp_path / "x", "PWRI", [], [TensorInfo("t", (2,), TensorType.I32)], [np.zeros(1, np.int32)])
    assert list(tmp_path.iterdir()) == []


def test_absent_key_and_key_of_another_type(tmp_path):
    file = read(write_example(tmp_path / "x"), "PWRI")
    for name, value_type in (("absent", ValueType.U32), ("a.u8", ValueType.U32), ("tokens", ValueType.STRING)):
        with pytest.raises(GgufError, match="no key"):
            file.value(name, value_type)


def read_all(path) -> None:
    """Read every value and tensor; anything but ``GgufError`` is a defect."""
    try:
        file = read(path, "PWRI")
        for name in file.tensors:
            file.data(name).sum()
    except GgufError:
        pass


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=4),
    length=st.integers(0, 3000),
)
def test_random_damage_ends_in_one_error_or_in_a_readable_file(changes, length, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "x"
    content = bytearray(write_example(path).read_bytes()[:length])
    for position, value in changes:
        if position < len(content):
            content[position] = value
    path.write_bytes(content)
    read_all(path)


def test_text_that_is_no_unicode_is_not_written(tmp_path):
    """A lone surrogate out of a JSON file, which ends in a traceback while a file is half written."""
    with pytest.raises(GgufError, match=r"the text '\\ud800' is no valid Unicode: mend the name or the tokenizer"):
        write(tmp_path / "x", "GGUF", [KeyValue("k", ValueType.STRING, "\ud800")], [], [])
    assert list(tmp_path.iterdir()) == []
