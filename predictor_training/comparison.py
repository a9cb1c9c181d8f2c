"""Kinds of predictors beside each other at equal bytes read per token: how many firings each finds at equal density.

Two are what a workspace holds: the MLP, from random weights or from the cut firing map, in F16 or in Q8_0 and then wider, and
the copy in four bits of the rows that decide on firing, which needs no training. Copies in other numbers of bits and signs
alone are for comparison.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from .firing_map import FiringMap
from .predictor import scores
from .sample import LayerSamples
from .sizing import WIDTH_MULTIPLE
from .train import EVALUATION_BATCH, TrainingOptions, train_layer

if TYPE_CHECKING:
    import torch

    Score = Callable[[torch.Tensor], torch.Tensor]

BLOCK = 32  # weights that share a scale of two bytes
Q8_0_BYTES, F16_BYTES = 34 / 32, 2.0  # per weight


def compare_kinds(
    splits: tuple[LayerSamples, LayerSamples, LayerSamples],
    firing: FiringMap,
    width: int,
    options: TrainingOptions,
    candidates: float,
) -> dict[str, tuple[float, float]]:
    """Per kind the bytes it reads per token, as a share of those of an MLP of *width* in F16, and the share of the firings
    of held-out documents that it finds when it names *candidates* neurons per firing."""
    import torch

    held_out, hidden = splits[2], splits[0].inputs.shape[1]
    mlp_bytes = F16_BYTES * width * (hidden + splits[0].neurons)
    wider = max(1, int(width * F16_BYTES / Q8_0_BYTES) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    found: dict[str, tuple[float, float]] = {}
    for kind, units, begins_with in (("MLP", width, None), ("MLP from the map", width, firing)):
        trained = train_layer(*splits, units, options, firing=begins_with)
        found[kind] = 1.0, recall_at(_of_mlp(trained.fc1, trained.fc2), held_out, candidates)
    trained = train_layer(*splits, wider, replace(options), firing=firing)
    weights = rounded_to_bits(trained.fc1, 8), rounded_to_bits(trained.fc2, 8)
    share = Q8_0_BYTES * wider * (hidden + splits[0].neurons) / mlp_bytes
    found["MLP from the map, Q8_0"] = share, recall_at(_of_mlp(*weights), held_out, candidates)
    for bits in (8, 4, 3, 2):
        share = (bits / 8 + 2 / BLOCK) * firing.weight.numel() / mlp_bytes
        copy = replace(firing, weight=rounded_to_bits(firing.weight, bits))
        found[f"copy in {bits} bits"] = share, recall_at(_of_map(copy), held_out, candidates)
    signs = torch.sign(firing.weight) * firing.weight.abs().mean(dim=1, keepdim=True)
    share = firing.weight.numel() / 8 / mlp_bytes
    found["signs"] = share, recall_at(_of_map(replace(firing, weight=signs)), held_out, candidates)
    return found


def recall_at(score: "Score", samples: LayerSamples, candidates: float) -> float:
    """Share of the firings among the neurons of highest *score*, *candidates* of them per firing; 1 without firings."""
    import torch

    with torch.inference_mode():
        parts = [(score(inputs), fires) for inputs, fires in samples.batches(EVALUATION_BATCH)]
        z, fires = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        named = min(int(candidates * int(fires.sum())), z.numel())
        if not named:
            return 1.0
        threshold = z.flatten().kthvalue(z.numel() - named + 1).values
        return float(((z >= threshold) & fires).sum() / fires.sum())


def rounded_to_bits(weight: "torch.Tensor", bits: int) -> "torch.Tensor":
    """*weight* as blocks of 32 along its rows would hold it: symmetric steps of *bits* bits, a scale per block."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows, -1, BLOCK) if columns % BLOCK == 0 else weight.reshape(rows, 1, columns)
    step = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return ((blocks / step).round() * step).reshape(rows, columns)


def _of_mlp(fc1: "torch.Tensor", fc2: "torch.Tensor") -> "Score":
    return lambda inputs: scores(fc1, fc2, inputs)


def _of_map(firing: FiringMap) -> "Score":
    return lambda inputs: inputs @ firing.weight.T + firing.magnitude(inputs)[:, None] * firing.bias
