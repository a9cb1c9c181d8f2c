"""The decoding step of one token per sequence for models whose attention is on one GPU: everything that changes from token
to token is in tensors of fixed place and size, so that the step can be captured in a graph and replayed.

It computes what :class:`.decoder.Decoder` computes for a single token, on the same weights and the same cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi_toolkit.profiler.command_line import note
from pi_toolkit.profiler.model_families import ModelShape

from .kernels.sparse_ffn_reference import Mode
from .kernels.triton_kernels import triton_kernels
from .kv_cache import KeyValueCache, allowed_keys
from .overlap import FEWEST_STREAMED_TOKENS
from .rotary import rotate
from .step_graphs import StepGraphs
from .weights import LayerWeights, ModelWeights

if TYPE_CHECKING:
    import torch

    Rotations = Mapping[torch.device, "tuple[torch.Tensor, torch.Tensor] | None"]

# Keys are read up to the next multiple of this many positions: one graph per multiple instead of one per position, and at
# most so many masked keys too many.
KEY_MULTIPLE = 256


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What a step reads, on the device: ``embedded`` float32 [rows, hidden] and ``positions`` int64 [rows]."""

    embedded: "torch.Tensor"
    positions: "torch.Tensor"


class GpuStep:
    """One token each of consecutive sequences; ``graphs`` None runs every step eagerly."""

    def __init__(
        self,
        shape: ModelShape,
        weights: ModelWeights,
        cache: KeyValueCache,
        rotations: "Rotations",
        graphs: StepGraphs | None,
    ) -> None:
        self.shape, self.weights, self.cache, self.graphs = shape, weights, cache, graphs
        self.device = weights.layers[0].device
        self.rotation = rotations[self.device]
        self._inputs: dict[int, StepInputs] = {}

    def run(self, tokens: "torch.Tensor", positions: "torch.Tensor", first_slot: int, mode: Mode) -> "torch.Tensor":
        """Residual stream float32 [rows, hidden] after the last layer, on the GPU, valid until the next step.

        *tokens* and *positions* int64 [rows] on the CPU, of the sequences in slots ``first_slot`` and the following.
        """
        import torch

        with torch.inference_mode():
            inputs = self._filled(tokens, positions)
            longest = int(positions.max()) + 1
            end = min(-(-longest // KEY_MULTIPLE) * KEY_MULTIPLE, self.cache.context)
            # Cold rows of many tokens may be sent over the bus, which the host has to help with in every step.
            if self.graphs is None or (self.graphs.side and len(tokens) >= FEWEST_STREAMED_TOKENS):
                return self._compute(inputs, first_slot, end, mode)
            key = (len(tokens), first_slot, end, mode)
            return self.graphs.run(key, lambda: self._compute(inputs, first_slot, end, mode))

    def _filled(self, tokens: "torch.Tensor", positions: "torch.Tensor") -> StepInputs:
        """The inputs for so many rows, always the same tensors, with these contents."""
        import torch

        rows = len(tokens)
        if rows not in self._inputs:
            self._inputs[rows] = StepInputs(
                torch.zeros(rows, self.shape.hidden_size, device=self.device),
                torch.zeros(rows, dtype=torch.int64, device=self.device),
            )
        inputs = self._inputs[rows]
        embedded = self.weights.embedding.select(tokens)
        if self.weights.positions is not None:
            embedded = embedded + self.weights.positions.select(positions + self.shape.position_offset)
        inputs.embedded.copy_(embedded)
        inputs.positions.copy_(positions)
        return inputs

    def _compute(self, inputs: StepInputs, first_slot: int, end: int, mode: Mode) -> "torch.Tensor":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # Not cuDNN's, which torch prefers on Hopper for types of two bytes: it makes a plan for every number of keys, and not
        # every version of it can be captured with a mask of one's own.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return self._layers(inputs, first_slot, end, mode)

    def _layers(self, inputs: StepInputs, first_slot: int, end: int, mode: Mode) -> "torch.Tensor":
        residual, positions = inputs.embedded, inputs.positions
        allowed = self._allowed_keys(positions, end)
        rotation = None if self.rotation is None else tuple(part[positions][:, None] for part in self.rotation)
        slots = slice(first_slot, first_slot + len(positions))
        for number, layer in enumerate(self.weights.layers):
            normed = layer.attention_norm(residual)
            attended = self._attention(number, layer, normed, positions, slots, end, allowed, rotation)
            if self.shape.parallel_block:
                ffn_input = layer.ffn_norm(residual) if layer.ffn_norm else normed
                residual = residual + attended + layer.ffn(ffn_input, residual, mode)
            else:
                assert layer.ffn_norm is not None, "only parallel blocks share a norm"
                residual = residual + attended
                residual = residual + layer.ffn(layer.ffn_norm(residual), residual, mode)
        return residual

    def _attention(
        self,
        number: int,
        layer: LayerWeights,
        normed: "torch.Tensor",
        positions: "torch.Tensor",
        slots: slice,
        end: int,
        allowed: "torch.Tensor",
        rotation: "tuple[torch.Tensor, ...] | None",
    ) -> "torch.Tensor":
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        shape, rows = self.shape, len(normed)
        heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        stacked = layer.query_key_value(normed).view(rows, heads + 2 * kv_heads, head_dim)
        rotated, value = stacked.split([heads + kv_heads, kv_heads], dim=1)
        if rotation is not None:
            cosine, sine = rotation
            rotated = rotate(rotated, cosine, sine)
        query, key = rotated.split([heads, kv_heads], dim=1)
        keys, values = self.cache.keys[number][slots], self.cache.values[number][slots]
        row = torch.arange(rows, device=normed.device)
        keys[row, :, positions] = key.to(keys.dtype)
        values[row, :, positions] = value.to(values.dtype)
        # Query heads that share a key head stand in for tokens, so that no key has to be repeated.
        query = query.reshape(rows, kv_heads, heads // kv_heads, head_dim).to(keys.dtype)
        attended = scaled_dot_product_attention(query, keys[:, :, :end], values[:, :, :end], attn_mask=allowed)
        return layer.output(attended.reshape(rows, heads * head_dim).to(normed.dtype))

    def _allowed_keys(self, positions: "torch.Tensor", end: int) -> "torch.Tensor":
        """Mask bool [rows, 1, 1, end]."""
        import torch

        key_positions = torch.arange(end, device=positions.device)
        return allowed_keys(positions, key_positions, self.shape.sliding_window)[:, None, None]


def gpu_step(shape: ModelShape, weights: ModelWeights, cache: KeyValueCache, rotations: "Rotations") -> GpuStep | None:
    """The step for a model whose attention is on one GPU altogether, else None.

    A graph needs every part of the step on that GPU or in the hands of an overlap, kernels that never wait for the host,
    and a driver that takes the CPU's part as a node; otherwise each step runs eagerly.
    """
    devices = {layer.device for layer in weights.layers}
    device = weights.layers[0].device
    if device.type != "cuda" or len(devices) != 1:
        return None
    graphs = None
    side = next((layer.ffn.overlap.side for layer in weights.layers if layer.ffn.overlap), None)
    if side is not None and not side.captures:
        note(
            "no native kernels or no driver's library: the CPU's part is no node of a graph, so every step is launched anew"
        )
    elif triton_kernels(device) is not None and all(_stays_on(layer, device) for layer in weights.layers):
        graphs = StepGraphs(device, side)
    return GpuStep(shape, weights, cache, rotations, graphs)


def _stays_on(layer: LayerWeights, device: "torch.device") -> bool:
    ffn = layer.ffn
    beside = ffn.tiers[:-1] if ffn.overlap else ffn.tiers
    predictor = ffn.predictor is None or ffn.predictor.device == device
    return predictor and all(tier.device == device for tier in beside)
