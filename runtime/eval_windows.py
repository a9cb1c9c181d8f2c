"""Which windows of a text a perplexity is measured over, and which of their predictions count.

The tokens of all documents follow one another, and windows of equal length are cut from them every *stride* tokens; what
is left at the end is no window. The token at position p of a window predicts the one at p + 1. A prediction counts from
position *score_from* on, and once: where windows overlap, in the first window that makes it with that much context. With
the stride of a whole window and BOS in front of each, these are llama.cpp's and PowerInfer's windows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from pi_toolkit.profiler.corpus import documents, split_of
from pi_toolkit.profiler.errors import CorpusError
from pi_toolkit.profiler.token_windows import token_windows, window_batches

if TYPE_CHECKING:
    import torch

Bos = Literal["window", "document"]


@dataclass(frozen=True)
class WindowOptions:
    """``length`` and ``stride`` in tokens; predictions count from position ``score_from`` of a window.

    ``bos`` "window" puts the tokenizer's BOS in the place of the first token of every window, which is never predicted
    there; "document" leaves it where the documents begin, as in the windows that counts and predictors are made from.
    Neither adds one where the tokenizer does not.
    """

    length: int
    stride: int
    score_from: int = 0
    bos: Bos = "document"


@dataclass(frozen=True)
class ScoredWindow:
    """Predictions at positions ``first_scored`` up to the last but one count."""

    token_ids: tuple[int, ...]
    first_scored: int

    @property
    def scored(self) -> int:
        return len(self.token_ids) - 1 - self.first_scored


def read_tokens(corpus: str, whole: bool, tokenizer: Any, tokens: int) -> list[int]:
    """The first *tokens* ids of the held-out documents of *corpus*, or of all of them with *whole*."""
    texts = (text for index, text in enumerate(documents(corpus)) if whole or split_of(index) == "held-out")
    return next(token_windows(texts, tokenizer, tokens, tokens), [])


def cut_windows(token_ids: Sequence[int], options: WindowOptions, bos_id: int | None) -> list[ScoredWindow]:
    """The windows of *token_ids*; raises ``CorpusError`` when there is not one."""
    if len(token_ids) < options.length:
        raise CorpusError(
            f"the text holds {len(token_ids):,} tokens, less than one window of {options.length}: give more of it (--corpus, "
            "--split all, --tokens), or a smaller --window"
        )
    windows, predicted = [], 0  # tokens before this one have been predicted, or had too little context
    for start in range(0, len(token_ids) - options.length + 1, options.stride):
        content = list(token_ids[start : start + options.length])
        if options.bos == "window" and bos_id is not None:
            content[0] = bos_id
        windows.append(ScoredWindow(tuple(content), max(options.score_from, predicted - start - 1)))
        predicted = start + options.length
    return windows


def bos_id_of(tokenizer: Any) -> int | None:
    """What the tokenizer puts in front of a text by itself; None where it puts nothing."""
    with_it, without = (tokenizer("a text", add_special_tokens=add)["input_ids"] for add in (True, False))
    return with_it[0] if with_it[:1] != without[:1] else None


def batches(
    windows: Iterable[ScoredWindow], rows: int, vocabulary_size: int
) -> "Iterator[tuple[torch.Tensor, list[ScoredWindow]]]":
    """Up to *rows* windows at once as int64 [windows, length]; raises ``CheckpointError`` for ids beyond the vocabulary."""
    windows = iter(windows)
    while group := list(islice(windows, rows)):
        (ids,) = window_batches([list(window.token_ids) for window in group], rows, vocabulary_size)
        yield ids, group
