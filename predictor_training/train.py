"""Trains one layer's predictor and folds its threshold, so that one global threshold of 1 serves all layers.

The network is fc2 · relu(fc1 · x) without biases, because PowerInfer's files hold no more. Two foldings follow from its
positive homogeneity: training runs on x / s with s the layer's typical magnitude (a residual stream grows with depth and
has outliers), and fc1 / s is stored; a layer's own threshold τ > 0 is chosen for a wanted recall, and fc2 / τ is stored.
A loss around a positive margin keeps τ away from zero, and one hidden unit begins as the bias that the format lacks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from .firing_map import FiringMap
from .initial_weights import MARGIN, cut_map, random_weights, weights_of_map
from .predictor import SMALLEST_THRESHOLD, Quality, measure_quality, scores, threshold_for_recall
from .sample import LayerSamples

if TYPE_CHECKING:
    import torch

EVALUATION_BATCH = 2048
INITIAL_SAMPLES = 8192
LEAST_THRESHOLD = 0.5
LARGEST_WEIGHT = 2.0**15  # half of what F16 holds
PATIENCE = 3
MOST_BALANCE = 2.0**8  # between rows of fc1, so that they stay in F16
# Of a firing in the loss. With the square root alone, 1.25 in layer 0 of the ReGLU demo model, the threshold for a recall
# of 0.98 can fall to LEAST_THRESHOLD, and scores have to be lifted after training (1.37 candidates a firing; 1.31 with 7.5).
LEAST_WEIGHT, MOST_WEIGHT = 8.0, 30.0
# Power of the impact; with 1, candidates at equal recall are 0.3 % more in the ReGLU demo model.
IMPACT_STRENGTH = 0.5
MOST_IMPACT = 8.0  # of a neuron on the loss, times the mean
SCORING_SAMPLES = 4096  # of the calibration documents, after each epoch
MOST_CANDIDATES = 2.0  # per firing of one layer while epochs are compared


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
    """Folded weights, float32 holding values that F16 can: ``fc1`` [r, hidden], ``fc2`` [neurons, r]; threshold 1.

    ``quality`` is measured on held-out documents, ``calibration`` on those that the folded ``threshold`` was chosen on.
    """

    fc1: "torch.Tensor"
    fc2: "torch.Tensor"
    quality: Quality
    calibration: Quality
    threshold: float


def train_layer(
    training: LayerSamples,
    calibration: LayerSamples,
    held_out: LayerSamples,
    width: int,
    options: TrainingOptions,
    advance: Callable[[int], None] = lambda _: None,
    firing: FiringMap | None = None,
    impact: "torch.Tensor | None" = None,
) -> TrainedLayer:
    """Train on *training*, choose the threshold on *calibration*, report on *held_out*; computes where the samples' device
    says.

    Begins with the layer's *firing* map where it is given, otherwise with random weights. A missed firing weighs as much
    as the neuron's *impact* says (:func:`.firing_map.neuron_impact`), because that is what perplexity feels.
    """
    import torch

    scale = typical_magnitude(training)
    generator = torch.Generator().manual_seed(options.seed)
    weight = rare_class_weight(training)
    if impact is not None:
        weight = weight * impact.to(weight).pow(IMPACT_STRENGTH).clamp(1 / MOST_IMPACT, MOST_IMPACT)
    with torch.inference_mode():
        if firing:
            initial = weights_of_map(cut_map(firing, training, scale), training, scale, width, weight, generator)
        else:
            initial = random_weights(training, scale, width, weight, generator)
    fc1, fc2 = fit(training, calibration, scale, initial, weight, options, advance)
    with torch.inference_mode():
        fc1, fc2 = balanced(fc1 / scale, fc2)
        return folded(fc1.half().float(), fc2, options.recall, calibration, held_out)


def balanced(fc1: "torch.Tensor", fc2: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
    """The same scores with every column of ``fc2`` of the same magnitude, the rest in the rows of ``fc1``.

    A block of Q8_0 holds 32 columns of a row with one scale, and the column of unit 0, which takes all offsets back, is the
    largest by far: in Q8_0 the predictors of the demo models lost a hundredth of their recall before.
    """
    import torch

    sizes = fc2.square().mean(dim=0).sqrt()
    alive = sizes > 0
    usual = sizes[alive].log().mean().exp() if alive.any() else torch.ones_like(sizes[0])
    factors = torch.where(alive, (sizes / usual).clamp(1 / MOST_BALANCE, MOST_BALANCE), 1.0)
    return fc1 * factors[:, None], fc2 / factors


def folded(
    fc1: "torch.Tensor", fc2: "torch.Tensor", recall: float, calibration: LayerSamples, held_out: LayerSamples
) -> TrainedLayer:
    """The layer with the threshold for *recall* on *calibration* folded into ``fc2``; ``fc1`` holds values that F16 can."""
    fc2, threshold = fold_threshold(fc1, lifted(fc1, fc2, recall, calibration), recall, calibration)
    measured = [measure_quality(fc1, fc2, 1.0, part.batches(EVALUATION_BATCH)) for part in (held_out, calibration)]
    return TrainedLayer(fc1.cpu(), fc2.cpu(), measured[0], measured[1], threshold)


def refolded(trained: TrainedLayer, recall: float, calibration: LayerSamples, held_out: LayerSamples) -> TrainedLayer:
    """*trained* with the threshold for another *recall*."""
    import torch

    with torch.inference_mode():
        fc1, fc2 = trained.fc1.to(calibration.device), trained.fc2.to(calibration.device) * trained.threshold
        return folded(fc1, fc2, recall, calibration, held_out)


def lifted(fc1: "torch.Tensor", fc2: "torch.Tensor", recall: float, calibration: LayerSamples) -> "torch.Tensor":
    """``fc2`` with all scores raised through unit 0, which is about the same on every token, where the threshold for *recall*
    would be negative or too small to divide by."""
    usual = (calibration.evenly(INITIAL_SAMPLES) @ fc1[0]).relu().mean().clamp(min=1e-6)
    for _attempt in range(4):
        batches = calibration.batches(EVALUATION_BATCH)
        threshold = threshold_for_recall(fc1, fc2, recall, batches, smallest=-math.inf)
        if threshold >= LEAST_THRESHOLD:
            break
        fc2 = fc2.clone()
        fc2[:, 0] += 1.25 * (LEAST_THRESHOLD - threshold) / usual
    return fc2


def fold_threshold(
    fc1: "torch.Tensor", fc2: "torch.Tensor", recall: float, calibration: LayerSamples
) -> "tuple[torch.Tensor, float]":
    """``fc2`` divided by the threshold for *recall*, in values that F16 can hold, and the threshold.

    Rounding moves about half of the scores at the threshold below it, so the threshold gives way, by 2^-11 and twice as
    much each time, until the rounded weights reach *recall* as well.
    """
    smallest = max(SMALLEST_THRESHOLD, float(fc2.abs().max()) / LARGEST_WEIGHT)
    threshold = threshold_for_recall(fc1, fc2, recall, calibration.batches(EVALUATION_BATCH), smallest)
    for slack in (0.0, *(2.0**-power for power in range(11, 0, -1))):
        divisor = max(smallest, threshold * (1 - slack))
        rounded = (fc2 / divisor).half().float()
        reached = measure_quality(fc1, rounded, 1.0, calibration.batches(EVALUATION_BATCH)).recall >= recall
        if reached or threshold == smallest:
            break
    return rounded, divisor


def typical_magnitude(samples: LayerSamples) -> float:
    """Root mean square of the inputs' elements; 1 for inputs that are all zero."""
    squares = sum(float(inputs.double().square().sum()) for inputs, _ in samples.batches(EVALUATION_BATCH))
    return (squares / samples.inputs.numel()) ** 0.5 or 1.0


def fit(
    samples: LayerSamples,
    calibration: LayerSamples,
    scale: float,
    initial: "tuple[torch.Tensor, torch.Tensor]",
    weight: "torch.Tensor",
    options: TrainingOptions,
    advance: Callable[[int], None],
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Weights [width, hidden] and [neurons, width] for inputs divided by *scale*, from *initial* ones.

    Binary cross-entropy of score − margin; firings are the rare class and have *weight*, so that the mild bias to recall is
    in the weights and only the rest is left to the threshold. AdamW, a short rise of the learning rate and a straight way
    down to zero. Of the epochs that one counts whose F2 on the calibration documents is best; training ends early after
    ``PATIENCE`` epochs without a better one.
    """
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    parameters = [w.clone().float().requires_grad_() for w in initial]
    fc1, fc2 = parameters
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=0.0)
    steps = options.epochs * -(-len(samples) // options.batch_size)
    total = max(steps, 3)  # below two steps up and one down the schedule divides by zero
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, total_steps=total, pct_start=max(0.1, 2 / total), anneal_strategy="linear"
    )
    compute_dtype = fast_dtype(samples.device)
    best, best_score, epochs_since = (fc1.detach(), fc2.detach()), -1.0, 0
    for _epoch in range(options.epochs):
        for rows in torch.randperm(len(samples), generator=generator).split(options.batch_size):
            inputs, fires = samples.batch(rows)
            with torch.no_grad():
                fc1.grad, fc2.grad = gradients(fc1, fc2, inputs / scale, fires, weight, compute_dtype)
            optimizer.step()
            schedule.step()
            advance(len(rows))
        with torch.inference_mode():
            score = f_beta_within_cap((fc1 / scale).detach(), fc2.detach(), options.recall, calibration)
        epochs_since += 1
        if score > best_score:
            best, best_score, epochs_since = (fc1.detach().clone(), fc2.detach().clone()), score, 0
        if epochs_since >= PATIENCE:
            break
    return best


def gradients(
    fc1: "torch.Tensor",
    fc2: "torch.Tensor",
    inputs: "torch.Tensor",
    fires: "torch.Tensor",
    weight: "torch.Tensor",
    dtype: "torch.dtype",
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Gradients of the mean weighted cross-entropy, with products in *dtype*; *weight* of firings, one or per neuron.

    Written out because autograd keeps and passes over half a dozen tensors [tokens, neurons] per step, which takes longer
    than the products.
    """
    import torch

    x, a, b, w = inputs.to(dtype), fc1.to(dtype), fc2.to(dtype), weight.to(dtype)
    units = (x @ a.T).relu_()
    firing = (units @ b.T).sub_(MARGIN).sigmoid_()
    of_scores = torch.where(fires, w * (firing - 1), firing)
    of_units = (of_scores @ b).mul_(units > 0)
    return (of_units.T @ x).float() / fires.numel(), (of_scores.T @ units).float() / fires.numel()


def fast_dtype(device: "torch.device") -> "torch.dtype":
    """BF16 where the device multiplies it several times faster than float32, otherwise float32."""
    import torch

    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if device.type == "cpu" and has_bfloat16_products() else torch.float32


@cache
def has_bfloat16_products() -> bool:
    """Whether this processor says that it has instructions for products of BF16 (AVX-512 BF16, AMX)."""
    try:
        words = set(Path("/proc/cpuinfo").read_text("utf-8", "replace").split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16"})


def f_beta_within_cap(fc1: "torch.Tensor", fc2: "torch.Tensor", recall: float, calibration: LayerSamples) -> float:
    """F2 on the first calibration samples at the threshold for *recall*, or the higher one above which there are
    ``MOST_CANDIDATES`` candidates per firing."""
    inputs, fires = calibration.batch(slice(0, SCORING_SAMPLES))
    z, firings = scores(fc1, fc2, inputs), int(fires.sum())
    if not firings:
        return -float(z.mean())  # the fewer are named the better
    allowed = firings - math.ceil(recall * firings)
    threshold = z[fires].kthvalue(allowed + 1).values
    most = int(MOST_CANDIDATES * firings)
    if int((z >= threshold).sum()) > most:
        threshold = z.flatten().kthvalue(z.numel() - most + 1).values
    named = z >= threshold
    hits = int((named & fires).sum())
    return 5 * hits / (4 * firings + int(named.sum()))


def rare_class_weight(samples: LayerSamples) -> "torch.Tensor":
    """(silent / firing)^½ over all samples, between ``LEAST_WEIGHT`` and ``MOST_WEIGHT`` (a layer that never fires would give
    infinity)."""
    import torch

    share = samples.firing_share()
    return torch.tensor(((1 - share) / max(share, 1e-9)) ** 0.5, device=samples.device).clamp(LEAST_WEIGHT, MOST_WEIGHT)
