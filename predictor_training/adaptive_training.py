"""Trains all layers of a model, at fixed widths or at widths that adapt until the model keeps its perplexity.

A round trains the layers whose width changed, then measures the whole model on calibration documents. While its perplexity
with predictors is out of the target, or more candidates are named than wanted, widths are chosen again from what the trained
predictors need (:mod:`.sizing`); when they stay as they are, the threshold gives way to a higher recall instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.processes import Processes

from .firing_map import firing_map, neuron_impact
from .initial_weights import cut_map
from .sample import SampleStore
from .sizing import (
    ACCURACY,
    AIM,
    WIDTH_MULTIPLE,
    LayerNeed,
    scale_from_sparsity,
    widths_for_accuracy,
    widths_for_candidates,
)
from .train import TrainedLayer, TrainingOptions, refolded, train_layer, typical_magnitude
from .training_files import TrainingFiles

Rule = Literal["perplexity", "accuracy"]
IMPACT_SAMPLES = 4096
SAFETY = 0.8  # of the target on calibration documents: others lose a little more (0.11 % where these allowed 0.10)
FEWER_MISSES = 0.7  # of those allowed, when only a higher recall is left to bring perplexity back


@dataclass(frozen=True)
class Target:
    """When sizing is done: by *rule*, perplexity within the share *perplexity* of the dense model and at most *candidates*
    per firing, or every layer's accuracy; predictors within *share* of the model, *rounds* at most."""

    rule: Rule
    perplexity: float
    candidates: float
    share: float
    rounds: int


@dataclass(frozen=True)
class Outcome:
    """Trained layers after *rounds*."""

    layers: list[TrainedLayer]
    rounds: int
    reached: bool


class LayerTrainer:
    """Trains layers from a store of samples, shared among *processes* and kept in *files*."""

    def __init__(
        self,
        store: SampleStore,
        checkpoint: Checkpoint,
        options: TrainingOptions,
        files: TrainingFiles,
        processes: Processes,
        advance: Callable[[int], None],
    ) -> None:
        self.store, self.options = store, options
        self._checkpoint, self._files, self._processes, self._advance = checkpoint, files, processes, advance

    def needs(self) -> list[LayerNeed]:
        """What is known of each layer before its training: its sparsity, and what a cut of its firing map leaves out."""
        return [self._need(layer) for layer in range(self.store.shape.num_layers)]

    def _need(self, layer: int) -> LayerNeed:
        samples = self.store.layer("training", layer)
        cut = cut_map(firing_map(self._checkpoint, layer), samples, typical_magnitude(samples))
        firing_share = samples.firing_share()
        blocks = -(-(len(cut.energy) + 1) // WIDTH_MULTIPLE)
        unexplained = tuple(cut.unexplained(WIDTH_MULTIPLE * (block + 1)) for block in range(blocks))
        return LayerNeed(samples.neurons, firing_share, unexplained, scale_from_sparsity(firing_share))

    def train(self, widths: Sequence[tuple[int, ...]], recall: float) -> list[TrainedLayer]:
        """Every layer at its last width, with the threshold for *recall* on calibration documents.

        A wider predictor begins anew with the firing map, which is nearer to the result than the trained narrow one.
        """
        layers = range(self.store.shape.num_layers)
        mine = {layer: self._trained(layer, widths[layer], recall) for layer in self._processes.share(layers)}
        self._processes.wait(self.store.device)
        trained = []
        for layer in layers:
            found = mine.get(layer) or self._files.read_layer(layer, _name(widths[layer], recall))
            assert found, "every layer is some process's"
            trained.append(found)
        return trained

    def _trained(self, layer: int, widths: tuple[int, ...], recall: float) -> TrainedLayer:
        name = _name(widths, recall)
        if found := self._files.read_layer(layer, name):
            self._advance(self.options.epochs * len(self.store.layer("training", layer)))
            return found
        splits = self.store.splits(layer)
        if recall != self.options.recall:
            trained = refolded(self._trained(layer, widths, self.options.recall), recall, *splits[1:])
        else:
            firing = firing_map(self._checkpoint, layer)
            impact = neuron_impact(self._checkpoint, layer, splits[0].evenly(IMPACT_SAMPLES))
            trained = train_layer(*splits, widths[-1], self.options, self._advance, firing, impact)
        self._files.write_layer(layer, name, trained)
        return trained


def train_adaptively(
    trainer: LayerTrainer, target: Target, perplexity_change: Callable[[list[TrainedLayer]], float]
) -> Outcome:
    """Rounds of training and measuring until *target* is reached, nothing is left to change, or rounds run out."""
    shape, recall = trainer.store.shape, trainer.options.recall
    needs = trainer.needs()

    def choose() -> list[int]:
        if target.rule == "accuracy":
            return widths_for_accuracy(shape, needs, recall, target.share)
        return widths_for_candidates(shape, needs, recall, target.candidates, target.share)

    paths: list[tuple[int, ...]] = [(width,) for width in choose()]
    for round_number in range(1, target.rounds + 1):
        layers = trainer.train(paths, recall)
        change = perplexity_change(layers)
        reached = is_reached(target, layers, change)
        if reached or round_number == target.rounds:
            break
        needs = [
            need.measured(path[-1] // WIDTH_MULTIPLE, layer.calibration.excess) if layer.calibration.firings else need
            for need, path, layer in zip(needs, paths, layers, strict=True)
        ]
        new_paths = [path if width == path[-1] else (*path, width) for path, width in zip(paths, choose(), strict=True)]
        if new_paths == paths:
            if target.rule == "accuracy" or abs(change) <= SAFETY * target.perplexity:
                break
            recall = 1 - FEWER_MISSES * (1 - recall)
        paths = new_paths
    return Outcome(layers, round_number, reached)


def is_reached(target: Target, layers: Sequence[TrainedLayer], change: float) -> bool:
    """Whether calibration documents say that sizing is done."""
    if target.rule == "accuracy":
        return all(layer.calibration.accuracy >= ACCURACY for layer in layers)
    firings = sum(layer.calibration.firings for layer in layers)
    candidates = sum(layer.calibration.candidates for layer in layers)
    return abs(change) <= SAFETY * target.perplexity and candidates <= AIM * target.candidates * firings


def _name(widths: tuple[int, ...], recall: float) -> str:
    return f"{widths[-1]}.recall-{recall:.6f}"
