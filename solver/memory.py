"""Exact bytes of everything that has a place: attention with its KV cache, predictors, output head, single neurons.

Bytes follow from the shape alone. Vectors (biases, norms) are float32 in every type; in the quantised types matrices are
stored in blocks of 32 values along their rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pi_toolkit.predictor_training.predictor_size import PredictorSize, copy_bytes
from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.profiler.model_families import ModelShape

# Tokens of KV cache where nobody says otherwise: more than most prompts, and 0.5 GiB for Mistral-7B.
DEFAULT_CONTEXT = 4096

# values and bytes of one block (GGUF: q8_0 is one F16 scale and 32 int8, q4_0 one F16 scale and 16 bytes)
BLOCKS = {"float32": (1, 4), "bfloat16": (1, 2), "float16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18)}
DTYPES = tuple(BLOCKS)


@dataclass(frozen=True)
class UnitBytes:
    """Bytes of each unit.

    ``attention``: per layer, with its norm, the FFN's norm and output bias, and ``kv_cache``; ``predictor``: per layer, 0
    without one; ``neuron``: one FFN neuron of any layer; ``head``: output head and final norm; ``embedding``: token and
    position tables, which stay on the CPU; ``head_is_embedding``: on the CPU a tied head takes no bytes of its own.
    """

    attention: tuple[int, ...]
    kv_cache: int
    predictor: tuple[int, ...]
    neuron: int
    head: int
    embedding: int
    head_is_embedding: bool


def unit_bytes(
    shape: ModelShape,
    dtype: str,
    context: int,
    batch_size: int,
    predictor_sizes: Sequence[PredictorSize] | None = None,
    predictor_dtype: str | None = None,
    head_dtype: str | None = None,
) -> UnitBytes:
    """Bytes of a model of *shape* stored as *dtype* with a KV cache of *context* tokens for *batch_size* sequences.

    *predictor_sizes* says what each layer's predictor is: the width of an MLP, or a copy, which is q4_0 in every type; None
    when there are none. A copy counts in full, though in a model of q4_0 neurons beside it share its rows. Without a
    *predictor_dtype* and *head_dtype* MLPs and the output head are stored in :func:`precise_dtype`, also where PowerInfer's
    quantiser would choose Q5_0 (its Q8_0 files). Raises ``PlacementError`` for rows that are no whole number of quantisation
    blocks.
    """
    attention = _tensors_bytes(shape.attention_shapes().values(), dtype)
    attention += _tensors_bytes(_ffn_dense_shapes(shape), dtype)
    kv_cache = kv_cache_bytes(shape, dtype, context, batch_size)
    shared = shape.shared_shapes()
    head = [shared.get("head.weight", shared["embedding.weight"])]
    head += [tensor for role, tensor in shared.items() if role.startswith("final_norm.")]
    tables = [shared[role] for role in ("embedding.weight", "positions.weight") if role in shared]
    sizes: Sequence[PredictorSize] = predictor_sizes or [0] * shape.num_layers
    return UnitBytes(
        attention=(attention + kv_cache,) * shape.num_layers,
        kv_cache=kv_cache,
        predictor=tuple(
            _predictor_bytes(shape, n, r, predictor_dtype or precise_dtype(dtype))
            for n, r in zip(shape.ffn_sizes, sizes, strict=True)
        ),
        neuron=neuron_bytes(shape, dtype),
        head=_tensors_bytes(head, head_dtype or precise_dtype(dtype)),
        embedding=_tensors_bytes(tables, dtype),
        head_is_embedding=shape.tied_embeddings,
    )


def precise_dtype(dtype: str) -> str:
    """What the runtime holds output head and predictors in: q8_0 in a model of q4_0, because four bits there cost quality."""
    return "q8_0" if dtype == "q4_0" else dtype


def neuron_bytes(shape: ModelShape, dtype: str) -> int:
    """One FFN neuron: its rows of gate, up and (transposed) down, and its bias."""
    rows = shape.neuron_matrices * tensor_bytes((shape.hidden_size,), dtype, vector=False)
    return rows + (tensor_bytes((1,), dtype) if shape.ffn_bias else 0)


def kv_cache_bytes(shape: ModelShape, dtype: str, context: int, batch_size: int) -> int:
    """Keys and values of one layer: 2 bytes a value, 4 when the model runs in float32."""
    return context * batch_size * 2 * shape.num_kv_heads * shape.head_dim * (4 if dtype == "float32" else 2)


def tensor_bytes(tensor_shape: Sequence[int], dtype: str, vector: bool | None = None) -> int:
    """Bytes of one tensor; *vector* (by default: it has one axis) means float32 whatever the type."""
    is_vector = len(tensor_shape) == 1 if vector is None else vector
    values, num_bytes = BLOCKS["float32" if is_vector else dtype]
    if tensor_shape[-1] % values:
        raise PlacementError(
            f"rows of {tensor_shape[-1]} values are no whole number of {dtype} blocks of {values}: use --dtype bfloat16"
        )
    total = 1
    for size in tensor_shape:
        total *= size
    return total // values * num_bytes


def _tensors_bytes(shapes: Iterable[Sequence[int]], dtype: str) -> int:
    return sum(tensor_bytes(tensor_shape, dtype) for tensor_shape in shapes)


def _predictor_bytes(shape: ModelShape, neurons: int, size: PredictorSize, dtype: str) -> int:
    if size == "copy":
        return copy_bytes(shape.hidden_size, neurons)
    return _tensors_bytes([(size, shape.hidden_size), (neurons, size)], dtype) if size else 0


def _ffn_dense_shapes(shape: ModelShape) -> list[tuple[int, ...]]:
    """What an FFN holds besides its neurons: its norm and the bias of its output."""
    return [
        tensor for role, tensor in shape.ffn_shapes(0).items() if role.startswith("ffn_norm.") or role == "down.bias"
    ]
