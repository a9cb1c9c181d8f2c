"""Next-token distributions of several models, or modes of one, compared on the same windows of text.

The first is what the others are compared with: perplexity of each, its change in percent with a standard error, the
divergence of its distributions from the first's, and how often both think the same token likeliest.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .decoder import Decoder
from .eval_windows import ScoredWindow, batches

if TYPE_CHECKING:
    import torch

POSITIONS_AT_ONCE = 128  # bounds the memory of logits: 16 MB per model at a vocabulary of 32,000


@dataclass(frozen=True)
class LanguageModel:
    """``read`` turns token ids int64 [windows, tokens] into states [windows, tokens, …], ``logits`` some of those states
    [n, …] into float32 [n, vocabulary]."""

    read: "Callable[[torch.Tensor], torch.Tensor]"
    logits: "Callable[[torch.Tensor], torch.Tensor]"


def of_decoder(decoder: Decoder) -> LanguageModel:
    """*decoder* in the mode that it has at the time; reads at most as many windows as it has slots, from position 0."""
    import torch

    def read(token_ids: torch.Tensor) -> torch.Tensor:
        rows, tokens = token_ids.shape
        return decoder.hidden_states(token_ids, torch.arange(tokens).expand(rows, tokens), torch.arange(rows))

    return LanguageModel(read, decoder.logits)


@dataclass
class Score:
    """Sums over predictions: ``losses`` and ``counts`` (negative log-likelihood and number) by window, Kullback-Leibler
    ``divergence`` of the first model's distributions from this one's in nats, ``agreements`` on the likeliest token."""

    losses: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    divergence: float = 0.0
    agreements: int = 0

    @property
    def predictions(self) -> int:
        return sum(self.counts)

    @property
    def perplexity(self) -> float:
        """exp of the mean loss; infinity where it is beyond a float."""
        return _exp(sum(self.losses) / self.predictions)

    @property
    def kl(self) -> float:
        """Mean per prediction, in nats."""
        return self.divergence / self.predictions

    @property
    def top1_agreement(self) -> float:
        return self.agreements / self.predictions

    def change_from(self, first: "Score") -> float:
        """Relative change of the perplexity against *first*'s on the same windows."""
        mean = (sum(self.losses) - sum(first.losses)) / self.predictions
        return math.expm1(mean) if mean < 1 else _exp(mean) - 1

    def change_error(self, first: "Score") -> float | None:
        """Standard error of :meth:`change_from`, by how much it differs from window to window; None for one window.

        Windows, not tokens, are taken as independent: neighbouring tokens are not.
        """
        windows, mean = len(self.losses), (sum(self.losses) - sum(first.losses)) / self.predictions
        if windows < 2:
            return None
        triples = zip(self.losses, first.losses, self.counts, strict=True)
        squares = sum((mine - theirs - mean * count) ** 2 for mine, theirs, count in triples)
        return _exp(mean) * math.sqrt(squares * windows / (windows - 1)) / self.predictions


def _exp(number: float) -> float:
    try:
        return math.exp(number)
    except OverflowError:
        return math.inf


def compare(
    models: Mapping[str, LanguageModel],
    windows: Iterable[ScoredWindow],
    rows: int,
    vocabulary_size: int,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Score]:
    """Score *models* on *windows*, up to *rows* of them at once; calls *advance* with the tokens that were read.

    Raises ``CheckpointError`` for ids beyond the vocabulary.
    """
    import torch

    scores = {name: Score() for name in models}
    with torch.inference_mode():
        for token_ids, group in batches(windows, rows, vocabulary_size):
            states = {name: model.read(token_ids) for name, model in models.items()}
            for row, window in enumerate(group):
                for score in scores.values():
                    score.losses.append(0.0)
                    score.counts.append(window.scored)
                last = len(window.token_ids) - 1
                for first in range(window.first_scored, last, POSITIONS_AT_ONCE):
                    piece = slice(first, min(first + POSITIONS_AT_ONCE, last))
                    targets = token_ids[row, first + 1 : piece.stop + 1]
                    logits = {name: model.logits(states[name][row, piece]) for name, model in models.items()}
                    _add(scores, logits, targets)
            advance(token_ids.numel())
    return scores


def _add(scores: dict[str, Score], logits: "Mapping[str, torch.Tensor]", targets: "torch.Tensor") -> None:
    """Add one piece of a window, float32 [n, vocabulary] of each model and int64 [n], to *scores*."""
    from torch.nn.functional import cross_entropy

    reference = None
    for name, score in scores.items():
        mine = logits[name].float()
        score.losses[-1] += float(cross_entropy(mine, targets.to(mine.device), reduction="sum"))
        log_shares = mine.log_softmax(dim=-1)
        reference = log_shares if reference is None else reference.to(mine.device)
        # In double precision, because the sum is over a vocabulary of small numbers of both signs.
        score.divergence += float((reference.exp() * (reference - log_shares)).double().sum())
        score.agreements += int((mine.argmax(dim=-1) == reference.argmax(dim=-1)).sum())
