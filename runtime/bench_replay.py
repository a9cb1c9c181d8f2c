"""Looks at every layer's FFN while tokens that are already known run through the decoder's torch path once more.

Who fires and who is a candidate there equals what the native step saw, up to rounding.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from .decoder import Decoder
from .kernels.sparse_ffn_reference import Mode
from .placed_ffn import NeuronTier, PlacedFfn

if TYPE_CHECKING:
    import torch

    # layer number, its FFN, normed inputs and residual stream [tokens, hidden], mode
    Observe = Callable[[int, PlacedFfn, torch.Tensor, torch.Tensor, Mode], None]


def replay(decoder: Decoder, tokens: list[int], observe: "Observe") -> None:
    """Run *tokens* through slot 0 of the cache from its beginning, showing *observe* what each FFN is given."""
    import torch

    layers = decoder.weights.layers
    watched = [
        replace(layer, ffn=cast(PlacedFfn, _WatchedFfn(number, layer.ffn, observe)))
        for number, layer in enumerate(layers)
    ]
    twin = copy.copy(decoder)
    twin.weights = replace(decoder.weights, layers=tuple(watched))
    twin.hidden_states(torch.tensor([tokens]), torch.arange(len(tokens))[None], torch.zeros(1, dtype=torch.int64))


def masks(
    ffn: PlacedFfn, normed: "torch.Tensor", residual: "torch.Tensor", mode: Mode
) -> "Iterator[tuple[NeuronTier, torch.Tensor, torch.Tensor]]":
    """Each tier with who fires and who is a candidate, bool [tokens, k]; all are where no predictor is asked."""
    scores = ffn.predictor.scores(residual) if ffn.predictor and mode == "predicted" else None
    first = 0
    for tier in ffn.tiers:
        fires_on = tier.first.multiply(normed.to(tier.device))
        fires = (fires_on if tier.up_bias is None else fires_on + tier.up_bias) > tier.activation_threshold
        named = fires | True
        if scores is not None and ffn.predictor:
            named = scores[:, first : first + len(tier)].to(tier.device) >= ffn.predictor.threshold
        yield tier, fires, named
        first += len(tier)


@dataclass(frozen=True)
class _WatchedFfn:
    number: int
    ffn: PlacedFfn
    observe: "Observe"

    def __call__(self, normed: "torch.Tensor", residual: "torch.Tensor", mode: Mode) -> "torch.Tensor":
        self.observe(self.number, self.ffn, normed, residual, mode)
        return self.ffn(normed, residual, mode)
