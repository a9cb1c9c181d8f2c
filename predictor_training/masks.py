"""What each layer's predictor names on the ``transformers`` twin: MLPs by the residual, copies by their rows' input."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi_toolkit.profiler.checkpoint import Checkpoint

from .firing_copy import CopiedLayer, FiringCopy, firing_copy
from .predictor import scores
from .training_files import PredictedLayer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class MlpMask:
    """Names neurons by an MLP on the residual stream: ``fc1`` float32 [r, hidden], ``fc2`` float32 [neurons, r]."""

    fc1: "torch.Tensor"
    fc2: "torch.Tensor"
    threshold: float = 1.0

    def named(self, inputs: "torch.Tensor") -> "torch.Tensor":
        return scores(self.fc1, self.fc2, inputs.float()) >= self.threshold


@dataclass(frozen=True, eq=False)
class CopyMask:
    """Names neurons by a copy of their rows on what they read themselves."""

    copy: FiringCopy
    threshold: float

    def named(self, inputs: "torch.Tensor") -> "torch.Tensor":
        return self.copy.scores(inputs) >= self.threshold


Mask = MlpMask | CopyMask


def masks_of(
    layers: Sequence[PredictedLayer], checkpoint: Checkpoint, device: "torch.device", copies: dict[int, FiringCopy]
) -> list[Mask]:
    """The masks of trained and calibrated *layers* on *device*; rows that are copied anew are kept in *copies* by layer."""
    masks: list[Mask] = []
    for number, layer in enumerate(layers):
        if isinstance(layer, CopiedLayer):
            if number not in copies:
                copies[number] = firing_copy(checkpoint, number, device)
            masks.append(CopyMask(copies[number], layer.threshold))
        else:
            masks.append(MlpMask(layer.fc1.to(device).float(), layer.fc2.to(device).float()))
    return masks
