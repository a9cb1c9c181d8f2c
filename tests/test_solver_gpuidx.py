"""The ``.gpuidx`` format: golden bytes, PowerInfer's own files, and a refusal for every contradiction."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pi_toolkit.profiler import gguf_container
from pi_toolkit.profiler.errors import FingerprintMismatchError, GpuIndexError
from pi_toolkit.profiler.gguf_container import KeyValue, TensorInfo, TensorType, ValueType
from pi_toolkit.solver import gpuidx
from pi_toolkit.solver.gpuidx import GpuIndex
from solver_cases import FINGERPRINT

GOLDEN = Path(__file__).parent / "golden" / "two_layers.gpuidx"
EXAMPLE = GpuIndex(
    gpu_neurons=(np.array([0, 3, 4], np.int32), np.array([], np.int32)),
    ffn_sizes=(6, 4),
    vram_capacity_bytes=1152,
    fingerprint=FINGERPRINT,
    hardware="rtx4090-i9-13900k",
    dtype="float32",
    context=64,
    batch_size=1,
    gpu_budget_bytes=50_000,
    attention_on_gpu=(True, False),
    predictor_on_gpu=(True, True),
    head_on_gpu=False,
    objective_value=123.0,
    upper_bound=124.0,
    status="optimal",
)


def read(path, ffn_sizes=(6, 4), fingerprint=FINGERPRINT):
    return gpuidx.read(path, ffn_sizes, fingerprint)


def powerinfer_file(path, number=18, **changes):
    """What PowerInfer's exporter writes for EXAMPLE: three keys, I32 as number 18, its budget as the capacity."""
    parts = {
        "architecture": KeyValue("general.architecture", ValueType.STRING, "generic.gpu_index"),
        "layers": KeyValue("generic.gpu_index.block_count", ValueType.U32, 2),
        "capacity": KeyValue("split.vram_capacity", ValueType.U64, 2_000_000),
        "idx0": ("blk.0.gpu_idx", [1, 0, 0, 1, 1, 0]),
        "bucket0": ("blk.0.gpu_bucket", [0, 3, 4]),
        "idx1": ("blk.1.gpu_idx", [0, 0, 0, 0]),
        "bucket1": ("blk.1.gpu_bucket", []),
    } | changes
    keys = [part for part in parts.values() if isinstance(part, KeyValue)]
    tensors = [part for part in parts.values() if isinstance(part, tuple)]
    infos = [TensorInfo(name, (len(values),), TensorType.I32) for name, values in tensors]
    gguf_container.write(path, "PWRI", keys, infos, (np.array(values, np.int32) for _, values in tensors))
    if number != 18:
        content = path.read_bytes()
        for name, values in tensors:
            old = name.encode() + struct.pack("<IQI", 1, len(values), 18)
            content = content.replace(old, old[:-4] + struct.pack("<I", number))
        path.write_bytes(content)
    return path


def test_golden_bytes(tmp_path):
    """A change of the format must be seen, because files of older releases exist."""
    gpuidx.write(tmp_path / "x.gpuidx", EXAMPLE)
    assert (tmp_path / "x.gpuidx").read_bytes() == GOLDEN.read_bytes()


def test_golden_header_is_what_powerinfer_reads():
    """Magic, version, counts, then its three keys in its order and tensors by position; all decoded without our reader."""
    content = GOLDEN.read_bytes()
    assert content[:24] == b"PWRI" + struct.pack("<IQQ", 3, 4, 16)
    keys = struct.pack("<Q", 20) + b"general.architecture" + struct.pack("<IQ", 8, 17) + b"generic.gpu_index"
    keys += struct.pack("<Q", 29) + b"generic.gpu_index.block_count" + struct.pack("<II", 4, 2)
    keys += struct.pack("<Q", 19) + b"split.vram_capacity" + struct.pack("<IQ", 10, 1152)
    assert content[24 : 24 + len(keys)] == keys
    table, expected_offset = content.index(b"blk.0.gpu_idx") - 8, 0
    for name, length in (
        (b"blk.0.gpu_idx", 6),
        (b"blk.0.gpu_bucket", 3),
        (b"blk.1.gpu_idx", 4),
        (b"blk.1.gpu_bucket", 0),
    ):
        info = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, length, 18, expected_offset)
        assert content[table : table + len(info)] == info
        table, expected_offset = table + len(info), expected_offset + -(-4 * length // 32) * 32
    data = -(-table // 32) * 32
    assert content[table:data] == bytes(data - table)
    assert np.frombuffer(content, "<i4", 6, data).tolist() == [1, 0, 0, 1, 1, 0]
    assert np.frombuffer(content, "<i4", 3, data + 32).tolist() == [0, 3, 4]
    assert len(content) == data + 96


def test_golden_file_is_read():
    index = read(GOLDEN)
    assert [ids.tolist() for ids in index.gpu_neurons] == [[0, 3, 4], []]
    assert all(ids.dtype == np.int32 for ids in index.gpu_neurons)
    assert replace(index, gpu_neurons=EXAMPLE.gpu_neurons) == EXAMPLE


def test_round_trip_of_a_placement_without_facts(tmp_path, capsys):
    bare = GpuIndex(EXAMPLE.gpu_neurons, EXAMPLE.ffn_sizes, 1152)
    gpuidx.write(tmp_path / "x", bare)
    index = read(tmp_path / "x")
    assert (index.fingerprint, index.dtype, index.attention_on_gpu) == (None, None, None)
    assert "no model fingerprint" in capsys.readouterr().err


@pytest.mark.parametrize("number", [18, 26])
def test_a_file_of_powerinfer_is_accepted_by_its_shapes(number, tmp_path, capsys):
    """With the type number of its time, and with the one current gguf libraries write."""
    index = read(powerinfer_file(tmp_path / "x", number))
    assert [ids.tolist() for ids in index.gpu_neurons] == [[0, 3, 4], []]
    assert index.vram_capacity_bytes == 2_000_000 and index.fingerprint is None
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_placement_of_another_model_is_refused():
    """Equal shapes are common: every 7B LLaMA has them."""
    with pytest.raises(FingerprintMismatchError, match="another model"):
        read(GOLDEN, fingerprint="cd" * 32)


@pytest.mark.parametrize(("sizes", "message"), [((6,), "2 layers"), ((6, 4, 4), "2 layers"), ((6, 5), "4 neurons")])
def test_another_shape_is_refused(sizes, message):
    with pytest.raises(GpuIndexError, match=message):
        read(GOLDEN, ffn_sizes=sizes)


CONTRADICTIONS = {
    "other architecture": {"architecture": KeyValue("general.architecture", ValueType.STRING, "llama")},
    "no architecture": {"architecture": None},
    "other layer count": {"layers": KeyValue("generic.gpu_index.block_count", ValueType.U32, 3)},
    "layer count of another type": {"layers": KeyValue("generic.gpu_index.block_count", ValueType.U64, 2)},
    "no capacity": {"capacity": None},
    "a layer missing": {"idx1": None, "bucket1": None},
    "layers in another order": {"idx0": ("blk.1.gpu_idx", [0] * 6), "idx1": ("blk.0.gpu_idx", [0] * 4)},
    "bucket before idx": {"idx1": ("blk.1.gpu_bucket", []), "bucket1": ("blk.1.gpu_idx", [0] * 4)},
    "idx that is 2": {"idx0": ("blk.0.gpu_idx", [2, 0, 0, 1, 1, 0])},
    "idx that is negative": {"idx0": ("blk.0.gpu_idx", [-1, 0, 0, 1, 1, 0])},
    "bucket that contradicts idx": {"bucket0": ("blk.0.gpu_bucket", [0, 3, 5])},
    "bucket shorter than idx": {"bucket0": ("blk.0.gpu_bucket", [0, 3])},
    "bucket not ascending": {"bucket0": ("blk.0.gpu_bucket", [0, 4, 3])},
    "bucket with a neuron twice": {"bucket0": ("blk.0.gpu_bucket", [0, 3, 3, 4])},
    "bucket out of range": {"bucket0": ("blk.0.gpu_bucket", [0, 3, 6])},
    "bucket negative": {"bucket0": ("blk.0.gpu_bucket", [-1, 3, 4])},
    "extra tensor": {"extra": ("blk.2.gpu_idx", [0])},
    "other neurons per layer": {"idx0": ("blk.0.gpu_idx", [1, 0, 0, 1, 1])},
    "half of our facts": {"fact": KeyValue("powerinfer_toolkit.fingerprint", ValueType.STRING, FINGERPRINT)},
    "later version of our facts": {"fact": KeyValue("powerinfer_toolkit.version", ValueType.U32, 2)},
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_refused(case, tmp_path):
    """PowerInfer's engine checks none of these and reads whatever lies there."""
    path = powerinfer_file(tmp_path / "x", **CONTRADICTIONS[case])
    with pytest.raises(GpuIndexError, match="run pi-place"):
        read(path)


def test_tensor_that_is_no_vector_of_i32_is_refused(tmp_path):
    content = powerinfer_file(tmp_path / "x").read_bytes()
    old = b"blk.1.gpu_idx" + struct.pack("<IQI", 1, 4, 18)
    assert old in content
    (tmp_path / "x").write_bytes(content.replace(old, old[:-4] + struct.pack("<I", 0)))
    with pytest.raises(GpuIndexError, match="no vector of I32"):
        read(tmp_path / "x")


@pytest.mark.parametrize(
    "change",
    [
        {"gpu_neurons": EXAMPLE.gpu_neurons[:1]},
        {"gpu_neurons": (np.array([3, 0]), np.array([], np.int32))},
        {"gpu_neurons": (np.array([6]), np.array([], np.int32))},
        {"dtype": "q3"},
        {"dtype": None},
        {"context": 0},
        {"attention_on_gpu": (True,)},
        {"upper_bound": float("nan")},
    ],
)
def test_a_placement_that_contradicts_itself_is_not_written(change, tmp_path):
    with pytest.raises(GpuIndexError):
        gpuidx.write(tmp_path / "x", replace(EXAMPLE, **change))
    assert list(tmp_path.iterdir()) == []


def test_missing_and_truncated_files_are_refused(tmp_path):
    with pytest.raises(
        GpuIndexError, match=r"is no usable placement \(cannot be read .*\): run pi-place to write it again"
    ):
        read(tmp_path / "missing.gpuidx")
    for length in range(0, len(GOLDEN.read_bytes()), 37):
        (tmp_path / "x").write_bytes(GOLDEN.read_bytes()[:length])
        with pytest.raises(GpuIndexError, match="run pi-place") as caught:
            read(tmp_path / "x")
        assert caught.value.message.count(str(tmp_path)) == 1 and "download" not in caught.value.message


@settings(max_examples=400, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4))
def test_random_damage_is_refused_or_leaves_a_valid_placement(changes, tmp_path_factory):
    """Only named errors come out, and what comes through is consistent."""
    path = tmp_path_factory.mktemp("gpuidx") / "x"
    content = bytearray(GOLDEN.read_bytes())
    for position, value in changes:
        content[position % len(content)] = value
    path.write_bytes(content)
    try:
        index = read(path)
    except (GpuIndexError, FingerprintMismatchError):
        return
    for ids, neurons in zip(index.gpu_neurons, (6, 4), strict=True):
        assert sorted(set(ids.tolist())) == ids.tolist() and set(ids.tolist()) <= set(range(neurons))
