"""What "auto" means on this machine, and one sentence for what the machine or torch does not have."""

import pytest
import torch

from pi_toolkit.profiler import device as device_module
from pi_toolkit.profiler.device import DeviceError, check_pass_room, resolve_device, resolve_dtype
from pi_toolkit.profiler.model_families import read_shape
from tiny_models import llama_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("available", [True, False])
def test_auto_takes_a_gpu_when_there_is_one(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    """Prevents a GPU that is silently left unused."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert resolve_device("auto").type == ("cuda" if available else "cpu")


@pytest.mark.parametrize(("name", "count", "fits"), [("cuda", 1, True), ("cuda:1", 2, True), ("cuda:1", 1, False)])
def test_gpu_must_be_there(monkeypatch: pytest.MonkeyPatch, name: str, count: int, fits: bool) -> None:
    """Prevents torch's own error, pages long, minutes later."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if fits:
        assert resolve_device(name) == torch.device(name)
    else:
        with pytest.raises(DeviceError, match=r"'cuda:1' is not there \(1 CUDA devices found\): use --device cpu"):
            resolve_device(name)


@pytest.mark.parametrize("name", ["", "tpu", "cuda:x", "cuda:-1", "cpu:cpu", "meta", "mps"])
def test_what_is_no_device_is_refused(name: str) -> None:
    """Prevents a run on a device nothing was tested on, or a traceback from a slip of the keyboard."""
    with pytest.raises(DeviceError, match=r": use auto, cpu, cuda or cuda:1$"):
        resolve_device(name)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_auto_dtype_on_a_gpu_is_the_stored_one(stored: torch.dtype) -> None:
    """Prevents weights that double in size, or lose digits, on their way to a GPU."""
    assert resolve_dtype("auto", CUDA, stored, 10**12) == stored


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("parameters", "expected"), [(125, torch.float32), (126, torch.bfloat16)])
def test_auto_dtype_on_a_cpu_depends_on_the_memory(
    monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, parameters: int, expected: torch.dtype
) -> None:
    """Prevents swapping for hours, and F16 products, which a CPU computes a thousand times slower."""
    monkeypatch.setattr(device_module, "_free_bytes", lambda: 1000)
    assert resolve_dtype("auto", CPU, stored, parameters) == expected


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_explicit_dtype_is_obeyed(name: str) -> None:
    """Prevents a request from being overruled."""
    assert resolve_dtype(name, CPU, torch.float32, 10**12) == getattr(torch, name)


def test_free_memory_is_measured() -> None:
    """Prevents the fallback of 16 GiB from being used where the machine can be asked."""
    assert 2**26 < device_module._free_bytes() < 2**50
    assert device_module._free_bytes() % 1024 == 0


@pytest.mark.parametrize(
    ("device", "resumed", "expected"),
    [
        (CPU, "float32", torch.float32),
        (CPU, "bfloat16", torch.bfloat16),
        (CPU, "float16", torch.bfloat16),
        (CUDA, "bfloat16", torch.bfloat16),
        (CUDA, "float16", torch.float16),
        (CUDA, "nn", torch.float32),
        (CPU, ["float32"], torch.bfloat16),
    ],
)
def test_a_resumed_job_keeps_its_dtype(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, resumed: object, expected: torch.dtype
) -> None:
    """Prevents another type half-way, F16 products on a CPU, and whatever a damaged file says from being used."""
    monkeypatch.setattr(device_module, "_free_bytes", lambda: 1000)
    assert resolve_dtype("auto", device, torch.float32, 126, resumed) == expected
    assert resolve_dtype("float32", device, torch.float32, 126, resumed) == torch.float32


def test_a_pass_larger_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a process that the system kills without a word, minutes after a slip in --batch-size."""
    shape = read_shape(llama_config().to_dict())
    per_window = 2 * 16 * (96 + 32) * 4
    monkeypatch.setattr(device_module, "_free_bytes", lambda: 5 * per_window)
    check_pass_room(shape, 5, 16, 1000, CPU, torch.float32)
    check_pass_room(shape, 10**9, 16, 5 * 16, CPU, torch.float32)
    with pytest.raises(
        DeviceError, match=r"^6 windows of 16 tokens at once take at least 96.0 KiB .*: lower --batch-size$"
    ):
        check_pass_room(shape, 10**9, 16, 5 * 16 + 1, CPU, torch.float32)
