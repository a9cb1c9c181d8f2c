"""One layer's FFN with its neurons spread over tiers, each tier a device, and the predictor that names candidates."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi_toolkit.predictor_training.predictor import scores

from .kernels import sparse_ffn_reference as kernel
from .kernels.sparse_ffn_reference import Mode, NeuronRows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PlacedFfn:
    """The tiers of one layer, none of them empty, and the bias [hidden] that is added once.

    ``predictor`` is fc1 [r, hidden] and fc2 [neurons, r], rows of fc2 in the order of the tiers' neurons, so that each
    tier's scores are a slice; neurons with a score of at least ``threshold`` are candidates.
    """

    tiers: tuple[NeuronRows, ...]
    down_bias: "torch.Tensor | None"
    predictor: "tuple[torch.Tensor, torch.Tensor] | None"
    threshold: float

    def __call__(self, normed: "torch.Tensor", residual: "torch.Tensor", mode: Mode) -> "torch.Tensor":
        """The FFN's output [tokens, hidden] on the device of *normed*.

        *normed* [tokens, hidden] is what the neurons read, *residual* [tokens, hidden] what the predictor reads.
        """
        output, first = self.down_bias, 0
        scores = self._scores(residual) if mode == "predicted" else None
        for rows in self.tiers:
            x = normed.to(rows.up.device)
            if scores is not None:
                mine = scores[:, first : first + len(rows)].to(x.device)
                part = kernel.predicted(x, rows, mine, self.threshold)
            else:
                part = kernel.dense(x, rows) if mode == "dense" else kernel.exact(x, rows)
            part = part.to(normed.device)
            output = part if output is None else output + part
            first += len(rows)
        assert output is not None, "a layer has at least one neuron"
        return output

    def _scores(self, residual: "torch.Tensor") -> "torch.Tensor":
        """[tokens, neurons], columns in the order of the tiers' neurons."""
        assert self.predictor is not None, "the engine opens mode predicted only with predictors"
        fc1, fc2 = self.predictor
        return scores(fc1, fc2, residual.to(fc1.device))
