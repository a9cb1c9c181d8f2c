"""Weights become packed rows natively, byte for byte what torch and the ``gguf`` package's quantiser make of them."""

import numpy as np
import pytest
import torch

from pi_toolkit.profiler.errors import GgufError
from pi_toolkit.profiler.gguf_types import TensorType
from pi_toolkit.profiler.quantisation import QuantisedMatrix, SelectedRows, TurnedMatrix, quantise, select_rows
from pi_toolkit.runtime.kernels.packed_matrix import (
    KINDS,
    Kind,
    PackedMatrix,
    allocate,
    fill_plainly,
    pack,
    row_bytes,
)
from test_runtime_cpu_kernels import ISAS

CPU = torch.device("cpu")
FORMS = [
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "turned float32",
    "turned bfloat16",
    "turned float16",
    "with gaps",
]
FORMS += ["q8_0", "q4_0", "turned q8_0", "turned q4_0"]
FORMS += [f"selected {form}" for form in ("float16", "q8_0", "q4_0", "turned float16", "turned q8_0")]


def values(rows: int, columns: int) -> torch.Tensor:
    """Rows of every magnitude F16 can hold, a row of zeros of both signs, one of ties."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(rows, columns, generator=generator) * torch.logspace(-7, 3, rows)[:, None]
    matrix[0] = torch.where(torch.arange(columns) % 64 < 32, 0.0, -0.0)
    matrix[rows // 2] = torch.randint(-3, 4, (columns,), generator=generator).float()
    return matrix


def stored(form: str, matrix: torch.Tensor) -> "torch.Tensor | QuantisedMatrix | TurnedMatrix | SelectedRows":
    if form == "with gaps":
        return torch.stack([matrix, matrix], dim=2)[:, :, 0]
    if form.startswith("selected"):
        backwards = np.arange(len(matrix))[::-1].copy()
        return select_rows(stored(form.removeprefix("selected "), matrix), backwards)  # type: ignore[arg-type]
    if form.startswith("turned"):
        turned = stored(form.removeprefix("turned "), matrix.T.contiguous())
        return turned.T  # type: ignore[union-attr]
    if form in ("q8_0", "q4_0"):
        return QuantisedMatrix(form, tuple(matrix.shape), quantise(matrix, TensorType[form.upper()]))  # type: ignore[arg-type]
    return matrix.to(getattr(torch, form))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (96, 160), (288, 544)])
def test_native_packing_makes_the_bytes_of_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, isa: str, kind: Kind, form: str, rows: int, columns: int
) -> None:
    """A quantiser that rounds differently, a tile lost or repeated where a matrix is turned, rows in
    another order, padding left as it was."""
    monkeypatch.setenv("PI_CPU_ISA", isa)
    source = stored(form, values(rows, columns))
    wanted = PackedMatrix(kind, columns, allocate(rows, row_bytes(kind, columns), CPU))
    fill_plainly(wanted, source)
    assert torch.equal(pack(source, kind, CPU).data, wanted.data)


@pytest.mark.parametrize("isa", ["portable", ISAS[-1], "torch"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_not_quantised(monkeypatch: pytest.MonkeyPatch, isa: str, bad: float) -> None:
    """A damaged weight that becomes an arbitrary number."""
    monkeypatch.setenv("PI_CPU_ISA", isa)
    matrix = torch.zeros(300, 288)
    matrix[299, 287] = bad
    for source in (matrix, matrix.half(), matrix.T.contiguous().T):
        for kind in ("q8_0", "q4_0"):
            with pytest.raises(GgufError, match="not finite"):
                pack(source, kind, CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("isa", [ISAS[-1], "torch"])
def test_rows_that_are_no_whole_blocks_are_refused(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """Values read past the end of a row."""
    monkeypatch.setenv("PI_CPU_ISA", isa)
    with pytest.raises(GgufError, match="no whole number of"):
        pack(torch.zeros(2, 33), "q4_0", CPU)
