"""What a family file provides, and the strict reading of a Hugging Face ``config.json`` that all of them share."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedModelError, shown
from .shape import LARGEST_SIZE, MAX_LAYERS, ModelShape, Rotary

if TYPE_CHECKING:
    import torch

# Keys that steer training, tokens, sampling, storage or the host program, never the maths of a forward pass in evaluation.
NEUTRAL_KEYS = frozenset(
    """
    _name_or_path name_or_path architectures model_type transformers_version torch_dtype dtype use_cache prefix
    bos_token_id eos_token_id pad_token_id tokenizer_class initializer_range init_std attention_dropout dropout
    activation_dropout hidden_dropout layerdrop pretraining_tp output_attentions output_hidden_states return_dict
    gradient_checkpointing is_llama_config transformers.js_config chunk_size_feed_forward id2label label2id
    problem_type max_length do_sample temperature top_k top_p repetition_penalty
    """.split()
)


@dataclass(frozen=True)
class FfnModules:
    """Paths (``{i}`` = layer) inside the ``transformers`` model where the FFN is observed.

    A neuron fires when its element of the output of ``fires`` is above zero (FATReLU: the threshold), and with dReLU that
    of ``up`` too, which runs later and only gated neurons have. The input of ``down`` is the activation vector. The input
    of ``predictor_input`` is what PowerInfer's engine feeds its predictors: the residual stream before the FFN norm, for
    Falcon the layer input.
    """

    fires: str
    down: str
    predictor_input: str
    up: str | None = None


@dataclass(frozen=True)
class Family:
    """One architecture: how its config is read, how its tensors are called, where its neurons are.

    ``shared_tensors`` and ``layer_tensors`` map the toolkit's roles (see :class:`ModelShape`) to checkpoint names
    (``{i}`` = layer). ``alternative_prefixes`` lists (usual, other) prefixes found in published checkpoints.
    ``split_fused`` turns a fused tensor (role ``fused_qkv.weight``) into the roles of its parts.
    """

    name: str
    model_types: tuple[str, ...]
    read_shape: Callable[[Mapping[str, Any]], ModelShape]
    shared_tensors: Mapping[str, str]
    layer_tensors: Mapping[str, str]
    ffn_modules: FfnModules
    alternative_prefixes: tuple[tuple[str, str], ...] = ()
    split_fused: "Callable[[ModelShape, torch.Tensor], dict[str, torch.Tensor]] | None" = None


def weight_and_bias(role: str, name: str) -> dict[str, str]:
    """The two entries of a linear map or norm that has both."""
    return {f"{role}.{part}": f"{name}.{part}" for part in ("weight", "bias")}


class ConfigReader:
    """Hands out config values and, at the end, refuses keys nobody asked for.

    A key with an empty or switched-off value (null, false, 0, empty) cannot change the maths and passes.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config, self._asked = config, set(NEUTRAL_KEYS)

    def get(self, key: str, default: Any) -> Any:
        """The value of *key*, or *default* (the one ``transformers`` uses) where it is absent or null."""
        self._asked.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def nullable_size(self, key: str, default: int) -> int | None:
        """Like :meth:`size`, for keys whose null has a meaning of its own."""
        self._asked.add(key)
        return None if self._config.get(key, default) is None else self.size(key, default)

    def size(self, key: str, default: int | None = None, largest: int = LARGEST_SIZE) -> int:
        """A positive whole number up to *largest*; without *default* the key is required."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            raise UnsupportedModelError(
                f"config.json states {key} = {shown(value)} where a positive whole number of at most {largest:,} belongs: "
                "use a complete model directory"
            )
        return value

    def layers(self, default: int) -> int:
        """``num_hidden_layers``."""
        return self.size("num_hidden_layers", default, MAX_LAYERS)

    def number(self, key: str, default: float) -> float:
        """A finite number above zero."""
        return _positive(key, self.get(key, default))

    def threshold(self, key: str) -> float:
        """Zero or a finite number above it; the key is required."""
        value = self.get(key, None)
        return 0.0 if value == 0 and not isinstance(value, bool) else _positive(key, value)

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise UnsupportedModelError(
                f"config.json states {key} = {shown(value)} where a name belongs: use a complete model directory"
            )
        return value

    def require(self, key: str, allowed: Any, default: Any) -> None:
        """Refuse the model unless *key* has the one value whose maths is implemented."""
        value = self.get(key, default)
        if value != allowed:
            raise UnsupportedModelError(
                f"config.json states {key} = {shown(value)} and only {allowed!r} is implemented: use another model"
            )

    def published_code(self, name: str) -> None:
        """Accept an ``auto_map`` that names only the code published with the models of kind *name*, whose maths is known
        here: it is never run."""
        auto_map, published = self._config.get("auto_map"), (f"configuration_{name}.", f"modeling_{name}.")
        if isinstance(auto_map, Mapping) and all(str(where).startswith(published) for where in auto_map.values()):
            self._asked.add("auto_map")

    def rotary(self) -> Rotary:
        """``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``."""
        parameters = self._table("rope_parameters") or self._table("rope_scaling")
        self._asked.add("rope_scaling")
        kind = parameters.pop("rope_type", parameters.pop("type", "default"))
        parameters.pop("type", None)
        theta = _positive("rope_theta", parameters.pop("rope_theta", self.get("rope_theta", 10000.0)))
        factor = _positive("the rotary factor", parameters.pop("factor", 1.0)) if kind == "linear" else 1.0
        if kind not in ("default", "linear") or any(parameters.values()):
            raise UnsupportedModelError(
                f"rotary scaling {shown(kind)} with {shown(parameters)} is not implemented (default and linear are): "
                "use another model"
            )
        return Rotary(theta, factor)

    def _table(self, key: str) -> dict[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise UnsupportedModelError(
                f"config.json states {key} = {shown(value)} where an object belongs: use a complete model directory"
            )
        return dict(value)

    def refuse_the_rest(self) -> None:
        """Raise ``UnsupportedModelError`` naming every key that could change the maths and was not asked for."""
        unknown = sorted(key for key, value in self._config.items() if value and key not in self._asked)
        if unknown:
            raise UnsupportedModelError(
                f"config.json has keys whose effect on the maths is not known here ({', '.join(unknown)}): "
                "use a model without them"
            )


def _positive(key: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:  # a whole number may be beyond every float
        raise UnsupportedModelError(
            f"config.json states {key} = {shown(value)} where a number above 0 belongs: use a complete model directory"
        )
    return float(value)
