"""The shape record: everything about a decoder that changes its maths or the size of its tensors, and nothing else.

It knows no Hugging Face names and imports no torch, so that placements can be computed from it alone.
"""

import sys
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

from ..errors import UnsupportedModelError

LARGEST_SIZE = 2**40  # of any one dimension: beyond it only mistakes lie, and products leave the range of 64 bits
MAX_LAYERS = 10_000
TensorShapes = dict[str, tuple[int, ...]]

# What a neuron computes, with z what decides on firing: gate·x, or up·x + bias of ungated neurons.
#   relu     h = relu(z) · up·x        fires where z > 0
#   fatrelu  h = z · [z > τ] · up·x    fires where z > τ = ``activation_threshold`` (FATReLU, of the ProSparse models)
#   drelu    h = relu(z) · relu(up·x)  fires where both are above 0; gated neurons only
#   silu     h = z · sigmoid(z) · up·x, never silent
#   gelu     h = z · Φ(z) · up·x, never silent
# Ungated neurons have no factor up·x.
Activation = Literal["relu", "fatrelu", "drelu", "silu", "gelu"]
# Where a neuron that does not fire contributes exactly zero.
FALL_SILENT: "tuple[Activation, ...]" = ("relu", "fatrelu", "drelu")


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding: base *theta*, positions divided by *linear_factor*, halves rotated (not interleaved)."""

    theta: float
    linear_factor: float = 1.0


@dataclass(frozen=True)
class ModelShape:
    """One decoder-only transformer.

    ``ffn_sizes`` holds the number of FFN neurons of each layer. ``gated`` neurons compute act(gate·x) · (up·x), ungated
    ones act(up·x + bias). ``parallel_block`` feeds attention and FFN from the same layer input (Falcon).
    ``rotary`` is None for learned positions, which then start at row ``position_offset`` of their table.
    ``activation_threshold`` is what z has to exceed for a neuron to fire, other than 0 for fatrelu alone.
    """

    family: str
    vocabulary_size: int
    hidden_size: int
    ffn_sizes: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    activation: str
    gated: bool
    norm: Literal["rms", "layer"]
    norm_epsilon: float
    attention_bias: bool
    ffn_bias: bool
    tied_embeddings: bool
    rotary: Rotary | None
    position_offset: int = 0
    sliding_window: int | None = None
    parallel_block: bool = False
    separate_ffn_norm: bool = True
    activation_threshold: float = 0.0

    @property
    def num_layers(self) -> int:
        return len(self.ffn_sizes)

    @property
    def neuron_matrices(self) -> int:
        """Rows of hidden_size weights that one neuron owns: gate, up and down, or up and down."""
        return 3 if self.gated else 2

    @property
    def deciding_role(self) -> str:
        """The matrix whose rows decide on firing, of dReLU neurons the first of the two."""
        return "gate.weight" if self.gated else "up.weight"

    def norm_shapes(self, role: str) -> TensorShapes:
        shapes: TensorShapes = {f"{role}.weight": (self.hidden_size,)}
        if self.norm == "layer":
            shapes[f"{role}.bias"] = (self.hidden_size,)
        return shapes

    def attention_shapes(self) -> TensorShapes:
        """Tensors of one layer's attention by role, its norm included; matrices are [outputs, inputs]."""
        d, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = self.norm_shapes("attention_norm")
        for role, rows, columns in (("query", q, d), ("key", kv, d), ("value", kv, d), ("output", d, q)):
            shapes[f"{role}.weight"] = (rows, columns)
            if self.attention_bias:
                shapes[f"{role}.bias"] = (rows,)
        return shapes

    def ffn_shapes(self, layer: int) -> TensorShapes:
        """Tensors of one layer's FFN by role, its norm included; ``down`` is [hidden, neurons] as in checkpoints."""
        d, n = self.hidden_size, self.ffn_sizes[layer]
        shapes = self.norm_shapes("ffn_norm") if self.separate_ffn_norm else {}
        if self.gated:
            shapes["gate.weight"] = (n, d)
        shapes["up.weight"] = (n, d)
        if self.ffn_bias:
            shapes["up.bias"] = (n,)
        shapes["down.weight"] = (d, n)
        if self.ffn_bias:
            shapes["down.bias"] = (d,)
        return shapes

    def shared_shapes(self) -> TensorShapes:
        """Tensors outside the layers by role; a tied output head is the embedding and does not appear."""
        shapes: TensorShapes = {"embedding.weight": (self.vocabulary_size, self.hidden_size)}
        if self.rotary is None:
            shapes["positions.weight"] = (self.max_positions + self.position_offset, self.hidden_size)
        shapes |= self.norm_shapes("final_norm")
        if not self.tied_embeddings:
            shapes["head.weight"] = (self.vocabulary_size, self.hidden_size)
        return shapes

    def num_parameters(self) -> int:
        """Weights and biases of the whole model, tied ones once."""
        tensors = list(self.shared_shapes().values())
        for layer in range(self.num_layers):
            tensors += [*self.attention_shapes().values(), *self.ffn_shapes(layer).values()]
        return sum(_product(shape) for shape in tensors)

    @property
    def falls_silent(self) -> bool:
        """Whether neurons that do not fire contribute exactly zero."""
        return self.activation in FALL_SILENT

    def require_silence(self) -> None:
        """Raise ``UnsupportedModelError`` unless neurons that do not fire contribute exactly zero."""
        if not self.falls_silent:
            raise UnsupportedModelError(
                f"the model's activation is {self.activation!r}, and only neurons of {', '.join(FALL_SILENT)} are known to "
                "contribute exactly zero when they are silent: use a ReLU version of the model (OPT, ReluLLaMA, ProSparse, "
                "a Falcon with ReLU …)"
            )

    @property
    def full_activation(self) -> str:
        """The activation with its threshold, as :func:`parse_activation` reads it: ``fatrelu:0.01``."""
        return f"fatrelu:{self.activation_threshold}" if self.activation == "fatrelu" else self.activation

    def known_activation(self) -> Activation:
        """The activation; raises ``UnsupportedModelError`` for one whose maths is not implemented."""
        known = get_args(Activation)
        if self.activation not in known or (self.activation == "drelu" and not self.gated):
            raise UnsupportedModelError(
                f"the model's activation is {self.activation!r} on {'gated' if self.gated else 'ungated'} neurons, and only "
                f"{', '.join(known)} are implemented, drelu on gated ones alone: use another model"
            )
        return cast(Activation, self.activation)

    def to_json(self) -> dict[str, Any]:
        """All fields; the threshold only where it is not zero, because fingerprints are made over this."""
        content = asdict(self) | {"ffn_sizes": list(self.ffn_sizes)}
        if not self.activation_threshold:
            del content["activation_threshold"]
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "ModelShape":
        """Inverse of :meth:`to_json`; raises ``UnsupportedModelError`` on missing, unknown and malformed entries."""
        known = {field.name for field in fields(cls)}
        if isinstance(content, dict):
            content = {"activation_threshold": 0.0, **content}
        if not isinstance(content, dict) or set(content) != known:
            differing = sorted(set(content) ^ known) if isinstance(content, dict) else sorted(known)
            raise UnsupportedModelError(
                f"the shape record has missing or unknown keys ({', '.join(differing)}): run pi-profile again"
            )
        malformed = [key for key, value in content.items() if not _well_formed(key, value)]
        if content["activation_threshold"] and content["activation"] != "fatrelu":
            malformed.append("activation_threshold")
        if malformed:
            raise UnsupportedModelError(
                f"the shape record has a malformed {', '.join(malformed)}: run pi-profile again"
            )
        rotary = Rotary(**content["rotary"]) if content["rotary"] else None
        return cls(**content | {"ffn_sizes": tuple(content["ffn_sizes"]), "rotary": rotary})


def parse_activation(text: str) -> tuple[str, float]:
    """Name and threshold out of ``relu`` or ``fatrelu:0.01``; raises ``UnsupportedModelError`` for a FATReLU without a
    threshold of at least 0, and for a threshold of anything else."""
    name, colon, number = text.partition(":")
    try:
        threshold = float(number) if colon else 0.0
    except ValueError:
        threshold = -1.0
    if (name == "fatrelu") != bool(colon) or not 0 <= threshold <= sys.float_info.max:
        raise UnsupportedModelError(
            f"the activation {text!r} is none, or its threshold is: use one like relu or fatrelu:0.01"
        )
    return name, threshold


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def _well_formed(key: str, value: Any) -> bool:
    """Whether *value* is of the kind that the field *key* of a :class:`ModelShape` holds."""
    if key == "ffn_sizes":
        return isinstance(value, list) and 0 < len(value) <= MAX_LAYERS and all(_is_size(entry) for entry in value)
    if key == "rotary":
        positive = isinstance(value, dict) and all(_is_positive(entry) for entry in value.values())
        return value is None or (positive and set(value) == {field.name for field in fields(Rotary)})
    if key in ("family", "activation", "norm"):
        return isinstance(value, str) and (key != "norm" or value in ("rms", "layer"))
    if key in ("gated", "attention_bias", "ffn_bias", "tied_embeddings", "parallel_block", "separate_ffn_norm"):
        return isinstance(value, bool)
    if key == "norm_epsilon":
        return _is_positive(value)
    if key == "activation_threshold":
        return _is_positive(value) or (value == 0 and not isinstance(value, bool))
    absent = {"position_offset": 0, "sliding_window": None}
    return _is_size(value) or (key in absent and value == absent[key] and not isinstance(value, bool))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max
