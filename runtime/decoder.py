"""A lean decoder for one step of many sequences at once: embedding, attention with a cache, placed FFN, output head.

It knows shapes, weights and a cache, no files, no tokenizer and no sampling. Every token is computed as if it were
alone, so the result does not depend on how sequences are batched or prompts are cut.
"""

from typing import TYPE_CHECKING

from pi_toolkit.profiler.model_families import ModelShape

from .gpu_memory import allocating
from .gpu_step import gpu_step
from .kernels.native import multiply
from .kernels.packed_matrix import row_bytes
from .kernels.sparse_ffn_reference import Mode
from .kv_cache import KeyValueCache, allowed_keys, cache_dtype, consecutive
from .native_step import native_step
from .rotary import rotate, rotation_table
from .weights import LayerWeights, ModelWeights

if TYPE_CHECKING:
    import torch

# The native step takes tokens one by one and reads the weights for each; products of whole matrices read them once, but have
# to make float32 of them. So the fewer bytes a weight has, the longer one by one is sooner: up to so many tokens times bytes
# per weight. Two cores, 0.95B model, 8 tokens predicted: F16 0.12 s one by one and 0.25 at once, Q4_0 0.05 and 0.28; 48
# tokens: F16 0.71 and 0.48, Q4_0 0.31 and 0.49; dense, 24 tokens: F16 0.65 and 0.30, Q4_0 0.33 and 0.37.
ONE_BY_ONE_BYTES: dict[Mode, float] = {"dense": 14.0, "exact": 30.0, "predicted": 30.0}


class Decoder:
    """Runs one model in *mode* over a cache of *slots* sequences of up to *context* tokens, on *threads* CPU threads."""

    def __init__(
        self, shape: ModelShape, weights: ModelWeights, slots: int, context: int, mode: Mode, threads: int | None = None
    ) -> None:
        self.shape, self.weights, self.mode = shape, weights, mode
        devices = [layer.device for layer in weights.layers]
        with allocating(f"the KV cache of {context} tokens × {slots}"):
            self.cache = KeyValueCache.allocate(shape, devices, slots, context, cache_dtype(weights.kind))
        self._rotations = {device: rotation_table(shape, device, context) for device in set(devices)}
        self.native = native_step(shape, weights, self.cache, self._rotations, threads)
        self._bytes_per_weight = row_bytes(weights.kind, shape.hidden_size) / shape.hidden_size
        self.gpu = gpu_step(shape, weights, self.cache, self._rotations)

    def step(self, tokens: "torch.Tensor", positions: "torch.Tensor", slots: "torch.Tensor") -> "torch.Tensor":
        """Logits float32 [rows, vocabulary] after the last of *tokens*; arguments as in :meth:`hidden_states`."""
        import torch

        if self.native and self._one_by_one(tokens.numel()):
            each = zip(tokens.tolist(), positions[:, 0].tolist(), slots.tolist(), strict=True)
            return torch.stack([self.native.run(*row, self.mode) for row in each])
        if self.gpu and tokens.shape[1] == 1 and (first_slot := consecutive(slots)) is not None:
            return self.logits(self.gpu.run(tokens[:, 0], positions[:, 0], first_slot, self.mode))
        return self.logits(self.hidden_states(tokens, positions, slots)[:, -1])

    def _one_by_one(self, count: int) -> bool:
        return count == 1 or count * self._bytes_per_weight <= ONE_BY_ONE_BYTES[self.mode]

    def hidden_states(self, tokens: "torch.Tensor", positions: "torch.Tensor", slots: "torch.Tensor") -> "torch.Tensor":
        """Residual stream after the last layer, float32 [rows, tokens, hidden].

        Row r holds the next tokens of the sequence in slot ``slots[r]``: *tokens* int64 [rows, tokens] at *positions*
        int64 [rows, tokens], which ascend by one and lie below the cache's context. All three are on the CPU.
        """
        import torch

        with torch.inference_mode():
            weights, shape = self.weights, self.shape
            residual = weights.embedding.select(tokens)
            if weights.positions is not None:
                residual = residual + weights.positions.select(positions + shape.position_offset)
            first, end = self._key_range(positions)
            allowed = self._on_each_device(self._allowed_keys(positions, first, end))
            places = self._on_each_device(positions)
            for number, layer in enumerate(weights.layers):
                residual = residual.to(layer.device)
                normed = layer.attention_norm(residual)
                mine = places[layer.device], allowed[layer.device]
                attended = self._attention(number, layer, normed, positions, slots, (first, end), *mine)
                if shape.parallel_block:
                    ffn_input = layer.ffn_norm(residual) if layer.ffn_norm else normed
                    residual = residual + attended + self._ffn(layer, ffn_input, residual)
                else:
                    assert layer.ffn_norm is not None, "only parallel blocks share a norm"
                    residual = residual + attended
                    residual = residual + self._ffn(layer, layer.ffn_norm(residual), residual)
            return residual

    def logits(self, hidden_states: "torch.Tensor") -> "torch.Tensor":
        """Final norm and output head: float32 [..., vocabulary] from [..., hidden], on the head's device."""
        import torch

        with torch.inference_mode():
            normed = self.weights.final_norm(hidden_states.to(self.weights.head.device))
            return multiply(self.weights.head, normed)

    def _ffn(self, layer: LayerWeights, normed: "torch.Tensor", residual: "torch.Tensor") -> "torch.Tensor":
        hidden = self.shape.hidden_size
        flat = layer.ffn(normed.reshape(-1, hidden), residual.reshape(-1, hidden), self.mode)
        return flat.view_as(residual)

    def _attention(
        self,
        number: int,
        layer: LayerWeights,
        normed: "torch.Tensor",
        positions: "torch.Tensor",
        slots: "torch.Tensor",
        key_range: tuple[int, int],
        places: "torch.Tensor | None",
        allowed: "torch.Tensor | None",
    ) -> "torch.Tensor":
        from torch.nn.functional import scaled_dot_product_attention

        shape, (rows, tokens, _) = self.shape, normed.shape
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        stacked = layer.query_key_value(normed).view(rows, tokens, heads + 2 * kv_heads, shape.head_dim)
        rotated, value = stacked.split([heads + kv_heads, kv_heads], dim=2)
        if shape.rotary:
            assert places is not None, "positions are on every device"
            rotated = self._rotate(rotated, places)
        query, key = (part.transpose(1, 2) for part in rotated.split([heads, kv_heads], dim=2))
        self.cache.store(number, slots, positions, key, value.transpose(1, 2))
        keys, values = (part.to(query.dtype) for part in self.cache.load(number, slots, *key_range))
        if tokens == 1 and heads != kv_heads:
            # Query heads that share a key head stand in for tokens, so that no key has to be repeated.
            query = query.view(rows, kv_heads, heads // kv_heads, shape.head_dim)
        grouped = query.shape[1] != kv_heads
        attended = scaled_dot_product_attention(query, keys, values, attn_mask=allowed, enable_gqa=grouped)
        attended = attended.reshape(rows, heads, tokens, shape.head_dim).transpose(1, 2)
        return layer.output(attended.reshape(rows, tokens, heads * shape.head_dim))

    def _on_each_device(self, tensor: "torch.Tensor | None") -> "dict[torch.device, torch.Tensor | None]":
        """Copied once for all layers of a device: every such copy waits for the GPU."""
        return {device: None if tensor is None else tensor.to(device) for device in self._rotations}

    def _key_range(self, positions: "torch.Tensor") -> tuple[int, int]:
        """The positions [first, end) of the keys that any of these tokens may see."""
        window = self.shape.sliding_window
        first = max(0, int(positions[:, 0].min()) - window + 1) if window else 0
        return first, int(positions[:, -1].max()) + 1

    def _allowed_keys(self, positions: "torch.Tensor", first: int, end: int) -> "torch.Tensor | None":
        """Mask bool [rows, 1, tokens, end − first], or None when every token sees every key of the range."""
        import torch

        allowed = allowed_keys(positions, torch.arange(first, end), self.shape.sliding_window)
        return None if bool(allowed.all()) else allowed[:, None]

    def _rotate(self, heads: "torch.Tensor", positions: "torch.Tensor") -> "torch.Tensor":
        """Rotary embedding of [rows, tokens, heads, head_dim] by *positions* [rows, tokens], on the device of *heads*."""
        table = self._rotations[heads.device]
        assert table is not None, "only rotary models rotate"
        cosine, sine = (part[positions][:, :, None] for part in table)
        return rotate(heads, cosine, sine)
