"""Firing as a linear map of the residual stream: a predictor that needs no training, before its rank is cut.

A norm divides a token's residual x by one positive number σ(x) and scales its elements, so an ungated neuron fires exactly
where G·x + b·σ(x) > 0, with G the rows that decide on firing times the norm's weights, and b their biases with the norm's
(for FATReLU less its threshold). All that a narrow predictor has to learn is which directions of G it can spare.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.quantisation import dense

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FiringMap:
    """``weight`` G float32 [neurons, hidden] and ``bias`` b float32 [neurons]; ``centred``: the norm removes the mean."""

    weight: "torch.Tensor"
    bias: "torch.Tensor"
    centred: bool

    def magnitude(self, inputs: "torch.Tensor") -> "torch.Tensor":
        """σ(x) of *inputs* [tokens, hidden]: their deviation, or their root mean square where the mean stays."""
        if self.centred:
            return inputs.var(dim=1, unbiased=False).sqrt()
        return inputs.square().mean(dim=1).sqrt()


def firing_map(checkpoint: Checkpoint, layer: int) -> FiringMap:
    """The map of one layer; of dReLU neurons, which fire where two maps are positive, the sum of both, rows of equal length.

    Reads a checkpoint or a model file.
    """
    import torch

    shape = checkpoint.shape
    norm = "ffn_norm" if shape.separate_ffn_norm else "attention_norm"
    of_norm = shape.ffn_shapes(layer) if shape.separate_ffn_norm else shape.attention_shapes()
    centred = shape.norm == "layer"
    norm_weight = dense(checkpoint.layer(layer, f"{norm}.weight"), torch.float32)
    norm_bias = (
        dense(checkpoint.layer(layer, f"{norm}.bias"), torch.float32)
        if f"{norm}.bias" in of_norm
        else torch.zeros(shape.hidden_size)
    )

    def one(role: str) -> tuple[torch.Tensor, torch.Tensor]:
        rows = dense(checkpoint.neuron_rows(layer, f"{role}.weight"), torch.float32)
        bias = rows @ norm_bias - shape.activation_threshold
        if shape.ffn_bias and role == "up":
            bias = bias + dense(checkpoint.layer(layer, "up.bias"), torch.float32)
        weight = rows * norm_weight
        return (weight - weight.mean(dim=1, keepdim=True) if centred else weight), bias

    weight, bias = one("gate" if shape.gated else "up")
    if shape.activation == "drelu":
        for_up, up_bias = one("up")
        lengths = [rows.norm(dim=1).clamp(min=1e-12) for rows in (weight, for_up)]
        weight = weight / lengths[0][:, None] + for_up / lengths[1][:, None]
        bias = bias / lengths[0] + up_bias / lengths[1]
    return FiringMap(weight, bias, centred)
