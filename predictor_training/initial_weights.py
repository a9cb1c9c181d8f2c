"""What a predictor is before its training: random, or the layer's own firing map with its rank cut to the width.

The map G·x + b·σ(x) (see :mod:`.firing_map`) is cut where the inputs do not move: by the singular values of D·G·C^½, with C
the second moments of the inputs and D = 1 / deviation of each neuron's score. The format has a ReLU between the two matrices
and no bias, so each unit adds a multiple of the constant direction, on which every token projects at about 1, and stays in
the linear part of its ReLU for most tokens; unit 0 is that direction itself and takes the sum of these offsets back.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .firing_map import FiringMap
from .sample import LayerSamples

if TYPE_CHECKING:
    import torch

# Distance of the loss's centre from zero. Layer 0 of the 5M-parameter ReGLU demo model at recall 0.98: at margin 1 the
# threshold hits zero (recall stops at 0.95); 3 leaves room for a recall of 0.99; 8 trains slowly (1.66 instead of 1.38
# candidates per firing after the same steps).
MARGIN = 3.0
SCORE_DEVIATION = 0.3
MOMENT_SAMPLES, SCORE_SAMPLES = 32_768, 8192
LINEAR_DEVIATIONS = 2.0  # of a unit's input that lie between its usual value and the ReLU's bend
LOGISTIC_SLOPE = 1.7  # of a logistic curve that follows a Gaussian's distribution function
LEAST_ERROR = 0.01  # of a cut map, as a share of a score's deviation
MOST_CERTAIN = 20.0  # logit of a neuron's usual score
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

    Takes the eigenvectors of one matrix [hidden, hidden].
    """
    import torch

    with torch.inference_mode():
        weight, bias = firing.weight.to(samples.device), firing.bias.to(samples.device)
        inputs = samples.evenly(MOMENT_SAMPLES) / scale
        hidden = inputs.shape[1]
        moments = (inputs.T @ inputs).double() / len(inputs)
        moments += torch.eye(hidden, device=moments.device) * (SMALL * moments.diagonal().mean() + SMALL**2)
        magnitude = firing.magnitude(inputs)
        wanted = torch.stack([inputs.mean(dim=0), (inputs * magnitude[:, None]).mean(dim=0)]).double()
        constant, of_magnitude = torch.linalg.solve(moments, wanted.T).T.float()
        linear = weight + bias[:, None] * of_magnitude
        mean = linear @ inputs.mean(dim=0)
        moving = linear - mean[:, None] * constant
        deviation = (inputs[:SCORE_SAMPLES] @ moving.T).std(dim=0, correction=0).clamp(min=SMALL)
        root = torch.linalg.cholesky(moments)
        standard = (moving / deviation[:, None]).double()
        values, vectors = torch.linalg.eigh(root.T @ (standard.T @ standard) @ root)
        values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
        # U = standard · root · vectors / √values; the projections Uᵀ · standard · x have the deviation √values
        columns = standard @ (root @ vectors) * deviation.double()[:, None]
        directions = torch.linalg.solve_triangular(root.T, vectors, upper=True).T
        return CutMap(
            directions.float(), columns.float(), constant, mean, deviation, (values / values.sum().clamp(min=SMALL)).float()
        )


def weights_of_map(
    cut: CutMap, samples: LayerSamples, scale: float, width: int, weight: "torch.Tensor", generator: "torch.Generator"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """``fc1`` [width, hidden] and ``fc2`` [neurons, width] for inputs divided by *scale*.

    Units beyond the rank of the map are random. Scores are logits of firing: the error of the cut map is taken as Gaussian.
    """
    import torch

    fc1, fc2 = random_weights(samples, scale, width, weight, generator)
    rank = min(width - 1, len(cut.directions))
    with torch.inference_mode():
        inputs = samples.evenly(SCORE_SAMPLES) / scale
        projections = inputs @ cut.directions[:rank].T
        offsets = LINEAR_DEVIATIONS * projections.std(dim=0, correction=0)
        rows = cut.columns[:, :rank]
        left_out = (cut.deviation.square() - rows.square().sum(dim=1)).clamp(min=0).sqrt()
        slope = LOGISTIC_SLOPE / torch.maximum(left_out, LEAST_ERROR * cut.deviation)
        fc1[0] = cut.constant
        fc1[1 : 1 + rank] = cut.directions[:rank] + offsets[:, None] * cut.constant
        fc2[:, 1 : 1 + rank] = slope[:, None] * rows
        usual = (slope * cut.mean).clamp(-MOST_CERTAIN, MOST_CERTAIN)
        fc2[:, 0] = MARGIN + torch.log(weight) + usual - fc2[:, 1 : 1 + rank] @ offsets
    return fc1, fc2


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


def widened(
    fc1: "torch.Tensor", fc2: "torch.Tensor", wider: "tuple[torch.Tensor, torch.Tensor]"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """A trained predictor with the further units of *wider* appended, which begin with what they add on top.

    The offsets of the new units come back through unit 0, as in *wider*.
    """
    import torch

    old, (new_fc1, new_fc2) = len(fc1), wider
    grown = torch.cat([fc2, new_fc2[:, old:]], dim=1)
    # A unit's usual value is its offset, which is its projection's deviation times LINEAR_DEVIATIONS = LINEAR_DEVIATIONS.
    grown[:, 0] -= LINEAR_DEVIATIONS * new_fc2[:, old:].sum(dim=1)
    return torch.cat([fc1, new_fc1[old:]]), grown


def narrowed(
    fc1: "torch.Tensor", fc2: "torch.Tensor", width: int, inputs: "torch.Tensor"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """A trained predictor with the *width* units that move its scores most on *inputs* (scaled, [tokens, hidden]); what
    the others add on the mean goes to unit 0."""
    import torch

    units = (inputs @ fc1.T).relu()
    moves = units.std(dim=0, correction=0) * fc2.norm(dim=0)
    moves[0] = torch.inf
    kept = moves.topk(width).indices.sort().values
    gone = torch.ones(len(fc1), dtype=torch.bool, device=fc1.device)
    gone[kept] = False
    smaller = fc2[:, kept].clone()
    smaller[:, 0] += fc2[:, gone] @ units.mean(dim=0)[gone] / units[:, 0].mean().clamp(min=SMALL)
    return fc1[kept], smaller
