"""Counts on how many tokens each FFN neuron fires, and checks on the data that the model is what its config says.

A run goes through the windows of a corpus in rounds. In each round every process takes some batches through the model;
between rounds progress can be saved. The counts are sums over windows that are computed alone, or together where that
gives the same bits, so they depend neither on the batch size nor on the number of processes nor on an interruption.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .errors import CheckpointError, CorpusError, UnsupportedModelError
from .hf_model import observe_ffn
from .model_families import ModelShape
from .processes import Processes
from .progress_file import Progress, ProgressError, ProgressFile
from .window_batch import HALVES, Position, WindowBatch

if TYPE_CHECKING:
    import torch

# Exact zeros of the activation vector and neurons at or below the threshold are the same set in a ReLU model; a gated
# product adds an accidental zero now and then (underflow in half precision).
ALLOWED_ZERO_SHARE_DIFFERENCE = 0.02
_MOST_ROWS = 2**15 - 1  # that an int16 can count
# Compared at once on a CPU, so that zeros and ones are summed before they leave its cache, but of this many tokens at least.
_NUMBERS_IN_CACHE, _LEAST_ROWS = 2**18, 32
FEW_ZEROS = 0.05  # a smooth activation has accidental ones; squared ReLU has as many as ReLU


@dataclass(frozen=True)
class Recording:
    """Exact counts per layer, int64 [2, neurons] for the two halves of the documents, over ``half_tokens`` tokens.

    ``new_tokens`` of them were counted in ``seconds``; the others had been when the run was resumed.
    """

    half_counts: tuple[np.ndarray, ...]
    half_tokens: tuple[int, int]
    new_tokens: int
    seconds: float

    @property
    def counts(self) -> tuple[np.ndarray, ...]:
        """int64 [neurons] per layer over all :attr:`tokens`."""
        return tuple(halves.sum(axis=0) for halves in self.half_counts)

    @property
    def tokens(self) -> int:
        return sum(self.half_tokens)


class FiringCounter:
    """Firings so far: ``counts`` int64 [2, neurons of all layers] on the model's device."""

    def __init__(self, shape: ModelShape, device: "torch.device") -> None:
        import torch

        self.counts = torch.zeros(HALVES, sum(shape.ffn_sizes), dtype=torch.int64, device=device)
        self._layers = self.counts.split(list(shape.ffn_sizes), dim=1)
        self._threshold, self._first_half_tokens = shape.activation_threshold, 0
        self._fires: torch.Tensor | None = None  # of rows just counted; memory that is new each time costs page faults

    def expect(self, batch: WindowBatch) -> None:
        """The next tensors that are counted belong to *batch*."""
        self._first_half_tokens = batch.first_half_tokens()

    def count(self, layer: int, pre_activation: "torch.Tensor") -> None:
        """Add what fires in *pre_activation* [tokens, neurons] of *layer*; a callback for :func:`observe_ffn`."""
        import torch

        # Into integers as wide as the numbers: torch's comparison into bool is five times slower (BF16 on a CPU).
        integer = torch.int32 if pre_activation.itemsize == 4 else torch.int16
        columns, cut = pre_activation.shape[1], self._first_half_tokens
        at_once = _MOST_ROWS if pre_activation.is_cuda else max(_LEAST_ROWS, _NUMBERS_IN_CACHE // columns)
        rows = min(at_once, _MOST_ROWS, len(pre_activation))
        if self._fires is None or self._fires.shape != (rows, columns) or self._fires.dtype != integer:
            self._fires = pre_activation.new_empty((rows, columns), dtype=integer)
        for half, tokens in enumerate((pre_activation[:cut], pre_activation[cut:])):
            for part in tokens.split(rows):
                fires = self._fires[: len(part)]
                torch.gt(part, self._threshold, out=fires)
                self._layers[layer][half] += _column_sums(fires)


def _column_sums(fires: "torch.Tensor") -> "torch.Tensor":
    """Of zeros and ones [rows, columns], at most ``_MOST_ROWS`` rows: several columns as one int64, where they fit."""
    import torch

    if fires.shape[1] * fires.itemsize % 8:
        return fires.sum(dim=0, dtype=torch.int32)
    return fires.view(torch.int64).sum(dim=0).view(fires.dtype)


class Execution(Protocol):
    """How batches go through a model: :class:`.whole_model.WholeModel` or :class:`.layer_by_layer.LayerByLayer`."""

    device: "torch.device"
    batches_per_round: int  # of one process

    def steps(self, batches: Sequence[WindowBatch], counter: FiringCounter) -> Iterator[int]:
        """Take the batches of one round through the model and count; yields the tokens' worth of work done in each step."""

    def state(self) -> "dict[str, torch.Tensor]":
        """What a round under way needs to be continued after the step just done; empty where rounds are short."""

    def restore(self, state: "dict[str, torch.Tensor]") -> None:
        """Continue the next round from *state*."""


def record_firings(
    execution: Execution,
    shape: ModelShape,
    batches: Iterable[WindowBatch],
    advance: Callable[[int], None] = lambda _: None,
    *,
    processes: Processes | None = None,
    progress_file: ProgressFile | None = None,
    saved: Progress | None = None,
    position: Position | None = None,
) -> Recording:
    """Count the firings of *batches*, which begin at *position* of the corpus when *saved* progress is continued.

    With several *processes* every one must call with the same batches, and gets the sum of all counts. The first one keeps
    *progress_file* up to date. Raises ``CorpusError`` when there is no token at all.
    """
    processes, position = processes or Processes(), position or Position()
    counter = FiringCounter(shape, execution.device)
    if saved and processes.is_first:
        before = saved.tensors.get("counts")
        if before is None or before.shape != counter.counts.shape or before.dtype != counter.counts.dtype:
            raise ProgressError(
                "the saved progress holds no counts of this model: run the command again without --resume"
            )
        counter.counts += before.to(execution.device)
    round_counts = counter.counts.clone() if execution.batches_per_round > 1 else None  # before the round under way
    if saved and round_counts is not None and processes.count == 1 and "round.counts" in saved.tensors:
        counter.counts.copy_(saved.tensors["round.counts"])
        execution.restore(_without_prefix(saved.tensors, "round.state."))

    def save(counts: "torch.Tensor", under_way: "dict[str, torch.Tensor]") -> None:
        assert progress_file and position
        progress_file.save({"counts": counts, **under_way}, position.to_json())

    processes.require_same("position in the corpus", str(position.to_json()), execution.device)
    new_tokens, began = 0, time.perf_counter()
    iterator = iter(batches)
    while group := list(islice(iterator, processes.count * execution.batches_per_round)):
        mine, mine_done = processes.share(group), 0
        for tokens in execution.steps(mine, counter):
            mine_done += tokens
            advance(tokens)
            if round_counts is not None and progress_file and processes.count == 1 and progress_file.due():
                state = {f"round.state.{name}": tensor for name, tensor in execution.state().items()}
                save(round_counts, {"round.counts": counter.counts, **state})
        for batch in group:
            position.add(batch)
        round_tokens = sum(batch.tokens for batch in group)
        new_tokens += round_tokens
        advance(round_tokens - mine_done)
        if progress_file and processes.first_says(progress_file.due(), execution.device):
            total = processes.sum(counter.counts)
            if processes.is_first:
                save(total, {})
        if round_counts is not None:
            round_counts.copy_(counter.counts)
    if position.tokens == 0:
        raise CorpusError(
            "the corpus holds no text outside its held-out documents, of which the first is one: give it more documents "
            "(in a .txt file blank lines separate them)"
        )
    processes.require_same("text", str(position.to_json()), execution.device)
    total = processes.sum(counter.counts).cpu()
    seconds = time.perf_counter() - began
    layers = total.split(list(shape.ffn_sizes), dim=1)
    first, second = position.half_tokens
    return Recording(tuple(layer.numpy().copy() for layer in layers), (first, second), new_tokens, seconds)


def _without_prefix(tensors: "dict[str, torch.Tensor]", prefix: str) -> "dict[str, torch.Tensor]":
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def verify_activation(model: Any, shape: ModelShape, batch: "torch.Tensor") -> None:
    """Compare the share of exact zeros in the FFN activations with the share of neurons that do not fire.

    Raises ``UnsupportedModelError`` for a model that is not ReLU by its config, stating the measured share, and for one
    whose data contradicts its config; ``CheckpointError`` for one that computes infinity or NaN, whose neurons would
    pass for silent ones.
    """
    import torch

    zeros, silent = [0.0] * shape.num_layers, [0.0] * shape.num_layers

    def measure(into: list[float], layer: int, values: torch.Tensor, at_zero: torch.Tensor) -> None:
        if not values.isfinite().all():
            raise CheckpointError(
                f"the FFN of layer {layer} computes values that are not finite, so its weights or those before it are "
                "damaged or the type is too narrow: download the model again, or use --dtype float32"
            )
        into[layer] = at_zero.float().mean().item()

    with (
        torch.inference_mode(),
        observe_ffn(
            model,
            shape,
            pre_activation=lambda layer, z: measure(silent, layer, z, z <= shape.activation_threshold),
            activation=lambda layer, h: measure(zeros, layer, h, h == 0),
        ),
    ):
        model.base_model(input_ids=batch.to(next(model.parameters()).device), use_cache=False)
    mean_zeros = sum(zeros) / len(zeros)
    if not shape.falls_silent:
        consequence = (
            "so no neuron can be skipped without loss"
            if mean_zeros < FEW_ZEROS
            else "but its maths is not implemented here"
        )
        raise UnsupportedModelError(
            f"the model's activation is {shape.activation!r} and {100 * mean_zeros:.2f} % of its FFN activations are "
            f"exactly zero over {batch.numel()} tokens, {consequence}: use a ReLU version of the model (OPT, ReluLLaMA, "
            "ProSparse, a Falcon with ReLU …)"
        )
    for layer, (zero, quiet) in enumerate(zip(zeros, silent, strict=True)):
        if abs(zero - quiet) > ALLOWED_ZERO_SHARE_DIFFERENCE:
            raise UnsupportedModelError(
                f"config.json says {shape.activation!r}, but in layer {layer} {100 * quiet:.2f} % of the neurons do not fire "
                f"while {100 * zero:.2f} % of the activations are zero: use config and code of the same model"
            )
