"""How many bytes a decoded token reads, counted: dense parts, predictors, the rows of neurons it touched, keys and values.

Which neurons fired and which were candidates is found by replaying the tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .bench_replay import activity, replay
from .decoder import Decoder
from .kernels.packed_matrix import PackedMatrix, row_bytes
from .kernels.sparse_ffn_reference import Mode
from .kv_cache import KeyValueCache
from .placed_ffn import PlacedFfn
from .placed_predictor import CopyPredictor
from .weights import LayerWeights, Linear, ModelWeights, Norm

if TYPE_CHECKING:
    import torch

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Touched:
    """Means over the decoded tokens; ``candidate_share`` is None where no predictor ran."""

    dense_bytes: float
    predictor_bytes: float
    neuron_bytes: float
    cache_bytes: float
    firing_share: float
    candidate_share: float | None

    @property
    def bytes_per_token(self) -> float:
        return self.dense_bytes + self.predictor_bytes + self.neuron_bytes + self.cache_bytes


def touched(decoder: Decoder, prompt: list[int], token_ids: list[int]) -> Touched:
    """What the decoding steps that led from *prompt* to *token_ids* read; the first of those came out of the prompt."""
    import torch

    weights, steps, predicted = decoder.weights, len(token_ids) - 1, decoder.mode == "predicted"
    neuron_bytes = fired = candidates = 0

    def count(_: int, ffn: PlacedFfn, normed: "torch.Tensor", residual: "torch.Tensor", mode: Mode) -> None:
        nonlocal neuron_bytes, fired, candidates
        for seen in activity(ffn, normed[-steps:], residual[-steps:], mode):
            first, fires, named = seen.tier.first, seen.fires, int(seen.named.sum())
            copy = ffn.predictor if mode == "predicted" and isinstance(ffn.predictor, CopyPredictor) else None
            # A candidate that stays silent costs its first row alone, a dReLU one with a gate above zero its up row too.
            ups = int((seen.passes & seen.named).sum()) if seen.tier.up else 0
            # Rows that are part of the copy have been read with it.
            firsts = 0 if copy and copy.is_part(first) else named
            rows = firsts + ups + int((fires & seen.named).sum())
            if mode == "dense":
                rows = decoder.shape.neuron_matrices * fires.numel()
            neuron_bytes += row_bytes(first.kind, first.columns) * rows
            fired, candidates = fired + int(fires.sum()), candidates + named

    replay(decoder, prompt + token_ids[:-1], count)
    neurons, positions = sum(decoder.shape.ffn_sizes), torch.arange(len(prompt), len(prompt) + steps)
    return Touched(
        dense_bytes=_dense_bytes(weights) + sum(row_bytes(table.kind, table.columns) for table in _tables(weights)),
        predictor_bytes=sum(_predictor_bytes(layer) for layer in weights.layers) if predicted else 0,
        neuron_bytes=neuron_bytes / steps,
        cache_bytes=_cache_bytes(decoder.cache, positions, decoder.shape.sliding_window),
        firing_share=fired / neurons / steps,
        candidate_share=candidates / neurons / steps if predicted else None,
    )


def weight_bytes(weights: ModelWeights) -> int:
    """All weights in memory, predictors included."""
    neurons = sum(_matrix_bytes(matrix) for layer in weights.layers for matrix in _neuron_matrices(layer))
    predictors = sum(_predictor_bytes(layer) for layer in weights.layers)
    tables = sum(_matrix_bytes(table) for table in _tables(weights) if table is not weights.head)
    return _dense_bytes(weights) + neurons + predictors + tables


def _dense_bytes(weights: ModelWeights) -> int:
    """Attention, norms, biases and head."""
    total = _matrix_bytes(weights.head) + _norm_bytes(weights.final_norm)
    for layer in weights.layers:
        total += sum(_linear_bytes(linear) for linear in (layer.query_key_value, layer.output))
        total += sum(_norm_bytes(norm) for norm in (layer.attention_norm, layer.ffn_norm) if norm)
        total += sum(_vector_bytes(bias) for bias in (layer.ffn.down_bias, *(t.up_bias for t in layer.ffn.tiers)))
    return total


def _tables(weights: ModelWeights) -> list[PackedMatrix]:
    """Of which a token reads one row."""
    return [table for table in (weights.embedding, weights.positions) if table]


def _predictor_bytes(layer: LayerWeights) -> int:
    predictor = layer.ffn.predictor
    bias = predictor.bias if isinstance(predictor, CopyPredictor) else None
    return sum(map(_matrix_bytes, predictor.matrices)) + _vector_bytes(bias) if predictor else 0


def _neuron_matrices(layer: LayerWeights) -> list[PackedMatrix]:
    """But for those that are part of a copy."""
    matrices = [matrix for tier in layer.ffn.tiers for matrix in (tier.first, tier.up, tier.down) if matrix]
    copy = layer.ffn.predictor
    return [matrix for matrix in matrices if not (isinstance(copy, CopyPredictor) and copy.is_part(matrix))]


def _cache_bytes(cache: KeyValueCache, positions: "torch.Tensor", window: int | None) -> float:
    """Keys and values that a token at each of *positions* reads, itself included; the mean."""
    seen = positions + 1 if window is None else (positions + 1).clamp(max=window)
    per_position = sum(part.shape[1] * part.shape[3] * part.itemsize for part in (*cache.keys, *cache.values))
    return float(seen.double().mean()) * per_position


def _matrix_bytes(matrix: PackedMatrix) -> int:
    return matrix.rows * row_bytes(matrix.kind, matrix.columns)


def _linear_bytes(linear: Linear) -> int:
    return _matrix_bytes(linear.weight) + _vector_bytes(linear.bias)


def _norm_bytes(norm: Norm) -> int:
    return _vector_bytes(norm.weight) + _vector_bytes(norm.bias)


def _vector_bytes(vector: "torch.Tensor | None") -> int:
    return 0 if vector is None else FLOAT_BYTES * len(vector)
