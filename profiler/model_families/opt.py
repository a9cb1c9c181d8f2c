"""OPT: pre-norm decoder with learned positions; neuron j computes relu(up_j·x + b_j) and adds down_j times that."""

from collections.abc import Mapping
from typing import Any

from .family import ConfigReader, Family, FfnModules, weight_and_bias
from .shape import ModelShape

POSITION_OFFSET = 2  # the position table of OPT starts with two rows that no token uses


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Raises ``UnsupportedModelError`` for the post-norm OPT-350M, whose embedding is also narrower than its layers."""
    read = ConfigReader(config)
    hidden, heads = read.size("hidden_size", 768), read.size("num_attention_heads", 12)
    read.require("do_layer_norm_before", True, True)
    read.require("_remove_final_layer_norm", False, False)
    read.require("layer_norm_elementwise_affine", True, True)
    read.require("word_embed_proj_dim", hidden, hidden)
    bias = bool(read.get("enable_bias", True))
    shape = ModelShape(
        family="opt",
        vocabulary_size=read.size("vocab_size", 50272),
        hidden_size=hidden,
        ffn_sizes=(read.size("ffn_dim", 3072),) * read.layers(12),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=read.size("max_position_embeddings", 2048),
        activation=read.text("activation_function", "relu"),
        gated=False,
        norm="layer",
        norm_epsilon=1e-5,  # torch's default, which OPT's code leaves in place
        attention_bias=bias,
        ffn_bias=bias,
        tied_embeddings=bool(read.get("tie_word_embeddings", True)),
        rotary=None,
        position_offset=POSITION_OFFSET,
    )
    read.refuse_the_rest()
    return shape


_LAYER = "model.decoder.layers.{i}."

FAMILY = Family(
    name="opt",
    model_types=("opt",),
    read_shape=read_shape,
    shared_tensors={
        "embedding.weight": "model.decoder.embed_tokens.weight",
        "positions.weight": "model.decoder.embed_positions.weight",
        **weight_and_bias("final_norm", "model.decoder.final_layer_norm"),
        "head.weight": "lm_head.weight",
    },
    layer_tensors={
        **weight_and_bias("attention_norm", f"{_LAYER}self_attn_layer_norm"),
        **weight_and_bias("query", f"{_LAYER}self_attn.q_proj"),
        **weight_and_bias("key", f"{_LAYER}self_attn.k_proj"),
        **weight_and_bias("value", f"{_LAYER}self_attn.v_proj"),
        **weight_and_bias("output", f"{_LAYER}self_attn.out_proj"),
        **weight_and_bias("ffn_norm", f"{_LAYER}final_layer_norm"),
        **weight_and_bias("up", f"{_LAYER}fc1"),
        **weight_and_bias("down", f"{_LAYER}fc2"),
    },
    ffn_modules=FfnModules(
        fires="model.decoder.layers.{i}.fc1",
        down="model.decoder.layers.{i}.fc2",
        predictor_input="model.decoder.layers.{i}.final_layer_norm",
    ),
    alternative_prefixes=(("model.decoder.", "decoder."),),
)
