"""Texts to token windows: each document is tokenised with the tokenizer's own rule for BOS, documents follow one
another without padding, and the stream is cut into windows. Only the last window of a stream may be shorter."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, CorpusError
from .model_gguf import GgufModel, is_model_file

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_DOCUMENTS_PER_CALL = 64  # the tokenizer's own threads want several texts at once


def load_tokenizer(directory: "Path", vocabulary_size: int | None = None) -> Any:
    """The tokenizer of a model directory or model file.

    Raises ``CheckpointError`` when there is none, and when its vocabulary (added tokens apart, which a model need not
    have) is beyond the *vocabulary_size* of the model.
    """
    if is_model_file(directory):
        return GgufModel(directory).tokenizer()
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:  # without trust_remote_code=False the user would be asked, on stdout, whether to run the model's own code
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError or the Rust tokenizer's own type
        raise CheckpointError(
            f"{str(directory)!r} has no usable tokenizer: download the model's tokenizer files into it"
        ) from error
    if not tokenizer("text", add_special_tokens=False)["input_ids"]:  # what transformers makes of a config alone
        raise CheckpointError(
            f"the tokenizer in {str(directory)!r} has no vocabulary: download the model's tokenizer files into it"
        )
    if vocabulary_size is not None and tokenizer.vocab_size > vocabulary_size:
        raise CheckpointError(
            f"the tokenizer in {str(directory)!r} has {tokenizer.vocab_size:,} tokens and the model {vocabulary_size:,}: "
            "use tokenizer and weights of the same model"
        )
    return tokenizer


def read_end_ids(directory: "Path") -> frozenset[int]:
    """Token ids that end a text, from ``generation_config.json`` or else ``config.json``, or from a model file; empty if
    nothing names any."""
    if is_model_file(directory):
        return GgufModel(directory).end_ids()
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((directory / name).read_text("utf-8")).get("eos_token_id")
        except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError, AttributeError):
            continue
        ids = found if isinstance(found, list) else [found]
        if found is not None and all(isinstance(end, int) for end in ids):
            return frozenset(ids)
    return frozenset()


@dataclass(frozen=True)
class Window:
    """Token ids, and the index among the texts of the document that the first of them belongs to."""

    ids: list[int]
    document: int


def document_windows(texts: Iterable[str], tokenizer: Any, window: int, tokens: int | None) -> Iterator[Window]:
    """Windows of *window* token ids out of *texts*, *tokens* ids in all (None: as many as there are)."""
    ids: list[int] = []
    documents: list[int] = []
    left = tokens
    for document, more in enumerate(_tokenised(texts, tokenizer)):
        ids += more
        documents += [document] * len(more)
        cut = len(ids) - len(ids) % window
        for start in range(0, cut, window):
            if left is not None and left <= window:
                yield Window(ids[start : start + left], documents[start])
                return
            yield Window(ids[start : start + window], documents[start])
            left = None if left is None else left - window
        ids, documents = ids[cut:], documents[cut:]
        if left is not None and left <= len(ids):
            break  # the last window is here already: no further document is read
    if ids:
        yield Window(ids[:left], documents[0])


def token_windows(texts: Iterable[str], tokenizer: Any, window: int, tokens: int | None) -> Iterator[list[int]]:
    """The ids alone of :func:`document_windows`."""
    return (window.ids for window in document_windows(texts, tokenizer, window, tokens))


def window_batches(
    windows: Iterable[list[int]], batch_size: int, vocabulary_size: int | None = None
) -> "Iterator[torch.Tensor]":
    """Batches int64 [up to *batch_size*, window]; windows of one batch have equal length, so nothing is padded.

    Raises ``CheckpointError`` for an id that a model of *vocabulary_size* has no embedding for.
    """
    import torch

    batch: list[list[int]] = []
    for window in windows:
        if vocabulary_size is not None:
            check_vocabulary(window, vocabulary_size)
        if batch and (len(batch) == batch_size or len(window) != len(batch[0])):
            yield torch.tensor(batch)
            batch = []
        batch.append(window)
    if batch:
        yield torch.tensor(batch)


def check_vocabulary(ids: list[int], vocabulary_size: int) -> None:
    """Raise ``CheckpointError`` for an id that a model of *vocabulary_size* has no embedding for."""
    if max(ids) >= vocabulary_size:
        raise CheckpointError(
            f"the tokenizer gives token {max(ids):,} and the model has {vocabulary_size:,} of them: use tokenizer and "
            "weights of the same model"
        )


def check_window(window: int, max_positions: int) -> None:
    """Raise ``CorpusError`` if the model cannot take that many tokens at once."""
    if window > max_positions:
        raise CorpusError(f"--window {window} is beyond the model's {max_positions} positions: choose a smaller window")


def _tokenised(texts: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    texts = iter(texts)
    while group := list(islice(texts, _DOCUMENTS_PER_CALL)):
        yield from tokenizer(group, verbose=False)["input_ids"]
