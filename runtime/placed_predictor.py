"""What names a layer's candidates while it runs: an MLP on the residual stream, or a copy of the rows that decide on firing.

Rows of the last matrix are in the order of the tiers' neurons, so that each tier's scores are a slice. Scores are always in
float32, so that which neurons are candidates does not depend on how many tokens are computed at once.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .kernels.native import address, matrix, multiply
from .kernels.packed_matrix import PackedMatrix

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class MlpPredictor:
    """``fc1`` [r, hidden] and ``fc2`` [neurons, r]; neurons with a score of at least ``threshold`` are candidates."""

    fc1: PackedMatrix
    fc2: PackedMatrix
    threshold: float

    @property
    def device(self) -> "torch.device":
        return self.fc1.device

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        return self.fc1, self.fc2

    def scores(self, normed: "torch.Tensor", residual: "torch.Tensor") -> "torch.Tensor":
        """float32 [tokens, neurons] from the residual stream [tokens, hidden], here; *normed* is what a copy reads."""
        units = multiply(self.fc1, residual.to(self.device), exactly=True).relu()
        return multiply(self.fc2, units, exactly=True)

    def native(self, module: ModuleType) -> Any:
        """What the native step sees of it."""
        return module.Predictor(matrix(module, self.fc1), matrix(module, self.fc2), 0, self.threshold)


@dataclass(frozen=True, eq=False)
class CopyPredictor:
    """``rows`` [neurons, hidden] in q4_0 and ``bias`` float32 [neurons], zeros where neurons have none; neurons with a score
    of at least ``threshold`` are candidates. In a model of q4_0 the tiers beside it hold slices of the same rows."""

    rows: PackedMatrix
    bias: "torch.Tensor"
    threshold: float

    @property
    def device(self) -> "torch.device":
        return self.rows.device

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        return (self.rows,)

    def scores(self, normed: "torch.Tensor", residual: "torch.Tensor") -> "torch.Tensor":
        """float32 [tokens, neurons] from the normed vectors [tokens, hidden], here; *residual* is what an MLP reads."""
        return multiply(self.rows, normed.to(self.device, self.bias.dtype), exactly=True) + self.bias

    def is_part(self, other: PackedMatrix) -> bool:
        """Whether *other* is a slice of the copy's own rows."""
        return other.data.untyped_storage().data_ptr() == self.rows.data.untyped_storage().data_ptr()

    def native(self, module: ModuleType) -> Any:
        """What the native step sees of it."""
        return module.Predictor(module.Matrix(), matrix(module, self.rows), address(self.bias), self.threshold)


PlacedPredictor = MlpPredictor | CopyPredictor
