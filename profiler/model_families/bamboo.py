"""Bamboo, LLaMA-shaped with a dReLU FFN: neuron j computes relu(gate_j·x) · relu(up_j·x) and adds down_j times that."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import UnsupportedModelError
from . import llama
from .family import Family
from .shape import Activation, ModelShape

ACTIVATION: Activation = "drelu"


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Reads ``model_type`` bamboo, whose other keys and defaults are Mistral's; ``hidden_act`` is that of both factors."""
    shape = llama.read_shape({"hidden_act": "relu", **config, "model_type": "mistral"})
    if shape.activation != "relu":
        raise UnsupportedModelError(
            f"config.json states hidden_act = {shape.activation!r} and bamboo's is 'relu' alone: use another model"
        )
    return replace(shape, family="bamboo", activation=ACTIVATION)


FAMILY = Family(
    name="bamboo",
    model_types=("bamboo",),
    read_shape=read_shape,
    shared_tensors=llama.FAMILY.shared_tensors,
    layer_tensors=llama.FAMILY.layer_tensors,
    ffn_modules=llama.FAMILY.ffn_modules,
    alternative_prefixes=llama.FAMILY.alternative_prefixes,
)
