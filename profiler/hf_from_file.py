"""A ``transformers`` model out of a model file: its config out of the shape record, its weights by the family's names."""

from types import MethodType
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint
from .errors import UnsupportedModelError
from .model_families import FAMILIES, ModelShape
from .model_gguf import DequantisedModel, GgufModel

if TYPE_CHECKING:
    import torch


def build_hf_model(model: GgufModel, dtype: "torch.dtype") -> Any:
    """The model of an open file in *dtype*, quantised weights dequantised."""
    import transformers

    config = hf_config(model.shape)
    kind = getattr(transformers, config.architectures[0])
    built, loading = kind.from_pretrained(
        None, config=config, state_dict=state_dict(model, dtype), dtype=dtype, output_loading_info=True
    )
    missing = [name for name in loading["missing_keys"] if not (model.shape.tied_embeddings and "lm_head" in name)]
    assert not missing and not loading["unexpected_keys"], f"names that transformers does not know: {loading}"
    return built.eval()


def hf_config(shape: ModelShape) -> Any:
    """The ``transformers`` config that reads back as *shape*.

    dReLU and FATReLU, which ``transformers`` does not have, become the ReLU that :func:`compute_activation` puts right.
    Raises ``UnsupportedModelError`` for layers of different widths, which ``transformers`` cannot express.
    """
    import transformers

    if len(set(shape.ffn_sizes)) != 1:
        raise UnsupportedModelError(
            "the layers of this file have FFNs of different widths, which transformers cannot run: profile the original"
        )
    common: dict[str, Any] = dict(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tied_embeddings,
    )
    if shape.family == "opt":
        return transformers.OPTConfig(
            **common,
            ffn_dim=shape.ffn_sizes[0],
            word_embed_proj_dim=shape.hidden_size,
            activation_function=shape.activation,
            enable_bias=shape.ffn_bias,
            architectures=["OPTForCausalLM"],
        )
    assert shape.rotary, "only OPT has learned positions"
    common["rope_parameters"] = {"rope_type": "default", "rope_theta": shape.rotary.theta}
    if shape.rotary.linear_factor != 1.0:
        common["rope_parameters"] |= {"rope_type": "linear", "factor": shape.rotary.linear_factor}
    if shape.family == "falcon":
        grouped = shape.separate_ffn_norm or shape.num_kv_heads not in (1, shape.num_heads)
        return transformers.FalconConfig(
            **common,
            ffn_hidden_size=shape.ffn_sizes[0],
            activation=shape.activation,
            layer_norm_epsilon=shape.norm_epsilon,
            new_decoder_architecture=grouped,
            num_ln_in_parallel_attn=2 if shape.separate_ffn_norm else 1,
            num_kv_heads=shape.num_kv_heads,
            multi_query=shape.num_kv_heads == 1,
            parallel_attn=True,
            bias=False,
            alibi=False,
            architectures=["FalconForCausalLM"],
        )
    common |= dict(
        intermediate_size=shape.ffn_sizes[0],
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_act="relu" if computed_here(shape) else shape.activation,
        rms_norm_eps=shape.norm_epsilon,
    )
    if shape.sliding_window:
        window = shape.sliding_window
        return transformers.MistralConfig(**common, sliding_window=window, architectures=["MistralForCausalLM"])
    return transformers.LlamaConfig(**common, attention_bias=shape.attention_bias, architectures=["LlamaForCausalLM"])


def computed_here(shape: ModelShape) -> bool:
    """Whether the activation is one that ``transformers`` does not know, of models that are LLaMA or Mistral otherwise."""
    return shape.activation in ("drelu", "fatrelu")


def compute_activation(model: Any, shape: ModelShape) -> None:
    """Turn the ReLU of a LLaMA or Mistral into the activation of *shape*: dReLU applies it to both factors, FATReLU has a
    threshold in place of zero."""
    import torch

    def both_factors(mlp: Any, x: "torch.Tensor") -> "torch.Tensor":
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.act_fn(mlp.up_proj(x)))

    for layer in model.model.layers:
        if shape.activation == "drelu":
            layer.mlp.forward = MethodType(both_factors, layer.mlp)
        else:
            layer.mlp.act_fn = torch.nn.Threshold(shape.activation_threshold, 0.0)


def state_dict(model: GgufModel, dtype: "torch.dtype") -> "dict[str, torch.Tensor]":
    """All weights in *dtype* by the names ``transformers`` gives them."""
    values = DequantisedModel(model, dtype)
    state = shared_state(values)
    for layer in range(model.shape.num_layers):
        state |= layer_state(values, layer)
    return state


def shared_state(weights: "Checkpoint | DequantisedModel") -> "dict[str, torch.Tensor]":
    """The weights outside the layers by the names ``transformers`` gives them."""
    family = FAMILIES[weights.shape.family]
    return {family.shared_tensors[role]: weights.shared(role) for role in weights.shape.shared_shapes()}


def layer_state(weights: "Checkpoint | DequantisedModel", layer: int) -> "dict[str, torch.Tensor]":
    """The weights of *layer* by the names ``transformers`` gives them."""
    shape, family = weights.shape, FAMILIES[weights.shape.family]
    attention = weights.attention(layer)
    if family.split_fused:
        attention["fused_qkv.weight"] = _fused(shape, attention)
    state = {}
    for role, tensor in (attention | {role: weights.layer(layer, role) for role in shape.ffn_shapes(layer)}).items():
        names = family.layer_tensors[role].split("|")
        name = names[0] if shape.separate_ffn_norm else names[-1]
        state[name.format(i=layer)] = tensor.contiguous()
    return state


def _fused(shape: ModelShape, attention: "dict[str, torch.Tensor]") -> "torch.Tensor":
    """The inverse of Falcon's ``split_fused``; takes the three parts out of *attention*."""
    import torch

    query, key, value = (attention.pop(f"{role}.weight") for role in ("query", "key", "value"))
    grouped = (shape.num_kv_heads, -1, shape.head_dim, shape.hidden_size)
    return torch.cat([part.reshape(grouped) for part in (query, key, value)], dim=1).reshape(-1, shape.hidden_size)
