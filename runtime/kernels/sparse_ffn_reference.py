"""The sparse FFN in plain torch: gather the rows of the neurons that matter, then a matrix product over them.

It serves any device and dtype. What it computes is defined per token: a neuron that is no candidate of a token adds
nothing to it, whatever else is in the batch. The union of the batch's neurons only decides which rows are read.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Mode = Literal["dense", "exact", "predicted"]

# Above this share of a tier's neurons, reading every row in place is faster than gathering: a gathered row is read,
# written and read again. See docs/decisions.md for the measurement.
GATHER_UP_TO = 0.35


@dataclass(frozen=True)
class NeuronRows:
    """Weights of k neurons, one row each, on one device: ``up`` and ``down`` [k, hidden], ``gate`` [k, hidden] or None
    for ungated neurons, ``up_bias`` [k] or None."""

    up: "torch.Tensor"
    down: "torch.Tensor"
    gate: "torch.Tensor | None" = None
    up_bias: "torch.Tensor | None" = None

    def __len__(self) -> int:
        return len(self.up)

    def select(self, index: "torch.Tensor") -> "NeuronRows":
        """Copies of the rows at *index*, int64 [m]."""
        return NeuronRows(
            self.up.index_select(0, index),
            self.down.index_select(0, index),
            None if self.gate is None else self.gate.index_select(0, index),
            None if self.up_bias is None else self.up_bias.index_select(0, index),
        )


def dense(x: "torch.Tensor", rows: NeuronRows) -> "torch.Tensor":
    """Σ_j h_j · down_j over all neurons: [tokens, hidden] from normed inputs *x* [tokens, hidden].

    h_j = relu(gate_j·x) · (up_j·x), or relu(up_j·x + bias_j) for ungated neurons.
    """
    return _activation(x, rows) @ rows.down


def exact(x: "torch.Tensor", rows: NeuronRows) -> "torch.Tensor":
    """:func:`dense` up to rounding, reading only the gates (or ups) of neurons that stay silent."""
    fires_on = _pre_activation(x, rows)
    index = _union(fires_on > 0)
    if index is None:
        return _combine(x, rows, fires_on) @ rows.down
    down = rows.down.index_select(0, index)
    fires_on = fires_on.index_select(1, index)
    if rows.gate is None:
        return fires_on.relu() @ down
    return (fires_on.relu() * (x @ rows.up.index_select(0, index).T)) @ down


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
    return _combine(x, rows, _pre_activation(x, rows))


def _pre_activation(x: "torch.Tensor", rows: NeuronRows) -> "torch.Tensor":
    """What decides whether a neuron fires: gate·x, or up·x + bias."""
    if rows.gate is not None:
        return x @ rows.gate.T
    product = x @ rows.up.T
    return product if rows.up_bias is None else product + rows.up_bias


def _combine(x: "torch.Tensor", rows: NeuronRows, fires_on: "torch.Tensor") -> "torch.Tensor":
    """The activation h of all rows, given what decides on firing."""
    return fires_on.relu() if rows.gate is None else fires_on.relu() * (x @ rows.up.T)
