"""Multiple-choice questions from a local file, answered by likelihood.

A ``.jsonl`` file holds one question a line: ``context`` (text, may be empty), ``choices`` (a list of texts) and ``label``
(index of the right one, from 0); or PIQA's own fields, ``goal``, ``sol1``, ``sol2`` and ``label``, which are put into the
words lm-eval uses for it. A choice follows its context after a space.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pi_toolkit.profiler.errors import TaskError

from .decoder import Decoder
from .eval_likelihood import Likelihood, Pair, encode_pair, log_likelihoods

FIELDS = '"context", "choices" and "label", or "goal", "sol1", "sol2" and "label"'


@dataclass(frozen=True)
class Question:
    """``label`` is the index of the right one of ``choices``, of which there are at least two, none of them empty."""

    context: str
    choices: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Accuracy:
    """Share of the questions whose right choice is the likeliest, as it stands and per character."""

    accuracy: float
    normalised: float
    questions: int

    @property
    def error(self) -> float:
        """Standard error of ``accuracy``."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / max(1, self.questions - 1))

    def to_json(self) -> dict[str, float]:
        """Under lm-eval's names of the metrics."""
        metrics = {"acc": self.accuracy, "acc_stderr": self.error, "acc_norm": self.normalised}
        return metrics | {"questions": self.questions}


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The first *limit* questions of *path*; raises ``TaskError`` naming the line that is malformed."""
    questions: list[Question] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if limit is not None and len(questions) == limit:
                break
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise TaskError(f"line {number} of {str(path)!r} is not valid JSON: mend or remove it") from None
            try:
                questions.append(_question(row))
            except ValueError as error:
                raise TaskError(f"line {number} of {str(path)!r} {error}") from None
    if not questions:
        raise TaskError(f"{str(path)!r} holds no question: give a file with {FIELDS} on each line")
    return questions


def _question(row: Any) -> Question:
    """Raises ``ValueError`` with the end of the sentence that says what is wrong."""
    if not isinstance(row, dict):
        raise ValueError(f"is no object: give {FIELDS}")
    if {"goal", "sol1", "sol2"} <= set(row):
        context, choices = f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]]
    elif {"context", "choices"} <= set(row):
        context, choices = row["context"], row["choices"]
    else:
        raise ValueError(f"lacks fields: give {FIELDS}")
    if not isinstance(context, str) or not isinstance(row.get("goal", ""), str):
        raise ValueError("has a context that is no text: put it between quotes")
    texts = isinstance(choices, list) and all(isinstance(choice, str) and choice.strip() for choice in choices)
    if not texts or len(choices) < 2:
        raise ValueError("has no list of two or more choices, each a text that is not empty: mend or remove it")
    label = row.get("label")
    if isinstance(label, str) and label.isascii() and label.isdigit() and len(label) < 6:
        label = int(label)
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < len(choices):
        raise ValueError(f"has the label {label!r:.40}: give the index of one of its {len(choices)} choices, from 0")
    try:
        "".join((context, *choices)).encode()
    except UnicodeEncodeError:
        raise ValueError("has a text that is not valid Unicode: mend or remove it") from None
    return Question(context, tuple(choices), label)


def encode_questions(questions: Iterable[Question], tokenizer: Any) -> list[list[Pair]]:
    """The choices of every question as token ids."""
    return [
        [encode_pair(tokenizer, question.context, _delimiter(question.context) + choice) for choice in question.choices]
        for question in questions
    ]


def fitting(
    questions: Sequence[Question], encoded: Sequence[Sequence[Pair]], context: int
) -> tuple[list[Question], list[Sequence[Pair]]]:
    """Those of which every choice fits into *context* positions: a choice of which only the end were scored would have an
    advantage over the others. Raises ``TaskError`` where none is left."""
    left = [index for index, pairs in enumerate(encoded) if all(len(pair.continuation) <= context for pair in pairs)]
    if not left:
        raise TaskError(f"every question has a choice longer than the context of {context} tokens: raise --ctx")
    return [questions[index] for index in left], [encoded[index] for index in left]


def _delimiter(context: str) -> str:
    return "" if not context or context[-1].isspace() else " "


def answer(
    decoder: Decoder,
    questions: Sequence[Question],
    encoded: Sequence[Sequence[Pair]],
    advance: Callable[[int], None] = lambda _: None,
) -> Accuracy:
    """How many *questions*, already *encoded*, the decoder answers rightly in its mode; calls *advance* with the choices
    that are done."""
    flat = iter(log_likelihoods(decoder, [pair for pairs in encoded for pair in pairs], advance))
    right = right_normalised = 0
    for question in questions:
        found = [next(flat) for _ in question.choices]
        right += _likeliest(found, [1] * len(found)) == question.label
        right_normalised += _likeliest(found, [len(choice) for choice in question.choices]) == question.label
    return Accuracy(right / len(questions), right_normalised / len(questions), len(questions))


def _likeliest(found: Sequence[Likelihood], lengths: Sequence[int]) -> int:
    """The first of the likeliest, per unit of length."""
    values = [likelihood.log_probability / length for likelihood, length in zip(found, lengths, strict=True)]
    return values.index(max(values))
