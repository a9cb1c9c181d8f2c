"""Which layers are predicted by a copy of their rows and which by an MLP: the one that makes a token read fewer bytes.

While a token is decoded, time is bytes read by bandwidth. At equal recall the rows of the neurons that fire are the same
under both kinds; what differs are the predictor, read as a whole, and the first row of every candidate. Both are taken to
lie in the same memory. MLPs are in F16, or Q8_0 in models of blocks, as the runtime holds them; in a model of Q4_0 the copy
is the rows themselves, and candidates are not read again.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pi_toolkit.profiler.gguf_types import BLOCKS, TensorType
from pi_toolkit.profiler.model_families import ModelShape

from .firing_copy import CopiedLayer
from .predictor_size import F16_BYTES, copy_bytes
from .sizing import WIDTH_MULTIPLE, LayerNeed

WeightType = Literal["f16", "q8_0", "q4_0"]


def mlp_read_bytes(shape: ModelShape, layer: int, width: int, density: float, weights: WeightType) -> float:
    """Bytes per token of an MLP of *width* that names the share *density* of the neurons, and of their first rows."""
    neurons, held_in = shape.ffn_sizes[layer], _bytes("f16" if weights == "f16" else "q8_0")
    return held_in * width * (shape.hidden_size + neurons) + density * neurons * shape.hidden_size * _bytes(weights)


def copy_read_bytes(shape: ModelShape, layer: int, density: float, weights: WeightType) -> float:
    """The same of a copy."""
    neurons = shape.ffn_sizes[layer]
    candidates = 0.0 if weights == "q4_0" else density * neurons * shape.hidden_size * _bytes(weights)
    return copy_bytes(shape.hidden_size, neurons) + candidates


def copy_share(shape: ModelShape, layers: Sequence[int]) -> float:
    """Bytes of the copies of *layers* as a share of the model's in F16."""
    return sum(copy_bytes(shape.hidden_size, shape.ffn_sizes[i]) for i in layers) / (F16_BYTES * shape.num_parameters())


def layers_to_copy(
    shape: ModelShape,
    needs: Sequence[LayerNeed],
    copied: Sequence[CopiedLayer],
    recall: float,
    weights: WeightType,
    share: float,
) -> frozenset[int]:
    """Layers whose copy reads less than an MLP of any width is expected to; those that save most per byte come first, until
    copies take *share* of the model's bytes."""

    def saved(layer: int) -> float:
        need = needs[layer]

        def of_mlp(blocks: int) -> float:
            density = min(1.0, need.firing_share * (recall + need.excess(blocks)))
            return mlp_read_bytes(shape, layer, WIDTH_MULTIPLE * blocks, density, weights)

        cheapest = min(map(of_mlp, range(1, len(need.unexplained) + 1)))
        return cheapest - copy_read_bytes(shape, layer, copied[layer].quality.density, weights)

    gains = {layer: saved(layer) for layer in range(shape.num_layers)}
    chosen: list[int] = []
    for layer in sorted(gains, key=lambda layer: gains[layer] / shape.ffn_sizes[layer], reverse=True):
        if gains[layer] >= 0 and copy_share(shape, [*chosen, layer]) <= share:
            chosen.append(layer)
    return frozenset(chosen)


def better_as_copies(
    shape: ModelShape,
    mlps: Mapping[int, tuple[int, float]],
    copied: Sequence[CopiedLayer],
    copies: frozenset[int],
    weights: WeightType,
    share: float,
) -> frozenset[int]:
    """*copies* and those of *mlps* (layer: width and density, measured) whose copy reads less after all, within *share*."""
    chosen = list(copies)
    for layer, (width, density) in mlps.items():
        of_mlp = mlp_read_bytes(shape, layer, width, density, weights)
        of_copy = copy_read_bytes(shape, layer, copied[layer].quality.density, weights)
        if of_copy <= of_mlp and copy_share(shape, [*chosen, layer]) <= share:
            chosen.append(layer)
    return frozenset(chosen)


def _bytes(weights: WeightType) -> float:
    values, num_bytes = BLOCKS[TensorType[weights.upper()]]
    return num_bytes / values
