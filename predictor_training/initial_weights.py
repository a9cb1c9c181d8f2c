"""What a predictor is before its training: random, or the layer's own firing map with its rank cut to the width.

The map G·x + b·σ(x) (see :mod:`.firing_map`) is cut where the inputs do not move: by the singular values of D·G·C^½, with C
the second moments of the inputs and D = 1 / deviation of each neuron's score. The format has a ReLU between the two matrices
and no bias, so each unit adds a multiple of the constant direction, on which every token projects at about 1, and stays in
the linear part of its ReLU for most tokens; unit 0 is that direction itself and takes the sum of these offsets back. Inputs
without a mean (those of models with random weights) have no such direction; there two units of opposite sign are one line.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .firing_map import FiringMap
from .predictor import scores
from .sample import LayerSamples

if TYPE_CHECKING:
    import torch

# Distance of the loss's centre from zero. Layer 0 of the 5M-parameter ReGLU demo model at recall 0.98: at margin 1 the
# threshold hits zero (recall stops at 0.95); 3 leaves room for a recall of 0.99; 8 trains slowly (1.66 instead of 1.38
# candidates per firing after the same steps).
MARGIN = 3.0
SCORE_DEVIATION = 0.3
MOMENT_SAMPLES, SCORE_SAMPLES = 32_768, 8192
LINEAR_DEVIATIONS = 3.0  # of a unit's input that lie between its usual value and the ReLU's bend
LOGISTIC_SLOPE = 1.7  # of a logistic curve that follows a Gaussian's distribution function
LEAST_ERROR = 0.1  # of a cut map, as a share of a score's deviation
STEADIEST = 0.02  # deviation of a score as a share of its mean
SMALL = 1e-6


@dataclass(frozen=True)
class CutMap:
    """A firing map in the order of what its directions carry.

    ``directions`` [≤ hidden, hidden], projections of unit deviation, most important first; ``columns`` [neurons, ≤ hidden]
    what each adds to the neurons' scores; ``constant`` [hidden], on which every token projects at about 1; ``mean``
    [neurons]; ``deviation`` [neurons] of the whole scores; ``energy`` [≤ hidden] share of the scores' variance.
    """

    directions: "torch.Tensor"
    columns: "torch.Tensor"
    constant: "torch.Tensor"
    mean: "torch.Tensor"
    deviation: "torch.Tensor"
    energy: "torch.Tensor"

    def unexplained(self, width: int) -> float:
        """Deviation of the scores that a predictor of *width* units leaves out, as a share of the whole."""
        return float(self.energy[max(0, width - 1) :].sum().clamp(min=0)) ** 0.5


def cut_map(firing: FiringMap, samples: LayerSamples, scale: float) -> CutMap:
    """Decompose *firing* by what it does on *samples* divided by *scale*; computes on the samples' device.

    Takes the eigenvectors of two matrices [hidden, hidden].
    """
    import torch

    with torch.inference_mode():
        weight, bias = firing.weight.to(samples.device), firing.bias.to(samples.device)
        inputs = samples.evenly(MOMENT_SAMPLES) / scale
        moments = (inputs.T @ inputs).double() / len(inputs)
        # Sums in float32 leave directions in which inputs hardly move with a negative second moment of rounding errors.
        squares, axes = torch.linalg.eigh(moments)
        spread = squares.clamp(min=SMALL * float(squares.mean()) + SMALL**2).sqrt()
        root, inverse_root = axes * spread, axes / spread  # C = root · rootᵀ
        magnitude = firing.magnitude(inputs)
        wanted = torch.stack([inputs.mean(dim=0), (inputs * magnitude[:, None]).mean(dim=0)]).double()
        constant, of_magnitude = ((wanted @ inverse_root) @ inverse_root.T).float()
        linear = weight + bias[:, None] * of_magnitude
        mean = linear @ inputs.mean(dim=0)
        moving = linear - mean[:, None] * constant
        deviation = (inputs[:SCORE_SAMPLES] @ moving.T).std(dim=0, correction=0)
        deviation = torch.maximum(deviation, STEADIEST * mean.abs()).clamp(min=SMALL)
        standard = (moving / deviation[:, None]).double()
        values, vectors = torch.linalg.eigh(root.T @ (standard.T @ standard) @ root)
        values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
        # U = standard · root · vectors / √values; the projections Uᵀ · standard · x have the deviation √values
        columns = standard @ (root @ vectors) * deviation.double()[:, None]
        directions = (inverse_root @ vectors).T
        return CutMap(
            directions.float(),
            columns.float(),
            constant,
            mean,
            deviation,
            (values / values.sum().clamp(min=SMALL)).float(),
        )


def weights_of_map(
    cut: CutMap, samples: LayerSamples, scale: float, width: int, weight: "torch.Tensor", generator: "torch.Generator"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """``fc1`` [width, hidden] and ``fc2`` [neurons, width] for inputs divided by *scale*.

    Units beyond the rank of the map are random. Scores are logits of firing, the error against the whole map, measured on
    samples, taken as Gaussian. Lines are units with an offset or pairs of units, whichever has the smaller error.
    """
    import torch

    fc1, fc2 = random_weights(samples, scale, width, weight, generator)
    with torch.inference_mode():
        inputs = samples.evenly(SCORE_SAMPLES) / scale
        rank = min(width - 1, len(cut.directions))
        exact = (inputs @ cut.directions.T) @ cut.columns.T + (inputs @ cut.constant)[:, None] * cut.mean

        def error(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            return (scores(rows, columns, inputs) - exact).square().mean(dim=0).sqrt()

        choices = [_with_offsets(cut, rank), _in_pairs(cut, min(rank, (width - 1) // 2))]
        errors = [error(*choice) for choice in choices]
        best = min(range(2), key=lambda i: float((errors[i] / cut.deviation).mean()))
        slope = LOGISTIC_SLOPE / torch.maximum(errors[best], LEAST_ERROR * cut.deviation)
        rows, columns = choices[best]
        fc1[: len(rows)] = rows
        fc2[:, : len(rows)] = slope[:, None] * columns
        fc2[:, 0] += MARGIN + torch.log(weight)
    return fc1, fc2


def _with_offsets(cut: CutMap, rank: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """The first *rank* directions, a unit each, and the constant one; scores have the unit of the map."""
    import torch

    rows = torch.cat([cut.constant[None], cut.directions[:rank] + LINEAR_DEVIATIONS * cut.constant])
    columns = cut.columns[:, :rank]
    return rows, torch.cat([(cut.mean - LINEAR_DEVIATIONS * columns.sum(dim=1))[:, None], columns], dim=1)


def _in_pairs(cut: CutMap, rank: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """The first *rank* directions, two units each, and the constant one."""
    import torch

    directions, columns = cut.directions[:rank], cut.columns[:, :rank]
    rows = torch.cat([cut.constant[None], directions, -directions])
    return rows, torch.cat([cut.mean[:, None], columns, -columns], dim=1)


def random_weights(
    samples: LayerSamples, scale: float, width: int, weight: "torch.Tensor", generator: "torch.Generator"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Random weights, but unit 0 projects on the mean input, which makes it about 1 on every token, and its column of fc2
    holds the score each neuron's firing share alone calls for.

    Against random weights throughout: 1.38 instead of 1.40 candidates per firing in layer 0 of the ReGLU demo model and
    1.43 instead of 1.47 in layer 2, at the same recall after the same steps.
    """
    import torch

    hidden, neurons, device = samples.inputs.shape[1], samples.neurons, samples.device
    fc1 = (torch.randn(width, hidden, generator=generator) / hidden**0.5).to(device)
    fc2 = (torch.randn(neurons, width, generator=generator) * (SCORE_DEVIATION / width**0.5)).to(device)
    inputs, fires = samples.batch(slice(0, SCORE_SAMPLES))
    mean = inputs.mean(dim=0) / scale
    fc1[0] = mean / mean.square().sum().clamp(min=SMALL)
    share = fires.float().mean(dim=0).clamp(1 / SCORE_SAMPLES, 1 - 1 / SCORE_SAMPLES)
    fc2[:, 0] = MARGIN + torch.log(weight * share / (1 - share))
    return fc1, fc2
