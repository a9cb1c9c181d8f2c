"""Which machine this is, and where its measured hardware file lies.

``pi-bench --machine`` writes that file into the user's configuration folder, under an identity of the machine: a home
directory is copied to the next computer or shared by many, and bandwidths are not. The identity holds what the figures
depend on, among it which GPUs there are and may be used.
"""

import hashlib
import os
import platform
import shutil
from pathlib import Path

import click

HARDWARE_FILE = "this-machine.toml"
_VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def measured_hardware_file() -> Path:
    """Where ``pi-bench --machine`` writes this machine's hardware file, and ``--hardware auto`` looks for it."""
    return Path(click.get_app_dir("powerinfer-toolkit")) / "machines" / identity() / HARDWARE_FILE


def identity() -> str:
    """16 hexadecimal digits of this machine as this process may use it; nothing of it can be read back."""
    facts = [platform.node(), _text("/etc/machine-id"), cpu_name(), str(memory_bytes() // 2**30), *gpu_drivers()]
    facts += [os.environ.get(name, "") for name in _VISIBLE_GPUS]
    return hashlib.sha256("\n".join(facts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def has_gpu() -> bool:
    """Whether a driver of NVIDIA or AMD knows a GPU; asks neither torch nor the GPU, so it answers at once."""
    return bool(gpu_drivers()) or shutil.which("nvidia-smi") is not None


def gpu_drivers() -> list[str]:
    """What the drivers of this system say about their GPUs, one text each (Linux; empty elsewhere)."""
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    found += sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id"))
    return [text for path in found if (text := _text(path)) not in ("", "0")]  # an AMD node of id 0 is a processor


def cpu_name() -> str:
    """As /proc/cpuinfo says it, else what Python knows."""
    names = [
        line.partition(":")[2].strip() for line in _text("/proc/cpuinfo").splitlines() if line.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 16 * 2**30  # no POSIX: a common machine


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""
