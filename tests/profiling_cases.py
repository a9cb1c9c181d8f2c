"""Firings of windows that are given as tensors, for tests that need no corpus."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from pi_toolkit.profiler import record
from pi_toolkit.profiler.model_families import ModelShape
from pi_toolkit.profiler.whole_model import WholeModel
from pi_toolkit.profiler.window_batch import WindowBatch


def record_firings(
    model: Any, shape: ModelShape, batches: Iterable[torch.Tensor], advance: Callable[[int], None] = lambda _: None
) -> record.Recording:
    """*batches* of token ids [windows, window], windows of a batch in turn for one half and the other."""
    halved = (WindowBatch(tuple(b.tolist()), tuple(n % 2 for n in range(len(b)))) for b in batches)
    return record.record_firings(WholeModel(model, shape), shape, halved, advance)
