"""Perplexity of a model in the mode its decoder runs, over windows of text."""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pi_toolkit.profiler.errors import CorpusError

from .decoder import Decoder

if TYPE_CHECKING:
    import torch


def perplexity(
    decoder: Decoder, batches: "Iterable[torch.Tensor]", advance: Callable[[int], None] = lambda _: None
) -> float:
    """exp of the mean negative log-likelihood of each token given those before it in its window.

    *batches* hold token ids int64 [windows, tokens], at most as many windows as the decoder has slots. Calls *advance*
    with the number of tokens read. Raises ``CorpusError`` when no window has two tokens.
    """
    import torch
    from torch.nn.functional import cross_entropy

    total, predictions = 0.0, 0
    for batch in batches:
        windows, tokens = batch.shape
        positions = torch.arange(tokens).expand(windows, tokens)
        hidden = decoder.hidden_states(batch, positions, torch.arange(windows))
        for row, window in zip(hidden, batch, strict=True):  # row by row: logits of a batch are large
            logits = decoder.logits(row[:-1])
            total += float(cross_entropy(logits, window[1:].to(logits.device), reduction="sum"))
        predictions += windows * (tokens - 1)
        advance(batch.numel())
    if not predictions:
        raise CorpusError("the corpus holds no window of at least two tokens: give a longer one")
    return math.exp(total / predictions)
