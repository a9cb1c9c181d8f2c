"""Tiny models made in code from a seed, one per family and layout, saved as Hugging Face directories.

Weights are drawn wide enough that neurons fire and stay silent in good measure and that logits differ; norms and biases
are not left at their neutral values, where a forgotten one would go unnoticed.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

DEMO_MODELS = Path(__file__).parent / "models"
VOCABULARY = 4096
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def llama_config(**changes: Any) -> transformers.PretrainedConfig:
    """ReGLU LLaMA with grouped key/value heads."""
    sizes = dict(
        hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    options = dict(vocab_size=VOCABULARY, hidden_act="relu", max_position_embeddings=128, tie_word_embeddings=False)
    return transformers.LlamaConfig(**{**sizes, **options, **changes})


def mistral_config(**changes: Any) -> transformers.PretrainedConfig:
    """ReGLU Mistral whose sliding window is shorter than its context."""
    sizes = dict(
        hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    options = dict(vocab_size=VOCABULARY, hidden_act="relu", max_position_embeddings=128, sliding_window=9)
    return transformers.MistralConfig(**{**sizes, **options, **changes})


def opt_config(**changes: Any) -> transformers.PretrainedConfig:
    sizes = dict(hidden_size=32, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=32)
    options = dict(vocab_size=VOCABULARY, max_position_embeddings=128, activation_function="relu")
    return transformers.OPTConfig(**{**sizes, **options, **changes})


def falcon_7b_config(**changes: Any) -> transformers.PretrainedConfig:
    """One norm for attention and FFN, one key/value head."""
    sizes = dict(hidden_size=32, ffn_hidden_size=96, num_hidden_layers=3, num_attention_heads=4)
    layout = dict(multi_query=True, new_decoder_architecture=False, parallel_attn=True, bias=False, alibi=False)
    return transformers.FalconConfig(**{**sizes, **layout, **_falcon_options(), **changes})


def falcon_40b_config(**changes: Any) -> transformers.PretrainedConfig:
    """Two norms per layer, grouped key/value heads."""
    sizes = dict(hidden_size=32, ffn_hidden_size=96, num_hidden_layers=3, num_attention_heads=4, num_kv_heads=2)
    layout = dict(new_decoder_architecture=True, bias=False, alibi=False)
    return transformers.FalconConfig(**{**sizes, **layout, **_falcon_options(), **changes})


def _falcon_options() -> dict[str, Any]:
    return dict(vocab_size=VOCABULARY, activation="relu", max_position_embeddings=128)


CONFIGS: dict[str, Callable[..., transformers.PretrainedConfig]] = {
    "llama": llama_config,
    "mistral": mistral_config,
    "opt": opt_config,
    "falcon-7b": falcon_7b_config,
    "falcon-40b": falcon_40b_config,
}


# Of their own, because transformers has no such models: a Mistral and a LLaMA whose configs say so.
BAMBOO, PROSPARSE = "bamboo", "prosparse"
PROSPARSE_THRESHOLD = 0.3
_RENAMED: dict[str, tuple[Callable[..., transformers.PretrainedConfig], dict[str, Any]]] = {
    BAMBOO: (mistral_config, {"model_type": "bamboo"}),
    PROSPARSE: (
        llama_config,
        {
            "model_type": "sparsellama",
            "architectures": ["SparseLlamaForCausalLM"],
            "auto_map": {"AutoConfig": "configuration_sparsellama.SparseLlamaConfig"},
            "hidden_act": "fatrelu",
            "hidden_act_param": PROSPARSE_THRESHOLD,
        },
    ),
}


def make_model(config: transformers.PretrainedConfig, seed: int = 0) -> Any:
    """A model with random weights in evaluation mode."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                neutral = 1.0 if name.endswith("weight") else 0.0
                parameter.copy_(neutral + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model


def save_model(directory: Path, config: transformers.PretrainedConfig, seed: int = 0) -> Path:
    """Save a random model and the demo models' tokenizer to *directory*."""
    make_model(config, seed).save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODELS / "relu-llama-5m" / name, directory / name)
    return directory


def save_family(directory: Path, family: str, seed: int = 0, **changes: Any) -> Path:
    """Save a model of one of :data:`CONFIGS`, :data:`BAMBOO` or :data:`PROSPARSE`."""
    if family in _RENAMED:
        layout, entries = _RENAMED[family]
        save_model(directory, layout(**changes), seed)
        config = directory / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | entries))
        return directory
    return save_model(directory, CONFIGS[family](**changes), seed)
