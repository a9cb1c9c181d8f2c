"""Looks at every layer's FFN while tokens that are already known run through the decoder's torch path once more.

Who fires and who is a candidate there equals what the native step saw, up to rounding. The decoder itself knows nothing
of being watched: its twin holds the same weights and cache, with every FFN behind an observer, and no step that is
done as a whole, natively or on a GPU, which would go past them.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from .decoder import Decoder
from .kernels.native import multiply
from .kernels.sparse_ffn_reference import Mode
from .placed_ffn import NeuronTier, PlacedFfn

if TYPE_CHECKING:
    import torch

    # layer number, its FFN, normed inputs and residual stream [tokens, hidden], mode
    Observe = Callable[[int, PlacedFfn, torch.Tensor, torch.Tensor, Mode], None]


def watched(decoder: Decoder, observe: "Observe") -> Decoder:
    """A twin of *decoder*, over the same cache, that shows *observe* what each FFN is given."""
    layers = [
        replace(layer, ffn=cast(PlacedFfn, _WatchedFfn(number, layer.ffn, observe)))
        for number, layer in enumerate(decoder.weights.layers)
    ]
    twin = copy.copy(decoder)
    twin.weights = replace(decoder.weights, layers=tuple(layers))
    twin.native = twin.gpu = None
    return twin


def replay(decoder: Decoder, tokens: list[int], observe: "Observe") -> None:
    """Run *tokens* through slot 0 of the cache from its beginning, showing *observe* what each FFN is given."""
    import torch

    twin = watched(decoder, observe)
    twin.hidden_states(torch.tensor([tokens]), torch.arange(len(tokens))[None], torch.zeros(1, dtype=torch.int64))


@dataclass(frozen=True, eq=False)
class TierActivity:
    """What some tokens do to the neurons of a tier, all [tokens, k]: ``deciding`` is gate·x (or up·x + bias), ``up`` is up·x
    of dReLU neurons, else None, ``named`` (bool) says who is a candidate: all where no predictor is asked."""

    tier: NeuronTier
    deciding: "torch.Tensor"
    up: "torch.Tensor | None"
    named: "torch.Tensor"

    @property
    def passes(self) -> "torch.Tensor":
        """Whether the first product is above the threshold, so that another row is read: bool [tokens, k]."""
        return self.deciding > self.tier.activation_threshold

    @property
    def fires(self) -> "torch.Tensor":
        """bool [tokens, k]."""
        return self.passes if self.up is None else self.passes & (self.up > 0)


def activity(ffn: PlacedFfn, normed: "torch.Tensor", residual: "torch.Tensor", mode: Mode) -> "Iterator[TierActivity]":
    """Each tier's part of what the layer does with *normed* and *residual* [tokens, hidden]."""
    import torch

    scores = ffn.predictor.scores(normed, residual) if ffn.predictor and mode == "predicted" else None
    first = 0
    for tier in ffn.tiers:
        x = normed.to(tier.device)
        deciding = multiply(tier.first, x)
        if tier.up_bias is not None:
            deciding = deciding + tier.up_bias
        up = multiply(tier.up, x) if tier.up is not None and tier.activation == "drelu" else None
        named = torch.ones_like(deciding, dtype=torch.bool)
        if scores is not None and ffn.predictor:
            named = scores[:, first : first + len(tier)].to(tier.device) >= ffn.predictor.threshold
        yield TierActivity(tier, deciding, up, named)
        first += len(tier)


@dataclass(frozen=True)
class _WatchedFfn:
    number: int
    ffn: PlacedFfn
    observe: "Observe"

    def __call__(self, normed: "torch.Tensor", residual: "torch.Tensor", mode: Mode) -> "torch.Tensor":
        self.observe(self.number, self.ffn, normed, residual, mode)
        return self.ffn(normed, residual, mode)
