"""What a model looks like inside a GGUF container: keys, tensor names, and the order of rows. Reader and writer share it.

    magic  "PWRI"   PowerInfer's engine: predictors included, down matrices transposed, neurons fire by ReLU
    magic  "GGUF"   llama.cpp: dense

Keys, with A = ``general.architecture``: "llama" (also for Mistral), "falcon", "opt", "bamboo"; dense files of the last two,
which llama.cpp does not know, say "powerinfer_toolkit.opt" and ".bamboo", so that other readers refuse them by name.

    A.context_length  A.embedding_length  A.block_count  A.feed_forward_length (u32, or array of u32 where layers differ)
    A.attention.head_count  A.attention.head_count_kv  A.attention.key_length (where it is not embedding / heads)
    A.attention.layer_norm_rms_epsilon or A.attention.layer_norm_epsilon (f32)  A.attention.sliding_window
    A.rope.dimension_count  A.rope.freq_base  A.rope.scaling.type "linear" with A.rope.scaling.factor
    general.name  general.file_type  general.quantization_version  powerinfer.sparse_threshold (f32, PWRI)

and keys of ours, ``powerinfer_toolkit.`` + ``version`` (u32, 1), ``fingerprint`` (string: of the model the file was made
from, which quantised weights could not give), ``activation`` (string: nothing in a dense file says ReLU),
``activation_threshold`` (f32, with activation fatrelu), ``end_token_ids`` (array of u32). Without ``activation`` a PWRI file
means ReLU, of Bamboo dReLU, and a dense one what llama.cpp runs: SiLU, for Falcon GELU.

Tensors, numpy order (rows first), ``blk.{i}.`` before those of layer i:

    token_embd  position_embd  output_norm  output (absent when tied)
    attn_norm  attn_q  attn_k  attn_v  attn_output  ffn_norm  ffn_gate  ffn_up        [outputs, inputs], as checkpoints
    ffn_down [hidden, neurons] in dense files, ffn_down_t [neurons, hidden] in PWRI files (its bias: ffn_down_t.bias)
    fc1 [r, hidden]  fc2 [neurons, r] in PWRI files, but for layers whose predictor is a copy of their rows

The array ``copy_thresholds`` of F32, in a key of ours, is there where a layer's predictor is such a copy: one number per
layer, NaN for the others.
    Falcon: attn_qkv (all query rows, then key, then value); with two norms attn_norm_2 is the attention's and attn_norm
    the FFN's

LLaMA's and Bamboo's query and key rows lie in the order of interleaved rotary pairs: within a head, row 2j is our row j
and row 2j+1 our row j + head_dim / 2.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import GgufError
from .gguf_container import GgufFile, KeyValue, Magic, ValueType
from .model_families import ModelShape, Rotary, bamboo
from .model_families.opt import POSITION_OFFSET
from .model_families.shape import parse_activation

OURS, VERSION = "powerinfer_toolkit.", 1
_FAMILY_OF: dict[Magic, dict[str, str]] = {
    "PWRI": {"llama": "llama", "opt": "opt", "falcon": "falcon", "bamboo": "bamboo"},
    "GGUF": {"llama": "llama", "falcon": "falcon", f"{OURS}opt": "opt", f"{OURS}bamboo": "bamboo"},
}
SPARSE_ACTIVATION = {"llama": "relu", "falcon": "relu", "opt": "relu", "bamboo": bamboo.ACTIVATION}
_DENSE_ACTIVATION = SPARSE_ACTIVATION | {"llama": "silu", "falcon": "gelu"}
_LLAMA_SHAPED = ("llama", "bamboo")
_REMEDY = "make or download the file again"
_SHARED_NAMES = {"embedding": "token_embd", "positions": "position_embd", "final_norm": "output_norm", "head": "output"}
_LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "fused_qkv": "attn_qkv",
}
# Keys of the architecture that say nothing the maths depends on, or what the tensors say as well.
_NEUTRAL = ("vocab_size", "tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned")


def architecture(shape: ModelShape, magic: Magic) -> str:
    """The value of ``general.architecture``."""
    return next(name for name, family in _FAMILY_OF[magic].items() if family == shape.family)


def shared_name(role: str) -> str:
    """``embedding.weight`` → ``token_embd.weight``."""
    stem, part = role.rsplit(".", 1)
    return f"{_SHARED_NAMES[stem]}.{part}"


def layer_name(shape: ModelShape, magic: Magic, layer: int, role: str) -> str:
    """``query.weight`` → ``blk.0.attn_q.weight``."""
    stem, part = role.rsplit(".", 1)
    if stem == "down":
        name = "ffn_down_t" if magic == "PWRI" else "ffn_down"
    elif shape.family == "falcon" and shape.separate_ffn_norm and stem in ("attention_norm", "ffn_norm"):
        name = "attn_norm_2" if stem == "attention_norm" else "attn_norm"
    else:
        name = _LAYER_NAMES[stem]
    return f"blk.{layer}.{name}.{part}"


def predictor_names(layer: int) -> tuple[str, str]:
    return f"blk.{layer}.fc1.weight", f"blk.{layer}.fc2.weight"


def stored_layer_shapes(shape: ModelShape, magic: Magic, layer: int) -> dict[str, tuple[int, ...]]:
    """Tensors of one layer by role in the shapes a file has them in: Falcon's attention fused, PWRI's down transposed."""
    shapes = shape.attention_shapes() | shape.ffn_shapes(layer)
    if shape.family == "falcon":
        rows = sum(shapes.pop(f"{role}.weight")[0] for role in ("query", "key", "value"))
        shapes["fused_qkv.weight"] = (rows, shape.hidden_size)
    if magic == "PWRI":
        shapes["down.weight"] = shapes["down.weight"][::-1]
    return shapes


def interleaved_rows(shape: ModelShape, role: str) -> np.ndarray | None:
    """For LLaMA's query and key: which of our rows lies at each place of the file, int64 [rows]; None elsewhere."""
    stem = role.rsplit(".", 1)[0]
    if shape.family not in _LLAMA_SHAPED or stem not in ("query", "key"):
        return None
    heads = shape.num_heads if stem == "query" else shape.num_kv_heads
    rows = np.arange(heads * shape.head_dim).reshape(heads, 2, shape.head_dim // 2)
    return rows.swapaxes(1, 2).reshape(-1)


def shape_keys(shape: ModelShape, magic: Magic) -> list[KeyValue]:
    """The keys ``A.…`` of a model."""
    arch, keys = architecture(shape, magic), []

    def add(name: str, value_type: ValueType, value: Any, item_type: ValueType | None = None) -> None:
        keys.append(KeyValue(f"{arch}.{name}", value_type, value, item_type))

    add("context_length", ValueType.U32, shape.max_positions)
    add("embedding_length", ValueType.U32, shape.hidden_size)
    add("block_count", ValueType.U32, shape.num_layers)
    if len(set(shape.ffn_sizes)) == 1:
        add("feed_forward_length", ValueType.U32, shape.ffn_sizes[0])
    else:
        add("feed_forward_length", ValueType.ARRAY, list(shape.ffn_sizes), ValueType.U32)
    if shape.rotary:
        add("rope.dimension_count", ValueType.U32, shape.head_dim)
    add("attention.head_count", ValueType.U32, shape.num_heads)
    add("attention.head_count_kv", ValueType.U32, shape.num_kv_heads)
    if shape.head_dim * shape.num_heads != shape.hidden_size:
        add("attention.key_length", ValueType.U32, shape.head_dim)
        add("attention.value_length", ValueType.U32, shape.head_dim)
    epsilon = "layer_norm_rms_epsilon" if shape.norm == "rms" else "layer_norm_epsilon"
    add(f"attention.{epsilon}", ValueType.F32, shape.norm_epsilon)
    if shape.sliding_window:
        add("attention.sliding_window", ValueType.U32, shape.sliding_window)
    if shape.rotary:
        add("rope.freq_base", ValueType.F32, shape.rotary.theta)
        if shape.rotary.linear_factor != 1.0:
            add("rope.scaling.type", ValueType.STRING, "linear")
            add("rope.scaling.factor", ValueType.F32, shape.rotary.linear_factor)
    if shape.family == "falcon":
        add("tensor_data_layout", ValueType.STRING, "jploski")
    if magic == "GGUF":
        add("vocab_size", ValueType.U32, shape.vocabulary_size)
    return keys


def read_shape(file: GgufFile, magic: Magic, activation: str | None = None) -> ModelShape:
    """The shape of the model in *file*; *activation* (see :func:`.shape.parse_activation`) replaces the one that is assumed
    where the file states none.

    Raises ``GgufError`` for an architecture or key whose maths is not known here and for sizes that contradict each other.
    """
    arch = file.value("general.architecture", ValueType.STRING)
    family = _FAMILY_OF[magic].get(arch)
    if family is None:
        known = ", ".join(_FAMILY_OF[magic])
        raise GgufError(
            f"holds a model of architecture {arch!r}: use one of {known}, or the model's original directory"
        )
    keys = _ArchitectureKeys(file, arch)
    layers, hidden = keys.size("block_count", limit=len(file.tensors)), keys.size("embedding_length")
    heads = keys.size("attention.head_count")
    head_dim = keys.size("attention.key_length", hidden // heads)
    keys.agree("attention.value_length", head_dim)
    rotary = None
    if family != "opt":
        keys.agree("rope.dimension_count", head_dim)
        rotary = Rotary(keys.number("rope.freq_base", 10000.0), _linear_factor(keys))
    embedding, positions = _rows(file, "token_embd.weight"), keys.size("context_length")
    if family == "opt":
        positions = _rows(file, "position_embd.weight") - POSITION_OFFSET
    llama_shaped = family in _LLAMA_SHAPED
    epsilon = "layer_norm_rms_epsilon" if llama_shaped else "layer_norm_epsilon"
    assumed = (SPARSE_ACTIVATION if magic == "PWRI" else _DENSE_ACTIVATION)[family]
    what, threshold = _stated_activation(file) or parse_activation(activation or assumed)
    if what == "fatrelu" and family != "llama":
        raise GgufError(f"is a {family} model with fatrelu, and only LLaMA's is implemented: use another model")
    shape = ModelShape(
        family=family,
        vocabulary_size=embedding,
        hidden_size=hidden,
        ffn_sizes=keys.ffn_sizes(layers),
        num_heads=heads,
        num_kv_heads=keys.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=positions,
        activation=what,
        gated=llama_shaped,
        norm="rms" if llama_shaped else "layer",
        norm_epsilon=keys.number(f"attention.{epsilon}", 1e-5 if family == "opt" else None),
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        ffn_bias="blk.0.ffn_up.bias" in file.tensors,
        tied_embeddings="output.weight" not in file.tensors,
        rotary=rotary,
        position_offset=POSITION_OFFSET if family == "opt" else 0,
        sliding_window=keys.optional_size("attention.sliding_window"),
        parallel_block=family == "falcon",
        separate_ffn_norm=family != "falcon" or "blk.0.attn_norm_2.weight" in file.tensors,
        activation_threshold=threshold,
    )
    keys.refuse_the_rest()
    if shape.num_heads % shape.num_kv_heads or shape.head_dim % 2 or positions < 1:
        raise GgufError(f"states {heads} heads of {head_dim} over {shape.num_kv_heads} key/value heads: {_REMEDY}")
    return shape


def activation_keys(shape: ModelShape) -> list[KeyValue]:
    """What neurons compute, in keys of ours."""
    keys = [KeyValue(f"{OURS}activation", ValueType.STRING, shape.activation)]
    if shape.activation == "fatrelu":
        keys.append(KeyValue(f"{OURS}activation_threshold", ValueType.F32, shape.activation_threshold))
    return keys


def _stated_activation(file: GgufFile) -> tuple[str, float] | None:
    """What the file's neurons compute, and FATReLU's threshold; None where it does not say."""
    if f"{OURS}activation" not in file.key_values:
        return None
    activation = file.value(f"{OURS}activation", ValueType.STRING)
    if activation != "fatrelu":
        return activation, 0.0
    threshold = file.value(f"{OURS}activation_threshold", ValueType.F32)
    if not (math.isfinite(threshold) and threshold >= 0):
        raise GgufError(f"states an activation threshold of {threshold}: {_REMEDY}")
    return activation, _shortest_decimal(threshold)


def _shortest_decimal(value: float) -> float:
    """The float written with the fewest digits that stands for the same F32: 0.01 in place of 0.009999999776."""
    return float(str(np.float32(value)))


def _rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise GgufError(f"has no tensor {name!r}: {_REMEDY}")
    return file.tensors[name].shape[0]


def _linear_factor(keys: "_ArchitectureKeys") -> float:
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", 1.0)
    if kind not in ("none", "linear"):
        raise GgufError(f"states rotary scaling {kind!r}, which is not implemented (linear is): use another model")
    return factor if kind == "linear" else 1.0


class _ArchitectureKeys:
    """Hands out the keys ``A.…`` checked, and at the end refuses those nobody asked for."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self._values: Mapping[str, KeyValue] = {
            name.removeprefix(f"{arch}."): item for name, item in file.key_values.items() if name.startswith(f"{arch}.")
        }
        self._asked = set(_NEUTRAL)

    def size(self, name: str, default: int | None = None, limit: int = 2**31) -> int:
        """A whole number from 1 to *limit*; without *default* the key is required."""
        self._asked.add(name)
        item = self._values.get(name)
        value = default if item is None else item.value
        whole = item is None or item.type in (ValueType.U32, ValueType.U64, ValueType.I32, ValueType.U16)
        if value is None or not whole or not 1 <= value <= limit:
            raise GgufError(
                f"states {name} = {_shown(value)} where a whole number from 1 to {limit} belongs: {_REMEDY}"
            )
        return int(value)

    def optional_size(self, name: str) -> int | None:
        return self.size(name) if name in self._values else None

    def agree(self, name: str, wanted: int) -> None:
        """Refuse a file whose *name* differs from what the other keys ask for."""
        if self.size(name, wanted) != wanted:
            raise GgufError(
                f"states {name} = {self.size(name)} where only {wanted} is implemented for its heads: use another model"
            )

    def number(self, name: str, default: float | None) -> float:
        """A finite float above zero, read as the shortest decimal that stands for the same F32."""
        self._asked.add(name)
        item = self._values.get(name)
        value = default if item is None else item.value
        proper = item is None or item.type in (ValueType.F32, ValueType.F64)
        if value is None or not proper or not (math.isfinite(value) and value > 0):
            raise GgufError(f"states {name} = {_shown(value)} where a number above 0 belongs: {_REMEDY}")
        return _shortest_decimal(value) if item is not None and item.type == ValueType.F32 else float(value)

    def text(self, name: str, default: str) -> str:
        self._asked.add(name)
        item = self._values.get(name)
        if item is not None and item.type != ValueType.STRING:
            raise GgufError(f"states {name} = {_shown(item.value)} where a name belongs: {_REMEDY}")
        return default if item is None else item.value

    def ffn_sizes(self, layers: int) -> tuple[int, ...]:
        """Neurons per layer, from one number or one per layer."""
        name = "feed_forward_length"
        item = self._values.get(name)
        if item is None or item.type != ValueType.ARRAY:
            return (self.size(name),) * layers
        self._asked.add(name)
        whole = item.item_type in (ValueType.U32, ValueType.I32)
        if not whole or len(item.value) != layers or not all(1 <= size <= 2**31 for size in item.value):
            raise GgufError(f"states no {name} for each of its {layers} layers: {_REMEDY}")
        return tuple(int(size) for size in item.value)

    def refuse_the_rest(self) -> None:
        """Raise ``GgufError`` naming keys that could change the maths and were not asked for."""
        unknown = sorted(
            name
            for name, item in self._values.items()
            if name not in self._asked and (item.type == ValueType.ARRAY or item.value)
        )
        if unknown:
            raise GgufError(
                f"has keys whose effect on the maths is not known here ({', '.join(unknown[:5])}): use a model without them"
            )


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
