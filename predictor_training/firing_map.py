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
    shape = checkpoint.shape
    centred = shape.norm == "layer"
    norm_weight, norm_bias = _norm(checkpoint, layer)

    def one(role: str) -> "tuple[torch.Tensor, torch.Tensor]":
        rows, bias = _rows(checkpoint, layer, role)
        weight, bias = rows * norm_weight, bias + rows @ norm_bias - shape.activation_threshold
        return (weight - weight.mean(dim=1, keepdim=True) if centred else weight), bias

    weight, bias = one("gate" if shape.gated else "up")
    if shape.activation == "drelu":
        for_up, up_bias = one("up")
        lengths = [rows.norm(dim=1).clamp(min=1e-12) for rows in (weight, for_up)]
        weight = weight / lengths[0][:, None] + for_up / lengths[1][:, None]
        bias = bias / lengths[0] + up_bias / lengths[1]
    return FiringMap(weight, bias, centred)


def neuron_impact(checkpoint: Checkpoint, layer: int, inputs: "torch.Tensor") -> "torch.Tensor":
    """What a missed firing of each neuron of *layer* takes from the layer's output: mean of |h| · ‖d‖ over its firings on
    *inputs* [tokens, hidden], with h what multiplies its down row d. Float32 [neurons], mean 1; 1 where nothing fires."""
    import torch

    shape = checkpoint.shape
    normed = ffn_input(checkpoint, layer, inputs.cpu())

    def product(role: str) -> torch.Tensor:
        rows, bias = _rows(checkpoint, layer, role)
        return normed @ rows.T + bias

    z = product("gate" if shape.gated else "up")
    activation = z * (z > shape.activation_threshold)
    if shape.gated:
        up = product("up")
        activation = activation * (up.relu() if shape.activation == "drelu" else up)
    down = dense(checkpoint.neuron_rows(layer, "down.weight"), torch.float32).norm(dim=1)
    firings = (activation != 0).sum(dim=0)
    impact = activation.abs().sum(dim=0) / firings.clamp(min=1) * down
    return torch.where(firings > 0, impact / impact[firings > 0].mean().clamp(min=1e-12), 1.0)


def ffn_input(checkpoint: Checkpoint, layer: int, inputs: "torch.Tensor") -> "torch.Tensor":
    """What the neurons of *layer* read where the residual stream is *inputs* [tokens, hidden]: float32, on its device."""
    shape = checkpoint.shape
    weight, bias = (part.to(inputs.device) for part in _norm(checkpoint, layer))
    x = inputs.float()
    centred = x - x.mean(dim=1, keepdim=True) if shape.norm == "layer" else x
    return centred / (centred.square().mean(dim=1, keepdim=True) + shape.norm_epsilon).sqrt() * weight + bias


def _norm(checkpoint: Checkpoint, layer: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Weight and bias of the norm before the FFN."""
    import torch

    shape = checkpoint.shape
    name = "ffn_norm" if shape.separate_ffn_norm else "attention_norm"
    weight = dense(checkpoint.layer(layer, f"{name}.weight"), torch.float32)
    if f"{name}.bias" not in shape.norm_shapes(name):
        return weight, torch.zeros_like(weight)
    return weight, dense(checkpoint.layer(layer, f"{name}.bias"), torch.float32)


def _rows(checkpoint: Checkpoint, layer: int, role: str) -> "tuple[torch.Tensor, torch.Tensor]":
    """Matrix ``gate`` or ``up`` by neuron, and its biases."""
    import torch

    rows = dense(checkpoint.neuron_rows(layer, f"{role}.weight"), torch.float32)
    if role == "up" and checkpoint.shape.ffn_bias:
        return rows, dense(checkpoint.layer(layer, "up.bias"), torch.float32)
    return rows, torch.zeros(len(rows))
