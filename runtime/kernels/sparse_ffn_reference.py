"""The sparse FFN in plain torch: gather the rows of the neurons that matter, then a matrix product over them.

It serves any device and dtype. What it computes is defined per token: a neuron that is no candidate of a token adds
nothing to it, whatever else is in the batch. The union of the batch's neurons only decides which rows are read.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pi_toolkit.profiler.model_families import Activation

if TYPE_CHECKING:
    import torch

Mode = Literal["dense", "exact", "predicted"]

# Above this share of a tier's neurons, reading every row in place is faster than gathering: a gathered row is read,
# written and read again. See docs/decisions.md for the measurement.
GATHER_UP_TO = 0.35


@dataclass(frozen=True)
class NeuronRows:
    """Weights of k neurons, one row each, on one device: ``up`` and ``down`` [k, hidden], ``gate`` [k, hidden] or None
    for ungated neurons, ``up_bias`` [k] or None; ``activation`` is what they compute, ``activation_threshold`` what z has to
    exceed for it (see :class:`~pi_toolkit.profiler.model_families.ModelShape`)."""

    up: "torch.Tensor"
    down: "torch.Tensor"
    gate: "torch.Tensor | None" = None
    up_bias: "torch.Tensor | None" = None
    activation: Activation = "relu"
    activation_threshold: float = 0.0

    def __len__(self) -> int:
        return len(self.up)

    @property
    def factors(self) -> "torch.Tensor | None":
        """The rows whose product with x the activated gate is multiplied with; None for ungated neurons."""
        return None if self.gate is None else self.up

    def select(self, index: "torch.Tensor") -> "NeuronRows":
        """Copies of the rows at *index*, int64 [m]."""
        return NeuronRows(
            self.up.index_select(0, index),
            self.down.index_select(0, index),
            None if self.gate is None else self.gate.index_select(0, index),
            None if self.up_bias is None else self.up_bias.index_select(0, index),
            self.activation,
            self.activation_threshold,
        )


def dense(x: "torch.Tensor", rows: NeuronRows) -> "torch.Tensor":
    """Σ_j h_j · down_j over all neurons: [tokens, hidden] from normed inputs *x* [tokens, hidden].

    h_j = act(gate_j·x) · (up_j·x), of dReLU neurons act(gate_j·x) · act(up_j·x), or act(up_j·x + bias_j) of ungated ones.
    """
    return _activation(x, rows) @ rows.down


def exact(x: "torch.Tensor", rows: NeuronRows) -> "torch.Tensor":
    """:func:`dense` up to rounding, reading only the gates (or ups) of neurons that stay silent; for activations in
    ``FALL_SILENT`` alone."""
    z, factors, down = _pre_activation(x, rows), rows.factors, rows.down
    index = _union(z > rows.activation_threshold)
    if index is not None:
        z, down = z.index_select(1, index), down.index_select(0, index)
        factors = None if factors is None else factors.index_select(0, index)
    return _combine(x, z, factors, rows) @ down


def masked(x: "torch.Tensor", rows: NeuronRows, scores: "torch.Tensor", threshold: float) -> "torch.Tensor":
    """:func:`predicted` up to rounding, reading every row: nothing depends on how many candidates there are, so on a GPU no
    length has to reach the host."""
    return _activation(x, rows).masked_fill(~(scores >= threshold), 0) @ rows.down


def predicted(x: "torch.Tensor", rows: NeuronRows, scores: "torch.Tensor", threshold: float) -> "torch.Tensor":
    """:func:`dense` over each token's own candidates, those with ``scores`` [tokens, k] ≥ *threshold*.

    A score equal to the threshold names a candidate, as in PowerInfer's kernels.
    """
    candidates = scores >= threshold
    index = _union(candidates)
    if index is None:
        return _activation(x, rows).masked_fill(~candidates, 0) @ rows.down
    chosen = rows.select(index)
    return _activation(x, chosen).masked_fill(~candidates.index_select(1, index), 0) @ chosen.down


def _union(active: "torch.Tensor") -> "torch.Tensor | None":
    """Indices of neurons active on any token, or None when reading all rows is cheaper than gathering these."""
    index = active.any(dim=0).nonzero().squeeze(1)
    return index if len(index) <= GATHER_UP_TO * active.shape[1] else None


def _activation(x: "torch.Tensor", rows: NeuronRows) -> "torch.Tensor":
    return _combine(x, _pre_activation(x, rows), rows.factors, rows)


def _pre_activation(x: "torch.Tensor", rows: NeuronRows) -> "torch.Tensor":
    """z, what decides whether a neuron fires: gate·x, or up·x + bias."""
    if rows.gate is not None:
        return x @ rows.gate.T
    product = x @ rows.up.T
    return product if rows.up_bias is None else product + rows.up_bias


def _combine(x: "torch.Tensor", z: "torch.Tensor", factors: "torch.Tensor | None", rows: NeuronRows) -> "torch.Tensor":
    """h of those of the neurons *rows* that *z* and *factors* are about."""
    h = activate(z, rows.activation, rows.activation_threshold)
    return h if factors is None else h * up_factor(x @ factors.T, rows.activation)


def activate(z: "torch.Tensor", activation: Activation, threshold: float) -> "torch.Tensor":
    """The activation function of what decides on firing, of FATReLU with its *threshold*; overwrites *z* where it can."""
    import torch

    if activation == "silu":
        return torch.nn.functional.silu(z, inplace=True)
    if activation == "gelu":
        return torch.nn.functional.gelu(z)
    return torch.nn.functional.threshold(z, threshold, 0.0, inplace=True)


def up_factor(up: "torch.Tensor", activation: Activation) -> "torch.Tensor":
    """What the activated gate is multiplied with, out of up·x; overwrites it where it can."""
    return up.relu_() if activation == "drelu" else up
