"""A predictor that needs no training: a copy in four bits of the rows that decide on firing.

Its scores are what the neurons themselves compute first, gate · y or up · y + bias with y the normed input, up to the
rounding of the rows to blocks of Q4_0. All that is chosen is the threshold above which a neuron is a candidate, on
calibration documents. Of dReLU neurons, which fire where two products are positive, the gate alone is copied.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import UnsupportedModelError
from pi_toolkit.profiler.gguf_types import tensor_bytes
from pi_toolkit.profiler.model_families import ModelShape
from pi_toolkit.profiler.quantisation import QuantisedMatrix, quantisable, quantise

from .firing_map import ffn_input
from .predictor import Quality, quality_of, threshold_of_scores
from .predictor_size import COPY_TYPE
from .sample import LayerSamples

if TYPE_CHECKING:
    import torch

EVALUATION_BATCH = 2048


@dataclass(frozen=True, eq=False)
class FiringCopy:
    """``blocks`` uint8 [neurons, blocks, 18] of Q4_0 and ``bias`` float32 [neurons], on one device."""

    blocks: "torch.Tensor"
    bias: "torch.Tensor"

    def scores(self, normed: "torch.Tensor") -> "torch.Tensor":
        """float32 [tokens, neurons] from what the neurons read, [tokens, hidden]."""
        return normed.float() @ self._rows().T + self.bias

    def _rows(self) -> "torch.Tensor":
        """float32 [neurons, hidden], made anew each time: the blocks take an eighth of it."""
        import torch

        scales = self.blocks[:, :, :2].contiguous().view(torch.float16).float()
        quants = self.blocks[:, :, 2:]
        values = torch.cat([quants & 15, quants >> 4], dim=2).float().sub_(8.0)
        return (values * scales).flatten(1)


@dataclass(frozen=True)
class CopiedLayer:
    """A layer that is predicted by its copy: the ``threshold`` of its scores, ``quality`` on held-out documents,
    ``calibration`` on those that the threshold was chosen on."""

    quality: Quality
    calibration: Quality
    threshold: float


def require_copies(shape: ModelShape) -> None:
    """Raise ``UnsupportedModelError`` where the rows that decide on firing are no whole number of blocks."""
    if not quantisable(shape.hidden_size, COPY_TYPE):
        raise UnsupportedModelError(
            f"rows of {shape.hidden_size} values are no whole number of {COPY_TYPE.name} blocks, in which --kind copy would "
            "keep them: use --kind mlp"
        )


def firing_copy(checkpoint: Checkpoint, layer: int, device: "torch.device") -> FiringCopy:
    """The copy of one layer; of a model file in Q4_0 the very blocks."""
    import torch

    shape = checkpoint.shape
    rows = checkpoint.neuron_rows(layer, shape.deciding_role)
    if isinstance(rows, QuantisedMatrix) and rows.kind == COPY_TYPE.name.lower():
        blocks = rows.blocks.copy()
    else:
        blocks = quantise(rows.dequantise(torch.float32) if isinstance(rows, QuantisedMatrix) else rows, COPY_TYPE)
    neurons = shape.ffn_sizes[layer]
    bias = checkpoint.layer(layer, "up.bias").float() if shape.ffn_bias else torch.zeros(neurons)
    return FiringCopy(
        torch.from_numpy(blocks).view(neurons, -1, tensor_bytes((32,), COPY_TYPE)).to(device), bias.to(device)
    )


def calibrate_copy(
    checkpoint: Checkpoint, layer: int, calibration: LayerSamples, held_out: LayerSamples, recall: float
) -> CopiedLayer:
    """The threshold for *recall* on *calibration*, and what it does there and on *held_out*."""
    import torch

    copy = firing_copy(checkpoint, layer, calibration.device)

    def normed(samples: LayerSamples) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
        for inputs, fires in samples.batches(EVALUATION_BATCH):
            yield ffn_input(checkpoint, layer, inputs), fires

    with torch.inference_mode():
        threshold = threshold_of_scores(copy.scores, recall, normed(calibration), smallest=-math.inf)
        measured = [quality_of(copy.scores, threshold, normed(part)) for part in (held_out, calibration)]
    return CopiedLayer(measured[0], measured[1], threshold)
