"""Falcon with ReLU: attention and FFN read the same layer input; neuron j adds down_j times relu(up_j·x).

Covers the 7B layout (one norm, one key/value head) and the 40B layout (two norms, grouped key/value heads); the
original fused query/key/value matrix is split here. ALiBi, sequential blocks and biases are refused.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .family import ConfigReader, Family, FfnModules, weight_and_bias
from .shape import ModelShape

if TYPE_CHECKING:
    import torch


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """Raises ``UnsupportedModelError`` for the variants named above."""
    read = ConfigReader(config)
    hidden, heads = read.size("hidden_size", 4544), read.size("num_attention_heads", 71)
    grouped = bool(read.get("new_decoder_architecture", False))
    multi_query = bool(read.get("multi_query", True))
    if not grouped:
        read.require("parallel_attn", True, True)
    for switch in ("alibi", "bias"):
        read.require(switch, False, False)
    read.get("parallel_attn", True)
    read.published_code("falcon")
    kv_heads = read.size("num_kv_heads", heads)
    num_norms = read.size("num_ln_in_parallel_attn", 2 if grouped else 1)
    shape = ModelShape(
        family="falcon",
        vocabulary_size=read.size("vocab_size", 65024),
        hidden_size=hidden,
        ffn_sizes=(read.size("ffn_hidden_size", 4 * hidden),) * read.layers(32),
        num_heads=heads,
        num_kv_heads=kv_heads if grouped or not multi_query else 1,
        head_dim=hidden // heads,
        max_positions=read.size("max_position_embeddings", 2048),
        activation=read.text("activation", "gelu"),
        gated=False,
        norm="layer",
        norm_epsilon=read.number("layer_norm_epsilon", 1e-5),
        attention_bias=False,
        ffn_bias=False,
        tied_embeddings=bool(read.get("tie_word_embeddings", True)),
        rotary=read.rotary(),
        parallel_block=True,
        separate_ffn_norm=grouped and num_norms == 2,
    )
    read.refuse_the_rest()
    return shape


def split_fused(shape: ModelShape, fused: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """Query, key and value matrices out of the fused one.

    Its rows are blocks of one key/value group each: the group's query heads, then its key head, then its value head.
    """
    queries_per_group = shape.num_heads // shape.num_kv_heads
    groups = fused.view(shape.num_kv_heads, queries_per_group + 2, shape.head_dim, shape.hidden_size)
    return {
        "query.weight": groups[:, :-2].reshape(-1, shape.hidden_size),
        "key.weight": groups[:, -2].reshape(-1, shape.hidden_size),
        "value.weight": groups[:, -1].reshape(-1, shape.hidden_size),
    }


_LAYER = "transformer.h.{i}."

# A layer has either `input_layernorm` or the pair `ln_attn`, `ln_mlp`; "|" separates names of which one exists.
FAMILY = Family(
    name="falcon",
    model_types=("falcon",),
    read_shape=read_shape,
    shared_tensors={
        "embedding.weight": "transformer.word_embeddings.weight",
        **weight_and_bias("final_norm", "transformer.ln_f"),
        "head.weight": "lm_head.weight",
    },
    layer_tensors={
        "attention_norm.weight": f"{_LAYER}ln_attn.weight|{_LAYER}input_layernorm.weight",
        "attention_norm.bias": f"{_LAYER}ln_attn.bias|{_LAYER}input_layernorm.bias",
        "fused_qkv.weight": f"{_LAYER}self_attention.query_key_value.weight",
        "output.weight": f"{_LAYER}self_attention.dense.weight",
        **weight_and_bias("ffn_norm", f"{_LAYER}ln_mlp"),
        "up.weight": f"{_LAYER}mlp.dense_h_to_4h.weight",
        "down.weight": f"{_LAYER}mlp.dense_4h_to_h.weight",
    },
    ffn_modules=FfnModules(
        fires="transformer.h.{i}.mlp.dense_h_to_4h",
        down="transformer.h.{i}.mlp.dense_4h_to_h",
        predictor_input="transformer.h.{i}",
    ),
    alternative_prefixes=(("transformer.", ""),),
    split_fused=split_fused,
)
