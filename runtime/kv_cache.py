"""Keys and values of the tokens seen so far, preallocated: one slot per sequence, room for a fixed context."""

import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pi_toolkit.profiler.model_families import ModelShape

from .kernels.packed_matrix import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def cache_dtype(kind: Kind) -> "torch.dtype":
    """What a model of weights in *kind* keeps its keys and values in: two bytes, but for float32."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(kind, torch.float16)


def consecutive(slots: "torch.Tensor") -> int | None:
    """The first of *slots*, int64 [rows], if each is the one before plus 1."""
    start = int(slots[0])
    return start if slots.tolist() == list(range(start, start + len(slots))) else None


def allowed_keys(positions: "torch.Tensor", key_positions: "torch.Tensor", window: int | None) -> "torch.Tensor":
    """Mask bool [..., keys]: which keys a token at each of *positions* [...] sees, all before it and itself, or of these the
    last *window*."""
    allowed = key_positions <= positions[..., None]
    if window:
        allowed &= key_positions > positions[..., None] - window
    return allowed


def _zeros(size: tuple[int, ...], dtype: "torch.dtype", device: "torch.device") -> "torch.Tensor":
    """Zeros; on a CPU of memory that the system fills when it is first used, which a cache rarely is to its end."""
    import torch

    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, access=mmap.ACCESS_COPY)
    return torch.frombuffer(memory, dtype=dtype).view(size)


@dataclass(frozen=True)
class KeyValueCache:
    """``keys`` and ``values`` per layer: [slots, kv_heads, context, head_dim] on the layer's attention device."""

    keys: "tuple[torch.Tensor, ...]"
    values: "tuple[torch.Tensor, ...]"
    context: int

    @classmethod
    def allocate(
        cls, shape: ModelShape, devices: "Sequence[torch.device]", slots: int, context: int, dtype: "torch.dtype"
    ) -> "KeyValueCache":
        size = (slots, shape.num_kv_heads, context, shape.head_dim)
        keys, values = (tuple(_zeros(size, dtype, device) for device in devices) for _ in range(2))
        return cls(keys, values, context)

    def store(
        self, layer: int, slots: "torch.Tensor", positions: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor"
    ) -> None:
        """Keep *key* and *value* [rows, kv_heads, tokens, head_dim] of *positions* [rows, tokens] in *slots* [rows]."""
        for cache, new in ((self.keys[layer], key), (self.values[layer], value)):
            if len(slots) == 1:
                first = int(positions[0, 0])
                cache[int(slots[0]), :, first : first + new.shape[2]] = new[0]
            else:
                where = (slots[:, None].to(cache.device), slice(None), positions.to(cache.device))
                cache[where] = new.transpose(1, 2).to(cache.dtype)

    def load(self, layer: int, slots: "torch.Tensor", first: int, end: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Keys and values [rows, kv_heads, end − first, head_dim]; views where the slots are consecutive."""
        start = consecutive(slots)
        chosen = slots.to(self.keys[layer].device) if start is None else slice(start, start + len(slots))
        return self.keys[layer][chosen, :, first:end], self.values[layer][chosen, :, first:end]
