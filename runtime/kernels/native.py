"""The native kernels, if this installation has them, and how tensors reach them: as addresses.

Whoever calls keeps the tensors alive. Without the extension (no compiler at installation) the torch reference runs, and
that is said once. The environment variable ``PI_CPU_ISA`` forces an instruction set, or ``torch``, for tests.
"""

import importlib
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

from pi_toolkit.profiler.command_line import note
from pi_toolkit.profiler.model_families import Activation

from .packed_matrix import KINDS, PackedMatrix
from .triton_kernels import triton_kernels

if TYPE_CHECKING:
    import torch

    from .sparse_ffn_reference import Mode

TOKENS = 16  # vectors of tokens are padded to this
MODES: "tuple[Mode, ...]" = ("dense", "exact", "predicted")  # in the order of sparse_ffn_cpu.h
ACTIVATIONS: "tuple[Activation, ...]" = get_args(Activation)  # likewise


def extension() -> ModuleType | None:
    """The compiled module, or None: announced where it is missing, asked for by ``PI_CPU_ISA=torch``."""
    return None if os.environ.get("PI_CPU_ISA") == "torch" else _import_extension()


def kernels(threads: int) -> Any:
    """The kernels on a pool of so many threads, one pool for each number asked for; None without the extension."""
    return None if extension() is None else _make_kernels(threads, os.environ.get("PI_CPU_ISA"))


@cache
def _import_extension() -> ModuleType | None:
    try:
        return importlib.import_module(".cpu_kernels", __package__)
    except ImportError:
        note("the native CPU kernels are not installed (no compiler was found), so the slower torch reference runs")
        return None


@cache
def _make_kernels(threads: int, _instruction_set: str | None) -> Any:
    module = _import_extension()
    assert module is not None, "asked for only with the extension"
    return module.Kernels(threads)


def products(device: "torch.device") -> "Products | None":
    """Native products for matrices on *device*, on as many threads as torch uses; None where there are none."""
    import torch

    made = kernels(torch.get_num_threads()) if device.type == "cpu" else None
    return None if made is None else Products(made)


@dataclass(frozen=True)
class Products:
    """Products of packed weights with many tokens, everything in float32, and tokens side by side: vectors are columns."""

    native: Any

    def columns(self, x: "torch.Tensor") -> "torch.Tensor":
        """float32 [size, tokens padded with zeros to 16] from rows [tokens, size]."""
        import torch

        tokens, size = x.shape
        side_by_side = torch.zeros(size, -(-tokens // TOKENS) * TOKENS, dtype=torch.float32)
        side_by_side[:, :tokens] = x.T
        return side_by_side

    def multiply(self, packed: PackedMatrix, x: "torch.Tensor") -> "torch.Tensor":
        """W · x: float32 [rows, tokens] from float32 [columns, tokens]."""
        return self._product(packed, x, packed.rows, transposed=False)

    def multiply_transposed(self, packed: PackedMatrix, x: "torch.Tensor") -> "torch.Tensor":
        """Wᵀ · x: float32 [columns, tokens] from float32 [rows, tokens]."""
        return self._product(packed, x, packed.columns, transposed=True)

    def _product(self, packed: PackedMatrix, x: "torch.Tensor", size: int, transposed: bool) -> "torch.Tensor":
        import torch

        y = torch.empty(size, x.shape[1], dtype=torch.float32)
        self.native.multiply_tokens(matrix(extension(), packed), address(x), address(y), x.shape[1], transposed)
        return y


def multiply(packed: PackedMatrix, x: "torch.Tensor", exactly: bool = False) -> "torch.Tensor":
    """x · Wᵀ: [..., rows] from [..., columns]; natively where the matrix is on a CPU, and then always in float32.

    On a GPU *exactly* asks for float32; few tokens get it from the Triton kernels, which read blocks where they are, more
    tokens at the cost of speed.
    """
    gpu, tokens = triton_kernels(packed.device), x.numel() // packed.columns
    if gpu is not None and 0 < tokens <= gpu.MAX_TOKENS and (exactly or not packed.is_plain):
        return gpu.multiply(packed, x.reshape(tokens, packed.columns)).reshape(*x.shape[:-1], packed.rows)
    native = products(packed.device)
    if native is None:
        return packed.multiply_exactly(x) if exactly else packed.multiply(x)
    rows = x.reshape(-1, packed.columns)
    y = native.multiply(packed, native.columns(rows))[:, : len(rows)].T
    return y.reshape(*x.shape[:-1], packed.rows)


def address(tensor: "torch.Tensor | None") -> int:
    """Where a contiguous tensor begins; 0 for None."""
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "native kernels read vectors without gaps"
    return tensor.data_ptr()


def matrix(module: ModuleType | None, packed: PackedMatrix | None) -> Any:
    """The native view of a matrix; one without rows for None."""
    assert module is not None, "whoever has packed matrices for native kernels has the kernels"
    if packed is None:
        return module.Matrix()
    data = packed.data
    return module.Matrix(KINDS.index(packed.kind), data.data_ptr(), packed.rows, packed.columns, data.stride(0))
