"""How wide each layer's predictor is: from the layer's sparsity at first, then from what its predictor turned out to need.

What a predictor of width w names beyond the firings it has to find, per firing, is taken as κ · ε(w)^1.4: ε is the deviation
of the scores that the layer's firing map loses when its rank is cut to w (:meth:`.initial_weights.CutMap.unexplained`), and
κ depends on the layer. At first κ follows from sparsity alone: with Gaussian scores, 2.1 · φ(t) / q for a firing share q and
the score t that it exceeds. Once a predictor has been trained, its measured candidates give κ; that is where skewness
comes in, because a layer whose firings belong to few neurons needs fewer candidates at the same width and share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from pi_toolkit.profiler.model_families import ModelShape

MAX_WIDTH = 2**20  # hidden units of one layer that a file may state; nothing real comes near
# Rows of fc2 in blocks of 32 can be quantised to Q4_0 and Q8_0.
WIDTH_MULTIPLE = 32
# PowerInfer keeps its predictors within a tenth of the model (mean 7 %, Table 6 of the paper).
SHARE_OF_MODEL = 0.10
# Fitted to the layers of the two demo models at widths 32 to 192 and recall 0.98.
EXCESS_EXPONENT, EXCESS_SCALE = 1.4, 2.1
AIM = 0.97  # of the wanted candidates, because what a width will need is an estimate
ACCURACY = 0.95  # of every layer, the paper's first rule (§5.1 of its first version)


@dataclass(frozen=True)
class LayerNeed:
    """What decides on one layer's width: ``firing_share``, ``unexplained`` at widths 32, 64, … and ``scale`` κ."""

    neurons: int
    firing_share: float
    unexplained: tuple[float, ...]
    scale: float

    def excess(self, blocks: int) -> float:
        """Expected candidates per firing, beyond the firings that are found, with *blocks* × 32 units."""
        return self.scale * self.unexplained[min(blocks, len(self.unexplained)) - 1] ** EXCESS_EXPONENT

    def measured(self, blocks: int, excess: float) -> "LayerNeed":
        """With κ as it follows from a measured *excess* at *blocks* × 32 units."""
        left = self.unexplained[min(blocks, len(self.unexplained)) - 1] ** EXCESS_EXPONENT
        return replace(self, scale=max(excess, 0.0) / left) if left > 0 else self


def scale_from_sparsity(firing_share: float) -> float:
    """κ of a layer of which *firing_share* fires per token."""
    share = min(max(firing_share, 1e-6), 1 - 1e-6)
    return EXCESS_SCALE * NormalDist().pdf(NormalDist().inv_cdf(1 - share)) / share


def width_within_share(shape: ModelShape, share: float = SHARE_OF_MODEL) -> int:
    """The largest multiple of 32, the same for every layer, at which all predictors together hold at most *share* of the
    model's parameters; 32 where even that is more."""
    per_unit = sum(shape.hidden_size + neurons for neurons in shape.ffn_sizes)
    return max(1, int(share * shape.num_parameters() / per_unit) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def widths_for_candidates(
    shape: ModelShape, needs: Sequence[LayerNeed], recall: float, candidates: float, share: float = SHARE_OF_MODEL
) -> list[int]:
    """Widths in multiples of 32 for at most *candidates* per firing of the whole model, within *share* of its parameters.

    Blocks of 32 units go one by one to the layer where they save most rows of candidates per parameter. Beyond what
    *candidates* asks for, a block is added only if it saves more weights per token than it reads itself.
    """
    blocks, budget = [1] * len(needs), share * shape.num_parameters()
    firings = sum(need.firing_share * need.neurons for need in needs)

    def parameters(layer: int) -> int:
        return WIDTH_MULTIPLE * (shape.hidden_size + needs[layer].neurons)

    def saved_per_parameter(layer: int) -> float:
        need = needs[layer]
        fewer = need.excess(blocks[layer]) - need.excess(blocks[layer] + 1)
        return fewer * need.firing_share * need.neurons * shape.hidden_size / parameters(layer)

    def per_firing() -> float:
        excess = sum(n.firing_share * n.neurons * n.excess(b) for n, b in zip(needs, blocks, strict=True))
        return recall + excess / firings if firings else 0.0

    used = sum(map(parameters, range(len(needs))))
    while fitting := [layer for layer in range(len(needs)) if used + parameters(layer) <= budget]:
        best = max(fitting, key=saved_per_parameter)
        saved = saved_per_parameter(best)
        if saved <= 0 or (saved < 1 and per_firing() <= AIM * candidates):
            break
        blocks[best] += 1
        used += parameters(best)
    return [WIDTH_MULTIPLE * count for count in blocks]


def widths_for_accuracy(
    shape: ModelShape, needs: Sequence[LayerNeed], recall: float, share: float = SHARE_OF_MODEL
) -> list[int]:
    """The smallest widths in multiples of 32 at which every layer's decisions are expected to be right in 95 %; where
    *share* of the model's parameters does not suffice, layers furthest from it come first."""
    blocks, budget = [1] * len(needs), share * shape.num_parameters()

    def wrong(layer: int) -> float:
        need = needs[layer]
        return need.firing_share * (need.excess(blocks[layer]) + 1 - recall)

    def parameters(layer: int) -> int:
        return WIDTH_MULTIPLE * (shape.hidden_size + needs[layer].neurons)

    used = sum(map(parameters, range(len(needs))))
    while True:
        wanting = [
            layer
            for layer in range(len(needs))
            if wrong(layer) > 1 - ACCURACY
            and blocks[layer] < len(needs[layer].unexplained)
            and used + parameters(layer) <= budget
        ]
        if not wanting:
            return [WIDTH_MULTIPLE * count for count in blocks]
        worst = max(wanting, key=wrong)
        blocks[worst] += 1
        used += parameters(worst)
