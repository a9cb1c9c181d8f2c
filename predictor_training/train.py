"""Trains one layer's predictor and folds its threshold, so that one global threshold of 1 serves all layers.

The network is fc2 · relu(fc1 · x) without biases, because PowerInfer's files hold no more. Two foldings follow from its
positive homogeneity: training runs on x / s with s the layer's typical magnitude (a residual stream grows with depth and
has outliers), and fc1 / s is stored; a layer's own threshold τ > 0 is chosen for a wanted recall, and fc2 / τ is stored.
A loss around the positive margin 1 keeps τ away from zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .predictor import Quality, measure_quality, threshold_for_recall
from .sample import LayerSamples

if TYPE_CHECKING:
    import torch

MARGIN = 1.0
EVALUATION_BATCH = 2048


@dataclass(frozen=True)
class TrainingOptions:
    """*recall* is what the threshold is chosen for on the calibration documents."""

    epochs: int
    batch_size: int
    learning_rate: float
    recall: float
    seed: int


@dataclass(frozen=True)
class TrainedLayer:
    """Folded weights, float32 holding values that F16 can: ``fc1`` [r, hidden], ``fc2`` [neurons, r]; threshold 1."""

    fc1: "torch.Tensor"
    fc2: "torch.Tensor"
    quality: Quality


def train_layer(
    training: LayerSamples,
    calibration: LayerSamples,
    held_out: LayerSamples,
    width: int,
    options: TrainingOptions,
    advance: Callable[[int], None] = lambda _: None,
) -> TrainedLayer:
    """Train on *training*, choose the threshold on *calibration*, report on *held_out*."""
    import torch

    scale = typical_magnitude(training)
    fc1, fc2 = fit(training, scale, width, options, advance)
    with torch.inference_mode():
        fc1 = (fc1 / scale).half().float()
        threshold = threshold_for_recall(fc1, fc2, options.recall, calibration.batches(EVALUATION_BATCH))
        fc2 = (fc2 / threshold).half().float()
        return TrainedLayer(fc1, fc2, measure_quality(fc1, fc2, 1.0, held_out.batches(EVALUATION_BATCH)))


def typical_magnitude(samples: LayerSamples) -> float:
    """Root mean square of the inputs' elements; 1 for inputs that are all zero."""
    squares = sum(float(inputs.double().square().sum()) for inputs, _ in samples.batches(EVALUATION_BATCH))
    return (squares / samples.inputs.numel()) ** 0.5 or 1.0


def fit(
    samples: LayerSamples, scale: float, width: int, options: TrainingOptions, advance: Callable[[int], None]
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Weights [width, hidden] and [neurons, width] for inputs divided by *scale*.

    Binary cross-entropy of score − 1; firings are the rare class and weigh (silent share / firing share)^½, so that the
    mild bias to recall is in the weights and only the rest is left to the threshold.
    """
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits

    generator = torch.Generator().manual_seed(options.seed)
    hidden, neurons = samples.inputs.shape[1], samples.neurons
    fc1 = torch.randn(width, hidden, generator=generator).div_(hidden**0.5).requires_grad_()
    fc2 = torch.randn(neurons, width, generator=generator).div_(width**0.5).requires_grad_()
    optimizer = torch.optim.AdamW([fc1, fc2], lr=options.learning_rate, weight_decay=0.0)
    steps = options.epochs * -(-len(samples) // options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=steps, pct_start=0.1)
    weight = rare_class_weight(samples)
    for _epoch in range(options.epochs):
        for rows in torch.randperm(len(samples), generator=generator).split(options.batch_size):
            inputs, fires = samples.batch(rows)
            z = (inputs / scale @ fc1.T).relu() @ fc2.T
            loss = binary_cross_entropy_with_logits(z - MARGIN, fires.float(), pos_weight=weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            advance(len(rows))
    return fc1.detach(), fc2.detach()


def rare_class_weight(samples: LayerSamples) -> "torch.Tensor":
    """(silent / firing)^½ over all samples, between 1 and 30 (a layer that never fires would give infinity)."""
    import torch

    firings = sum(int(fires.sum()) for _, fires in samples.batches(EVALUATION_BATCH))
    silent = len(samples) * samples.neurons - firings
    return torch.tensor((silent / max(firings, 1)) ** 0.5).clamp(1.0, 30.0)
