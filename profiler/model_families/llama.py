"""LLaMA and Mistral shapes with a ReGLU FFN: neuron j computes relu(gate_j·x) · (up_j·x) and adds down_j times that.

The ProSparse models (``model_type`` sparsellama) are LLaMAs with FATReLU in place of ReLU; the code in their repositories is
not run.
"""

from collections.abc import Mapping
from typing import Any

from .family import ConfigReader, Family, FfnModules
from .shape import ModelShape


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Reads ``model_type`` llama, mistral and sparsellama, with the defaults each of them has in ``transformers``."""
    read = ConfigReader(config)
    mistral = config.get("model_type") == "mistral"
    hidden, heads = read.size("hidden_size", 4096), read.size("num_attention_heads", 32)
    read.require("mlp_bias", False, False)
    activation = read.text("hidden_act", "silu")
    if config.get("model_type") == "sparsellama":
        read.published_code("sparsellama")
    shape = ModelShape(
        family="llama",
        vocabulary_size=read.size("vocab_size", 32000),
        hidden_size=hidden,
        ffn_sizes=(read.size("intermediate_size", 14336 if mistral else 11008),) * read.layers(32),
        num_heads=heads,
        num_kv_heads=read.size("num_key_value_heads", 8 if mistral else heads),
        head_dim=read.size("head_dim", hidden // heads),
        max_positions=read.size("max_position_embeddings", 131072 if mistral else 2048),
        activation=activation,
        gated=True,
        norm="rms",
        norm_epsilon=read.number("rms_norm_eps", 1e-6),
        attention_bias=bool(read.get("attention_bias", False)),
        ffn_bias=False,
        tied_embeddings=bool(read.get("tie_word_embeddings", False)),
        rotary=read.rotary(),
        sliding_window=read.nullable_size("sliding_window", 4096) if mistral else None,
        activation_threshold=read.threshold("hidden_act_param") if activation == "fatrelu" else 0.0,
    )
    read.refuse_the_rest()
    return shape


_LAYER = "model.layers.{i}."
_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}

FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral", "sparsellama"),
    read_shape=read_shape,
    shared_tensors={
        "embedding.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
    layer_tensors={
        "attention_norm.weight": f"{_LAYER}input_layernorm.weight",
        **{f"{role}.{p}": f"{_LAYER}self_attn.{n}.{p}" for role, n in _ATTENTION.items() for p in ("weight", "bias")},
        "ffn_norm.weight": f"{_LAYER}post_attention_layernorm.weight",
        "gate.weight": f"{_LAYER}mlp.gate_proj.weight",
        "up.weight": f"{_LAYER}mlp.up_proj.weight",
        "down.weight": f"{_LAYER}mlp.down_proj.weight",
    },
    ffn_modules=FfnModules(
        fires="model.layers.{i}.mlp.gate_proj",
        down="model.layers.{i}.mlp.down_proj",
        predictor_input="model.layers.{i}.post_attention_layernorm",
        up="model.layers.{i}.mlp.up_proj",
    ),
    alternative_prefixes=(("model.", ""),),
)
