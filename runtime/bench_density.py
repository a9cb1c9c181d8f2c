"""The loaded model with another share of firing neurons, for speed alone: the text becomes nonsense.

A ReLU neuron fires on some share q of the tokens. With the sign of the row that decides on it turned it fires on 1 − q
(FATReLU: on fewer), and with that row zeroed on none; so any density between silence and 1 − q̄ is reached by turning or
zeroing rows of neurons drawn at random, in place.
A dReLU neuron whose gate row becomes a copy of its up row fires wherever the up product is above zero. Predictors follow by
a row of an MLP or a bias of a copy: raised neurons are candidates on every token, zeroed ones never.
Which neurons are read is then random, and how many of the candidates fire is about as in a trained predictor.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .bench_replay import activity, replay
from .decoder import Decoder
from .kernels.packed_matrix import pack, row_bytes
from .kernels.sparse_ffn_reference import Mode
from .placed_ffn import NeuronTier, PlacedFfn
from .placed_predictor import CopyPredictor, PlacedPredictor

if TYPE_CHECKING:
    import torch

SEED = 0
ALWAYS = 256.0  # a predictor row of this value in every column passes any threshold, of its negative none
BEYOND_SCORES = 1e20  # times that, a bias that no product with a copy's row outweighs


class MadeUpDensity:
    """Keeps the rows as they were read, so that densities can be chosen one after the other."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._chosen: float | None = None
        self._saved: list[_SavedLayer] = []

    def choose(self, density: float | None, prompt: tuple[int, ...]) -> None:
        """Make about *density* of the neurons fire, or as many as the model itself does; *prompt* shows how many that is."""
        if density == self._chosen:
            return
        ffns = [layer.ffn for layer in self._decoder.weights.layers]
        if not self._saved:
            shares = _firing_shares(self._decoder, prompt)
            self._saved = [_SavedLayer.of(ffn, *both) for ffn, both in zip(ffns, shares, strict=True)]
        for number, (ffn, saved) in enumerate(zip(ffns, self._saved, strict=True)):
            saved.restore(ffn)
            if density is not None:
                _change(ffn, saved, density, SEED + number)
        self._chosen = density


@dataclass(frozen=True)
class _SavedLayer:
    """What is changed in place: deciding rows and their biases by tier, what names candidates in the predictor. The share of
    the layer's neurons that fire, and that of those that would if all were raised."""

    first: "list[torch.Tensor]"
    up_bias: "list[torch.Tensor | None]"
    naming: "torch.Tensor | None"
    firing_share: float
    raised_share: float

    @classmethod
    def of(cls, ffn: PlacedFfn, firing_share: float, raised_share: float) -> "_SavedLayer":
        return cls(
            [tier.first.data.clone() for tier in ffn.tiers],
            [None if tier.up_bias is None else tier.up_bias.clone() for tier in ffn.tiers],
            _naming(ffn.predictor).clone() if ffn.predictor else None,
            firing_share,
            raised_share,
        )

    def restore(self, ffn: PlacedFfn) -> None:
        for tier, first, up_bias in zip(ffn.tiers, self.first, self.up_bias, strict=True):
            tier.first.data.copy_(first)
            if tier.up_bias is not None and up_bias is not None:
                tier.up_bias.copy_(up_bias)
        if ffn.predictor and self.naming is not None:
            _naming(ffn.predictor).copy_(self.naming)


def _firing_shares(decoder: Decoder, prompt: tuple[int, ...]) -> list[tuple[float, float]]:
    """Share of the neurons of each layer that fire on the prompt's tokens, and share that would with all of them raised."""
    shares = [(0.0, 0.0)] * decoder.shape.num_layers

    def observe(layer: int, ffn: PlacedFfn, normed: "torch.Tensor", residual: "torch.Tensor", _: Mode) -> None:
        seen = list(activity(ffn, normed, residual, "exact"))
        fired = sum(int(part.fires.sum()) for part in seen)
        raised = sum(
            int(((-part.deciding > part.tier.activation_threshold) if part.up is None else part.up > 0).sum())
            for part in seen
        )
        positions = len(normed) * decoder.shape.ffn_sizes[layer]
        shares[layer] = fired / positions, raised / positions

    replay(decoder, list(prompt), observe)
    return shares


def _change(ffn: PlacedFfn, saved: _SavedLayer, density: float, seed: int) -> None:
    import torch

    generator, first = torch.Generator().manual_seed(seed), 0
    raised = density > saved.firing_share
    if raised:
        share = min(1.0, (density - saved.firing_share) / max(1e-6, saved.raised_share - saved.firing_share))
    else:
        share = 1 - density / max(saved.firing_share, 1e-6)
    for tier in ffn.tiers:
        rows = torch.randperm(len(tier), generator=generator)[: round(share * len(tier))]
        if raised and tier.activation == "drelu" and tier.up is not None:
            where = rows.to(tier.device)
            tier.first.data[where] = tier.up.data[where]
        else:
            _scale_rows(tier, rows, -1.0 if raised else 0.0)
        if ffn.predictor:
            _name(ffn.predictor, first + rows, ALWAYS if raised else -ALWAYS)
        first += len(tier)


def _scale_rows(tier: NeuronTier, rows: "torch.Tensor", factor: float) -> None:
    """Multiply what decides on neurons *rows* by *factor*: values in floating point, the scales of blocks."""
    import torch

    first, rows = tier.first, rows.to(tier.device)
    if first.kind in ("q8_0", "q4_0"):
        quants = -(-first.columns // 128) * (128 if first.kind == "q8_0" else 64)
        numbers = first.data[:, : row_bytes(first.kind, first.columns) - quants].view(torch.float16)
    else:
        numbers = first.values()
    numbers[rows] = numbers[rows] * factor
    if tier.up_bias is not None:
        tier.up_bias[rows] *= factor


def _naming(predictor: PlacedPredictor) -> "torch.Tensor":
    """What can be set for each neuron so that it is named always or never."""
    return predictor.bias if isinstance(predictor, CopyPredictor) else predictor.fc2.data


def _name(predictor: PlacedPredictor, rows: "torch.Tensor", value: float) -> None:
    import torch

    if isinstance(predictor, CopyPredictor):
        predictor.bias[rows.to(predictor.device)] = value * BEYOND_SCORES
        return
    matrix = predictor.fc2
    matrix.data[rows.to(matrix.device)] = pack(torch.full((1, matrix.columns), value), matrix.kind, matrix.device).data
