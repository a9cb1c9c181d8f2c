"""The Triton kernels, where they serve a device: any GPU of torch's, which calls those of AMD (ROCm) "cuda" too.

Triton comes with torch's builds for GPUs. Where it is missing the torch reference runs, and that is said once. The
environment variable ``PI_GPU_KERNELS=torch`` asks for the reference, for comparisons.
"""

import importlib
import os
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from pi_toolkit.profiler.command_line import note

if TYPE_CHECKING:
    import torch


def triton_kernels(device: "torch.device") -> ModuleType | None:
    """The module :mod:`.sparse_ffn_triton`, or None where another implementation has to serve *device*."""
    if device.type != "cuda" or os.environ.get("PI_GPU_KERNELS") == "torch":
        return None
    return _import_kernels()


@cache
def _import_kernels() -> ModuleType | None:
    try:
        importlib.import_module("triton")
    except ImportError:
        note(f"Triton is not installed, so the slower torch reference runs on the GPU: pip install {_package()}")
        return None
    return importlib.import_module(".sparse_ffn_triton", __package__)


def _package() -> str:
    import torch

    return "pytorch-triton-rocm" if torch.version.hip else "triton"
