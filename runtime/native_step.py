"""The whole decoding step of one token in native code, for models that lie on the CPU altogether.

It computes what :class:`.decoder.Decoder` computes for a single token, on the same weights and the same cache.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pi_toolkit.profiler.model_families import ModelShape

from .kernels.native import MODES, address, extension, matrix
from .kernels.packed_matrix import KINDS
from .kernels.sparse_ffn_reference import Mode
from .kv_cache import KeyValueCache
from .weights import LayerWeights, ModelWeights, Norm

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    Rotations = Mapping[torch.device, "tuple[torch.Tensor, torch.Tensor] | None"]


class NativeStep:
    """Holds the native model and every tensor it points to."""

    def __init__(self, step: Any, vocabulary_size: int, keep_alive: object) -> None:
        self._step, self._vocabulary_size, self._keep_alive = step, vocabulary_size, keep_alive

    @property
    def instruction_set(self) -> str:
        """What the kernels run on: avx512_vnni, avx512, avx2 or portable."""
        return self._step.instruction_set

    def run(self, tokens: list[int], first: int, slot: int, mode: Mode) -> "torch.Tensor":
        """Logits float32 [vocabulary] after *tokens*, one by one from position *first* of the sequence in *slot*."""
        import torch

        logits = torch.empty(self._vocabulary_size, dtype=torch.float32)
        for position, token in enumerate(tokens, start=first):
            last = position == first + len(tokens) - 1
            self._step.run(token, position, slot, MODES.index(mode), logits.data_ptr() if last else 0)
        return logits


def native_step(
    shape: ModelShape, weights: ModelWeights, cache: KeyValueCache, rotations: "Rotations", threads: int | None
) -> NativeStep | None:
    """The native step, or None where a part of the model is not on the CPU or the extension is missing."""
    import torch

    if any(device.type != "cpu" for device in _devices(weights)):
        return None
    module = extension()
    if module is None:
        return None
    rotation = next(iter(rotations.values()))
    kinds = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    native_shape = module.Shape(
        hidden=shape.hidden_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        context=cache.context,
        sliding_window=shape.sliding_window or 0,
        position_offset=shape.position_offset,
        parallel_block=shape.parallel_block,
        cache_type=KINDS.index(kinds[cache.keys[0].dtype]),
        cosines=address(rotation[0]) if rotation else 0,
        sines=address(rotation[1]) if rotation else 0,
    )
    step = module.DecodeStep(
        shape=native_shape,
        layers=[
            _layer(module, layer, keys, values)
            for layer, keys, values in zip(weights.layers, cache.keys, cache.values, strict=True)
        ],
        embedding=matrix(module, weights.embedding),
        positions=matrix(module, weights.positions),
        head=matrix(module, weights.head),
        final_norm=_norm(module, weights.final_norm),
        threads=threads or torch.get_num_threads(),
    )
    return NativeStep(step, shape.vocabulary_size, (weights, cache, rotations))


def _devices(weights: ModelWeights) -> "set[torch.device]":
    devices = {weights.embedding.device, weights.head.device}
    for layer in weights.layers:
        devices |= {layer.device} | {tier.device for tier in layer.ffn.tiers}
        if layer.ffn.predictor:
            devices.add(layer.ffn.predictor.device)
    return devices


def _layer(module: "ModuleType", layer: LayerWeights, keys: "torch.Tensor", values: "torch.Tensor") -> Any:
    ffn = layer.ffn
    return module.Layer(
        attention_norm=_norm(module, layer.attention_norm),
        query_key_value=matrix(module, layer.query_key_value.weight),
        query_key_value_bias=address(layer.query_key_value.bias),
        output=matrix(module, layer.output.weight),
        output_bias=address(layer.output.bias),
        ffn_norm=_norm(module, layer.ffn_norm) if layer.ffn_norm else module.Norm(),
        tiers=[tier.native(module) for tier in ffn.tiers],
        down_bias=address(ffn.down_bias),
        predictor=ffn.predictor.native(module) if ffn.predictor else module.Predictor(),
        keys=address(keys),
        values=address(values),
    )


def _norm(module: "ModuleType", norm: Norm) -> Any:
    return module.Norm(address(norm.weight), address(norm.bias), norm.epsilon)
