"""Whether a profile saw enough text: how alike the counts of two disjoint halves, or of two corpora, are.

Two numbers compare two counts of the same neurons: Spearman's rank correlation, and the share of the hottest 20 % that
both have in common (PowerInfer §3.1 finds more than 90 % between task domains).
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

HOT_SHARE = 0.2


@dataclass(frozen=True)
class Agreement:
    """Per layer and over the whole model; a correlation is None where a layer's neurons all fired equally often."""

    tokens: tuple[int, int | None]
    rank_correlation: list[float | None]
    rank_correlation_model: float | None
    hot_overlap: list[float]
    hot_overlap_model: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"tokens": list(self.tokens)}


@dataclass(frozen=True)
class Convergence:
    """``half_and_all``: the counts of half the documents against all counts; ``halves``: against those of the other half."""

    half_and_all: Agreement
    halves: Agreement

    def to_json(self) -> dict[str, Any]:
        return {"half_and_all": self.half_and_all.to_json(), "halves": self.halves.to_json()}


def measure_convergence(half_counts: Sequence[np.ndarray], half_tokens: tuple[int, int]) -> Convergence | None:
    """From counts int64 [2, neurons] per layer of two disjoint halves; None when one of them has no token."""
    if not min(half_tokens):
        return None
    first, second = ([layer[half] for layer in half_counts] for half in (0, 1))
    both = [layer.sum(axis=0) for layer in half_counts]
    return Convergence(
        measure_agreement(first, both, (half_tokens[0], sum(half_tokens))),
        measure_agreement(first, second, half_tokens),
    )


def measure_agreement(
    first: Sequence[np.ndarray], second: Sequence[np.ndarray], tokens: tuple[int, int | None]
) -> Agreement:
    """Two counts of the same layers, [neurons] each, made on so many *tokens* (None: not known)."""
    pairs = list(zip(first, second, strict=True))
    # Neurons of different layers are compared by how often they fire, as a placement over the whole model does.
    model = np.concatenate(list(first)), np.concatenate(list(second))
    return Agreement(
        tokens,
        [rank_correlation(*pair) for pair in pairs],
        rank_correlation(*model),
        [hot_overlap(*pair) for pair in pairs],
        hot_overlap(*model),
    )


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float | None:
    """Spearman's: the correlation of the ranks, equal counts sharing their mean rank; None when one side has one rank."""
    import pandas

    one, other = (pandas.Series(counts).rank().to_numpy() for counts in (first, second))
    if any(len(ranks) == 0 or ranks.min() == ranks.max() for ranks in (one, other)):
        return None
    return float(np.corrcoef(one, other)[0, 1].clip(-1.0, 1.0))


def hot_overlap(first: np.ndarray, second: np.ndarray, share: float = HOT_SHARE) -> float:
    """The share of the ⌈*share* · neurons⌉ hottest of one that are among those of the other; of equals the first in order."""
    hottest = math.ceil(share * len(first))
    one, other = (np.argsort(-counts, kind="stable")[:hottest] for counts in (first, second))
    return len(np.intersect1d(one, other)) / hottest
