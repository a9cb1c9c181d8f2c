"""The native kernels, if this installation has them, and how tensors reach them: as addresses.

Whoever calls keeps the tensors alive. Without the extension (no compiler at installation) or on an instruction set that
``PI_CPU_ISA`` rules out, the torch reference runs, and that is said once.
"""

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pi_toolkit.profiler.command_line import note

from .packed_matrix import KINDS, PackedMatrix

if TYPE_CHECKING:
    import torch

    from .sparse_ffn_reference import Mode

MODES: "tuple[Mode, ...]" = ("dense", "exact", "predicted")  # in the order of sparse_ffn_cpu.h


@cache
def extension() -> ModuleType | None:
    """The compiled module, or None, announced."""
    try:
        from . import cpu_kernels
    except ImportError:
        note("the native CPU kernels are not installed (no compiler was found), so the slower torch reference runs")
        return None
    return cpu_kernels


def address(tensor: "torch.Tensor | None") -> int:
    """Where a contiguous tensor begins; 0 for None."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "native kernels read vectors without gaps"
    return tensor.data_ptr()


def matrix(module: ModuleType, packed: PackedMatrix | None) -> Any:
    """The native view of a matrix; one without rows for None."""
    if packed is None:
        return module.Matrix()
    data = packed.data
    return module.Matrix(KINDS.index(packed.kind), data.data_ptr(), packed.rows, packed.columns, data.stride(0))
