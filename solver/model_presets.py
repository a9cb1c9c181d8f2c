"""The models of the PowerInfer paper: their shapes, how many neurons fire, how unevenly, and how large predictors are.

Shapes are the models' public configurations. Shares are those the paper prints: of firing neurons one minus the sparsity
of Table 3; of neurons that carry 80 % of the firings §3.1, which prints them for OPT-30B, LLaMA2(ReGLU)-70B and a SwiGLU
70B and so stands for the families of these three; of the predictors' parameters Table 6, or where it has no row the mean
of its rows, 7.09 %.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pi_toolkit.profiler.model_families import ModelShape, read_shape

MEAN_PREDICTOR_SHARE = 0.0709


@dataclass(frozen=True)
class Locality80:
    """The share of neurons that carries 80 % of the firings, in one layer and in the whole model."""

    layer: float
    model: float


RELU = Locality80(layer=0.26, model=0.17)  # OPT-30B; Falcon too, of which the paper prints no figure
REGLU = Locality80(layer=0.43, model=0.26)  # LLaMA2(ReGLU)-70B; the dReLU models too, of which it prints none
SWIGLU = Locality80(layer=0.69, model=0.75)  # a SwiGLU 70B


@dataclass(frozen=True)
class ModelPreset:
    """``density``: share of a layer's neurons that fire on a token, on average over layers; ``predictor_share``: the
    predictors' parameters by the model's."""

    shape: ModelShape
    density: float
    locality: Locality80
    predictor_share: float = MEAN_PREDICTOR_SHARE


def _opt(hidden: int, layers: int, heads: int, density: float, share: float = MEAN_PREDICTOR_SHARE) -> ModelPreset:
    config = {"hidden_size": hidden, "ffn_dim": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    config["word_embed_proj_dim"] = hidden
    return ModelPreset(read_shape({"model_type": "opt", **config}), density, RELU, share)


def _llama(
    widths: tuple[int, int],
    layers: int,
    heads: tuple[int, int],
    density: float,
    locality: Locality80 = REGLU,
    predictor_share: float = MEAN_PREDICTOR_SHARE,
    **config: Any,
) -> ModelPreset:
    """*widths*: hidden and intermediate size; *heads*: query and key/value heads."""
    entries: Mapping[str, Any] = {
        "model_type": "llama",
        "hidden_size": widths[0],
        "intermediate_size": widths[1],
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "max_position_embeddings": 4096,
        "hidden_act": "silu" if locality is SWIGLU else "relu",
        **config,
    }
    return ModelPreset(read_shape(entries), density, locality, predictor_share)


_FALCON_40B: dict[str, Any] = {
    "model_type": "falcon",
    "hidden_size": 8192,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
    "new_decoder_architecture": True,
    "vocab_size": 65024,
    "activation": "relu",
}
_MISTRAL_7B: dict[str, Any] = {"model_type": "bamboo", "max_position_embeddings": 32768, "sliding_window": 4096}


def presets() -> dict[str, ModelPreset]:
    """By name."""
    return {
        "opt-6.7b": _opt(4096, 32, 32, 0.03),
        "opt-13b": _opt(5120, 40, 40, 0.03, 0.0671),
        "opt-30b": _opt(7168, 48, 56, 0.03),
        "opt-66b": _opt(9216, 64, 72, 0.03, 0.0488),
        "opt-175b": _opt(12288, 96, 96, 0.03),
        "falcon-40b": ModelPreset(read_shape(_FALCON_40B), 0.05, RELU, 0.0868),
        "llama2-7b": _llama((4096, 11008), 32, (32, 32), 0.30),
        "llama2-13b": _llama((5120, 13824), 40, (40, 40), 0.22),
        "llama2-70b": _llama((8192, 28672), 80, (64, 8), 0.18, predictor_share=0.0808),
        "bamboo-7b": _llama((4096, 14336), 32, (32, 8), 0.10, **_MISTRAL_7B),
        "mistral-7b": _llama((4096, 14336), 32, (32, 8), 0.10, **_MISTRAL_7B),
        "llama2-13b-swiglu": _llama((5120, 13824), 40, (40, 40), 0.57, SWIGLU),
        "yi-34b": _llama((7168, 20480), 60, (56, 8), 0.47, SWIGLU, vocab_size=64000),
    }
