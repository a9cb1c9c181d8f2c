"""Windows on their way through a model: batches of equal length, which half of the corpus each window belongs to, and
how far a run has come.

Documents are dealt to two halves in turn, so that the counts of one can be compared with those of the other. A window
counts for the half of the document that it begins in.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .progress_file import ProgressError
from .token_windows import Window, check_vocabulary

if TYPE_CHECKING:
    import torch

HALVES = 2


@dataclass(frozen=True)
class WindowBatch:
    """Windows of equal length in the order of the corpus, with the half (0 or 1) of each."""

    windows: tuple[list[int], ...]
    halves: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.windows) * len(self.windows[0])

    def ids(self) -> "torch.Tensor":
        """int64 [windows, window], windows of the first half first."""
        import torch

        order = sorted(range(len(self.windows)), key=self.halves.__getitem__)
        return torch.tensor([self.windows[number] for number in order])

    def first_half_tokens(self) -> int:
        return self.halves.count(0) * len(self.windows[0])

    def one_by_one(self) -> "list[WindowBatch]":
        return [WindowBatch((ids,), (half,)) for ids, half in zip(self.windows, self.halves, strict=True)]


def halved_batches(windows: Iterable[Window], batch_size: int, vocabulary_size: int) -> Iterator[WindowBatch]:
    """Batches of up to *batch_size* windows; those of one batch have equal length, so nothing is padded.

    Raises ``CheckpointError`` for an id that a model of *vocabulary_size* has no embedding for.
    """
    batch: list[Window] = []
    for window in windows:
        check_vocabulary(window.ids, vocabulary_size)
        if batch and (len(batch) == batch_size or len(window.ids) != len(batch[0].ids)):
            yield _batch(batch)
            batch = []
        batch.append(window)
    if batch:
        yield _batch(batch)


def _batch(windows: list[Window]) -> WindowBatch:
    return WindowBatch(tuple(w.ids for w in windows), tuple(w.document % HALVES for w in windows))


@dataclass
class Position:
    """How many windows are done and how many tokens of each half, with a digest of all their ids."""

    windows: int = 0
    half_tokens: list[int] = field(default_factory=lambda: [0] * HALVES)
    _hash: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    @property
    def tokens(self) -> int:
        return sum(self.half_tokens)

    def add(self, batch: WindowBatch) -> None:
        """Call when all of *batch* is counted, in the order of the corpus."""
        for ids, half in zip(batch.windows, batch.halves, strict=True):
            self.windows += 1
            self.half_tokens[half] += len(ids)
            self._hash.update(array("q", ids).tobytes())

    def to_json(self) -> dict[str, Any]:
        return {"windows": self.windows, "half_tokens": list(self.half_tokens), "digest": self._hash.hexdigest()}


def skip(windows: Iterator[Window], saved: dict[str, Any]) -> Position:
    """Take from *windows* what a saved position (:meth:`Position.to_json`) says is done.

    Raises ``ProgressError`` unless these are the same windows: another corpus, order, tokenizer or split would give
    counts of nothing in particular.
    """
    position = Position()
    for window in windows if saved.get("windows") else ():
        position.add(_batch([window]))
        if position.windows == saved["windows"]:
            break
    if position.to_json() != saved:
        raise other_text()
    return position


def other_text() -> ProgressError:
    """What to say of saved progress that was made on another text than is there now."""
    return ProgressError(
        "the corpus does not begin with the text that the saved progress was made on: give the same corpus, or run the "
        "command again without --resume"
    )
