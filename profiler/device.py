"""Which device and dtype to compute in: what "auto" means, and refusals where the machine lacks what was asked for."""

from typing import TYPE_CHECKING

from .command_line import readable_bytes
from .errors import ToolkitError

if TYPE_CHECKING:
    import torch

    from .model_families import ModelShape

# Of the memory that is free, how much weights may take before fp32 gives way to bf16 on a CPU.
WEIGHTS_SHARE_OF_FREE_MEMORY = 0.5


class DeviceError(ToolkitError):
    """A device that this machine or this torch does not have."""


def resolve_device(name: str) -> "torch.device":
    """``auto``, ``cpu``, ``cuda``, ``cuda:1`` … as a torch device; raises ``DeviceError``."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"{name!r} is not a device: use auto, cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"{name!r} is not supported: use auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"{name!r} is not there ({torch.cuda.device_count()} CUDA devices found): use --device cpu")
    return device


def resolve_dtype(
    name: str, device: "torch.device", stored: "torch.dtype", parameters: int, resumed: object = None
) -> "torch.dtype":
    """``auto`` is the stored dtype on a GPU; on a CPU fp32, or bf16 when fp32 weights would fill the memory.

    F16 is never chosen for a CPU: its matrix products are about 600 times slower there than fp32's (measured with
    torch 2.13: 43 s against 0.07 s for one 7B down projection). Otherwise the dtype of a *resumed* job is kept, whatever
    the memory that is free now would suggest.
    """
    import torch

    if name != "auto":
        return getattr(torch, name)
    allowed = ("float32", "bfloat16", "float16") if device.type == "cuda" else ("float32", "bfloat16")
    if resumed in allowed:
        return getattr(torch, str(resumed))
    if device.type == "cuda":
        return stored
    return torch.float32 if 4 * parameters <= WEIGHTS_SHARE_OF_FREE_MEMORY * _free_bytes() else torch.bfloat16


def check_room(
    model_bytes: int,
    device: "torch.device",
    remedy: str = "use --low-memory, or --dtype bfloat16 if it is not in use yet",
) -> None:
    """Raise ``DeviceError``, ending in *remedy*, when a model's weights are larger than the memory that *device* has free."""
    import torch

    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_bytes()
    if model_bytes > free:
        raise DeviceError(
            f"the model's weights take {readable_bytes(model_bytes)} and {device} has {readable_bytes(free)} free: {remedy}"
        )


def check_pass_room(
    shape: "ModelShape", batch_size: int, window: int, tokens: int, device: "torch.device", dtype: "torch.dtype"
) -> None:
    """Raise ``DeviceError`` when what the widest FFN computes of a batch is more than the free memory of a CPU.

    *batch_size* windows of *window* tokens, of a text of *tokens*. Per token at least two tensors of its neurons and two of
    its hidden states exist at once. A GPU raises by itself; a process that fills a machine's memory is killed without a word.
    """
    windows = min(batch_size, -(-tokens // window))
    least = 2 * windows * window * (max(shape.ffn_sizes) + shape.hidden_size) * dtype.itemsize
    if device.type == "cpu" and least > (free := _free_bytes()):
        raise DeviceError(
            f"{windows:,} windows of {window:,} tokens at once take at least {readable_bytes(least)} and {device} has "
            f"{readable_bytes(free)} free: lower --batch-size"
        )


def _free_bytes() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 16 * 2**30  # no /proc (macOS, Windows): a common machine
