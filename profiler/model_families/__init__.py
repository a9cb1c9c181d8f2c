"""Model families, one file each: the only places that read a Hugging Face config or know checkpoint names."""

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModelError
from . import bamboo, falcon, llama, opt
from .family import Family, FfnModules
from .shape import Activation, ModelShape, Rotary

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (opt, llama, falcon, bamboo)}

__all__ = ["FAMILIES", "Activation", "Family", "FfnModules", "ModelShape", "Rotary", "read_shape"]


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape of the model that a Hugging Face ``config.json`` describes.

    Raises ``UnsupportedModelError`` for an unknown ``model_type`` and for any key that would change the maths and is not
    understood.
    """
    model_type = config.get("model_type")
    for family in FAMILIES.values():
        if model_type in family.model_types:
            shape = family.read_shape(config)
            if shape.num_heads % shape.num_kv_heads:
                raise UnsupportedModelError(
                    f"config.json states {shape.num_heads} heads over {shape.num_kv_heads} key/value heads, which does "
                    "not divide: use a complete model directory"
                )
            if shape.activation == "fatrelu" and not shape.gated:
                raise UnsupportedModelError(
                    f"config.json states fatrelu for {shape.family}, and only LLaMA's is implemented: use another model"
                )
            return shape
    known = ", ".join(sorted(kind for family in FAMILIES.values() for kind in family.model_types))
    raise UnsupportedModelError(f"model_type {model_type!r} is not supported: use a model of one of {known}")
