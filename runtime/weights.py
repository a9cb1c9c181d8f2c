"""The weights of a model in the form the decoder computes with, each on the device its placement names.

They are read tensor by tensor from the memory-mapped checkpoint, converted and copied, so that loading needs the memory
of the result and of one tensor.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.checkpoint import Checkpoint

from .kernels.sparse_ffn_reference import NeuronRows
from .placed_ffn import PlacedFfn
from .tier_plan import TierPlan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Linear:
    """y = weight · x + bias; ``weight`` [outputs, inputs]."""

    weight: "torch.Tensor"
    bias: "torch.Tensor | None"

    def __call__(self, x: "torch.Tensor") -> "torch.Tensor":
        from torch.nn.functional import linear

        return linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Norm:
    """RMS norm without a bias, layer norm with one."""

    weight: "torch.Tensor"
    bias: "torch.Tensor | None"
    epsilon: float

    def __call__(self, x: "torch.Tensor") -> "torch.Tensor":
        from torch.nn.functional import layer_norm, rms_norm

        if self.bias is None:
            return rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True)
class LayerWeights:
    """One layer; ``query_key_value`` stacks the rows of the three maps, ``ffn_norm`` is None where attention and FFN share
    a norm (Falcon-7B)."""

    attention_norm: Norm
    query_key_value: Linear
    output: Linear
    ffn_norm: Norm | None
    ffn: PlacedFfn

    @property
    def device(self) -> "torch.device":
        """Where the attention is, and with it the residual stream."""
        return self.output.weight.device


@dataclass(frozen=True)
class ModelWeights:
    """A whole model; the embedding [vocabulary, hidden] and learned positions stay on the cold tier, where reading one row
    per token costs nothing."""

    embedding: "torch.Tensor"
    positions: "torch.Tensor | None"
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: "torch.Tensor"


def load_weights(
    checkpoint: Checkpoint,
    plan: TierPlan,
    predictors: PredictorSet | None,
    dtype: "torch.dtype",
    advance: Callable[[int], None] = lambda _: None,
) -> ModelWeights:
    """All weights of *checkpoint* in *dtype*, placed by *plan*; calls *advance* once per layer.

    Raises ``CheckpointError`` for tensors that are absent or of another shape than the config says.
    """
    shape = checkpoint.shape
    embedding = checkpoint.shared("embedding.weight").to(plan.cold, dtype)
    head_device = plan.head_device()
    tied = shape.tied_embeddings and head_device == plan.cold
    layers = []
    for layer in range(shape.num_layers):
        layers.append(_load_layer(checkpoint, plan, predictors, layer, dtype))
        advance(1)
    return ModelWeights(
        embedding=embedding,
        positions=None if shape.rotary else checkpoint.shared("positions.weight").to(plan.cold, dtype),
        layers=tuple(layers),
        final_norm=_norm(checkpoint, checkpoint.shared, "final_norm", head_device, dtype),
        head=embedding if tied else checkpoint.shared("head.weight").to(head_device, dtype),
    )


def _load_layer(
    checkpoint: Checkpoint, plan: TierPlan, predictors: PredictorSet | None, layer: int, dtype: "torch.dtype"
) -> LayerWeights:
    import torch

    device = plan.attention_device(layer)
    attention = checkpoint.attention(layer)

    def stacked(part: str) -> torch.Tensor | None:
        parts = [attention[f"{role}.{part}"] for role in ("query", "key", "value") if f"{role}.{part}" in attention]
        return torch.cat(parts).to(device, dtype) if parts else None

    query_key_value = stacked("weight")
    assert query_key_value is not None
    output_bias = attention.get("output.bias")
    return LayerWeights(
        attention_norm=_norm(checkpoint, attention.__getitem__, "attention_norm", device, dtype),
        query_key_value=Linear(query_key_value, stacked("bias")),
        output=Linear(
            attention["output.weight"].to(device, dtype), None if output_bias is None else output_bias.to(device, dtype)
        ),
        ffn_norm=_norm(checkpoint, lambda role: checkpoint.layer(layer, role), "ffn_norm", device, dtype)
        if checkpoint.shape.separate_ffn_norm
        else None,
        ffn=_load_ffn(checkpoint, plan, predictors, layer, dtype),
    )


def _load_ffn(
    checkpoint: Checkpoint, plan: TierPlan, predictors: PredictorSet | None, layer: int, dtype: "torch.dtype"
) -> PlacedFfn:
    import torch

    shape = checkpoint.shape
    tiers = [(device, torch.from_numpy(ids)) for device, ids in plan.tiers(layer, shape.ffn_sizes[layer])]

    def rows_of(role: str, transposed: bool = False) -> list[torch.Tensor]:
        """The tensor's rows per tier, neurons first."""
        tensor = checkpoint.layer(layer, role)
        neurons_first = tensor.T if transposed else tensor
        return [neurons_first[ids].to(device, dtype).contiguous() for device, ids in tiers]

    up, down = rows_of("up.weight"), rows_of("down.weight", transposed=True)
    absent: list[None] = [None] * len(tiers)
    gate = rows_of("gate.weight") if shape.gated else absent
    up_bias = rows_of("up.bias") if shape.ffn_bias else absent
    device = plan.attention_device(layer)
    predictor, threshold = None, 0.0
    if predictors:
        order = torch.cat([ids for _, ids in tiers])
        where = plan.predictor_device(layer)
        predictor = (predictors.fc1[layer].to(where, dtype), predictors.fc2[layer][order].to(where, dtype))
        threshold = predictors.threshold
    return PlacedFfn(
        tiers=tuple(NeuronRows(*parts) for parts in zip(up, down, gate, up_bias, strict=True)),
        down_bias=checkpoint.layer(layer, "down.bias").to(device, dtype) if shape.ffn_bias else None,
        predictor=predictor,
        threshold=threshold,
    )


def _norm(
    checkpoint: Checkpoint,
    tensor: "Callable[[str], torch.Tensor]",
    role: str,
    device: "torch.device",
    dtype: "torch.dtype",
) -> Norm:
    shape = checkpoint.shape
    bias = tensor(f"{role}.bias").to(device, dtype) if shape.norm == "layer" else None
    return Norm(tensor(f"{role}.weight").to(device, dtype), bias, shape.norm_epsilon)
