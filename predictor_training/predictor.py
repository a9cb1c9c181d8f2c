"""What a predictor computes, how good it is, and the threshold that reaches a wanted recall."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Score = Callable[[torch.Tensor], torch.Tensor]  # [tokens, neurons] from inputs [tokens, hidden]
    Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]  # (inputs, firing mask)

# A threshold of zero could not be folded into the weights (they are divided by it).
SMALLEST_THRESHOLD = 1e-3


def scores(fc1: "torch.Tensor", fc2: "torch.Tensor", inputs: "torch.Tensor") -> "torch.Tensor":
    """fc2 · relu(fc1 · x): [tokens, neurons] from inputs [tokens, hidden]."""
    return (inputs @ fc1.T).relu_() @ fc2.T


@dataclass(frozen=True)
class Quality:
    """Counts over tokens × neurons, and the shares made of them."""

    decisions: int
    firings: int
    candidates: int
    hits: int

    @property
    def recall(self) -> float:
        return self.hits / self.firings if self.firings else 1.0

    @property
    def precision(self) -> float:
        return self.hits / self.candidates if self.candidates else 1.0

    @property
    def density(self) -> float:
        return self.candidates / self.decisions

    @property
    def accuracy(self) -> float:
        """Share of the decisions that are right."""
        return 1 - (self.firings + self.candidates - 2 * self.hits) / self.decisions

    @property
    def excess(self) -> float:
        """Candidates that do not fire, per firing."""
        return (self.candidates - self.hits) / self.firings if self.firings else 0.0

    @property
    def firing_share(self) -> float:
        return self.firings / self.decisions


def measure_quality(fc1: "torch.Tensor", fc2: "torch.Tensor", threshold: float, batches: "Batches") -> Quality:
    """:func:`quality_of` an MLP."""
    return quality_of(lambda inputs: scores(fc1, fc2, inputs), threshold, batches)


def quality_of(score: "Score", threshold: float, batches: "Batches") -> Quality:
    """Compare candidates (score ≥ *threshold*) with firings over *batches* of (inputs, firing mask)."""
    decisions = firings = candidates = hits = 0
    for inputs, fires in batches:
        named = score(inputs) >= threshold
        decisions += fires.numel()
        firings += int(fires.sum())
        candidates += int(named.sum())
        hits += int((named & fires).sum())
    return Quality(decisions, firings, candidates, hits)


def threshold_for_recall(
    fc1: "torch.Tensor",
    fc2: "torch.Tensor",
    recall: float,
    batches: "Batches",
    smallest: float = SMALLEST_THRESHOLD,
) -> float:
    """:func:`threshold_of_scores` of an MLP."""
    return threshold_of_scores(lambda inputs: scores(fc1, fc2, inputs), recall, batches, smallest)


def threshold_of_scores(score: "Score", recall: float, batches: "Batches", smallest: float) -> float:
    """The largest threshold at which at least *recall* of the firings are candidates, but no less than *smallest*; with no
    firing at all, the largest score seen, so that almost nothing is named."""
    import torch

    of_firings: list[torch.Tensor] = []
    largest = smallest
    for inputs, fires in batches:
        z = score(inputs)
        of_firings.append(z[fires])
        largest = max(largest, float(z.max()))
    firing_scores = torch.cat(of_firings)
    if not len(firing_scores):
        return largest
    allowed_misses = len(firing_scores) - math.ceil(recall * len(firing_scores))
    return max(smallest, float(firing_scores.kthvalue(allowed_misses + 1).values))
