"""Trains all layers of a model, at fixed widths or at widths that adapt until the model keeps its perplexity; layers whose
predictor is a copy of their rows are calibrated in place of trained.

A round trains the layers whose width changed, then measures the whole model on calibration documents. While its perplexity
with predictors is out of the target, or more candidates are named than wanted, widths are chosen again from what the trained
predictors need (:mod:`.sizing`); when they stay as they are, the threshold gives way to a higher recall instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.processes import Processes

from .firing_copy import CopiedLayer, calibrate_copy
from .firing_map import firing_map, neuron_impact
from .initial_weights import cut_map
from .kind_choice import WeightType, better_as_copies, copy_share, layers_to_copy
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
from .training_files import PredictedLayer, TrainingFiles

Rule = Literal["perplexity", "accuracy"]
Kind = Literal["mlp", "copy", "auto"]
# How one layer is predicted: by an MLP that has had these widths one after the other, or by a copy.
Plan = tuple[int, ...] | Literal["copy"]
IMPACT_SAMPLES = 4096
SAFETY = 0.8  # of the target on calibration documents: others lose a little more (0.11 % where these allowed 0.10)
FEWER_MISSES = 0.7  # of those allowed, when only a higher recall is left to bring perplexity back


@dataclass(frozen=True)
class Target:
    """When sizing is done: by *rule*, perplexity within the share *perplexity* of the dense model and at most *candidates*
    per firing, or every layer's accuracy; predictors within *share* of the model, *rounds* at most. Layers are of *kind*,
    with ``auto`` of the one that reads less of a model whose weights are in *weights*."""

    rule: Rule
    perplexity: float
    candidates: float
    share: float
    rounds: int
    kind: Kind = "mlp"
    weights: WeightType = "f16"


@dataclass(frozen=True)
class Outcome:
    """Trained layers after *rounds*."""

    layers: list[PredictedLayer]
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

    def copied(self, recall: float) -> list[CopiedLayer]:
        """Every layer predicted by its copy, with the threshold for *recall* on calibration documents."""
        layers = self.train(["copy"] * self.store.shape.num_layers, recall)
        return [layer for layer in layers if isinstance(layer, CopiedLayer)]

    def _need(self, layer: int) -> LayerNeed:
        samples = self.store.layer("training", layer)
        cut = cut_map(firing_map(self._checkpoint, layer), samples, typical_magnitude(samples))
        firing_share = samples.firing_share()
        blocks = -(-(len(cut.energy) + 1) // WIDTH_MULTIPLE)
        unexplained = tuple(cut.unexplained(WIDTH_MULTIPLE * (block + 1)) for block in range(blocks))
        return LayerNeed(samples.neurons, firing_share, unexplained, scale_from_sparsity(firing_share))

    def train(self, plans: Sequence[Plan], recall: float) -> list[PredictedLayer]:
        """Every layer as its plan says, an MLP at its last width, with the threshold for *recall* on calibration documents.

        A wider predictor begins anew with the firing map, which is nearer to the result than the trained narrow one.
        """
        layers = range(self.store.shape.num_layers)
        mine = {layer: self._trained(layer, plans[layer], recall) for layer in self._processes.share(layers)}
        self._processes.wait(self.store.device)
        trained = []
        for layer in layers:
            found = mine.get(layer) or self._files.read_layer(layer, _name(plans[layer], recall))
            assert found, "every layer is some process's"
            trained.append(found)
        return trained

    def _trained(self, layer: int, plan: Plan, recall: float) -> PredictedLayer:
        name = _name(plan, recall)
        if found := self._files.read_layer(layer, name):
            self._advance(self.options.epochs * len(self.store.layer("training", layer)))
            return found
        splits = self.store.splits(layer)
        trained: PredictedLayer
        if plan == "copy":
            trained = calibrate_copy(self._checkpoint, layer, *splits[1:], recall)
            self._advance(self.options.epochs * len(splits[0]))
        elif recall != self.options.recall:
            before = self._trained(layer, plan, self.options.recall)
            assert isinstance(before, TrainedLayer), "the plan is an MLP's"
            trained = refolded(before, recall, *splits[1:])
        else:
            firing = firing_map(self._checkpoint, layer)
            impact = neuron_impact(self._checkpoint, layer, splits[0].evenly(IMPACT_SAMPLES))
            trained = train_layer(*splits, int(plan[-1]), self.options, self._advance, firing, impact)
        self._files.write_layer(layer, name, trained)
        return trained


def train_adaptively(
    trainer: LayerTrainer, target: Target, perplexity_change: Callable[[list[PredictedLayer]], float]
) -> Outcome:
    """Rounds of training and measuring until *target* is reached, nothing is left to change, or rounds run out."""
    shape, recall = trainer.store.shape, trainer.options.recall
    everything = range(shape.num_layers)
    needs = [] if target.kind == "copy" else trainer.needs()
    copies = frozenset(everything) if target.kind == "copy" else frozenset()
    if target.kind == "auto":
        copied = trainer.copied(recall)
        copies = layers_to_copy(shape, needs, copied, recall, target.weights, target.share)

    def choose(plans: Sequence[Plan] | None = None) -> list[Plan]:
        """Plans with new widths, which follow those that the MLPs had."""
        mlps = [layer for layer in everything if layer not in copies]
        left = max(0.0, target.share - copy_share(shape, sorted(copies)))
        of_mlps = [needs[layer] for layer in mlps]
        widths = (
            widths_for_accuracy(shape, of_mlps, recall, left)
            if target.rule == "accuracy"
            else widths_for_candidates(shape, of_mlps, recall, target.candidates, left)
        )
        chosen: list[Plan] = ["copy"] * shape.num_layers
        for layer, width in zip(mlps, widths, strict=True):
            earlier = plans[layer] if plans else ()
            assert earlier != "copy", "an MLP's plan"
            chosen[layer] = earlier if earlier and earlier[-1] == width else (*earlier, width)
        return chosen

    plans = choose()
    for round_number in range(1, target.rounds + 1):
        layers = trainer.train(plans, recall)
        change = perplexity_change(layers)
        reached = is_reached(target, layers, change)
        if reached or round_number == target.rounds:
            break
        for number, (plan, layer) in enumerate(zip(plans, layers, strict=True)):
            if plan != "copy" and layer.calibration.firings:
                needs[number] = needs[number].measured(int(plan[-1]) // WIDTH_MULTIPLE, layer.calibration.excess)
        new_plans = choose(plans)
        if new_plans == plans:
            if target.rule == "accuracy" or abs(change) <= SAFETY * target.perplexity:
                break
            recall = 1 - FEWER_MISSES * (1 - recall)
        plans = new_plans
    if target.kind == "auto":
        layers = _better_kinds(trainer, target, layers, copies, recall)
    return Outcome(layers, round_number, reached)


def _better_kinds(
    trainer: LayerTrainer, target: Target, layers: list[PredictedLayer], copies: frozenset[int], recall: float
) -> list[PredictedLayer]:
    """*layers* with copies in place of the MLPs that turned out to read more."""
    shape = trainer.store.shape
    mlps = {i: (len(x.fc1), x.quality.density) for i, x in enumerate(layers) if isinstance(x, TrainedLayer)}
    if not mlps:
        return layers
    copied = trainer.copied(recall)
    better = better_as_copies(shape, mlps, copied, copies, target.weights, target.share)
    return [copied[number] if number in better else layer for number, layer in enumerate(layers)]


def is_reached(target: Target, layers: Sequence[PredictedLayer], change: float) -> bool:
    """Whether calibration documents say that sizing is done."""
    if target.rule == "accuracy":
        return all(layer.calibration.accuracy >= ACCURACY for layer in layers)
    firings = sum(layer.calibration.firings for layer in layers)
    candidates = sum(layer.calibration.candidates for layer in layers)
    return abs(change) <= SAFETY * target.perplexity and candidates <= AIM * target.candidates * firings


def _name(plan: Plan, recall: float) -> str:
    return f"{plan if plan == 'copy' else plan[-1]}.recall-{recall:.6f}"
