"""What a config.json says about a model is what its tensors and its ``transformers`` twin say, or it is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pi_toolkit.profiler.checkpoint import Checkpoint, read_config
from pi_toolkit.profiler.errors import UnsupportedModelError
from pi_toolkit.profiler.hf_model import load_hf_model
from pi_toolkit.profiler.model_families import FAMILIES, ModelShape, Rotary, read_shape
from pi_toolkit.profiler.model_families.shape import parse_activation
from pi_toolkit.profiler.token_windows import load_tokenizer
from tiny_models import CONFIGS, PROSPARSE, PROSPARSE_THRESHOLD, make_model, save_family

# Changes of a tiny config that a family serves, beside its usual layout.
SERVED_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(family, {}) for family in CONFIGS],
    ("llama", {"attention_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"head_dim": 16}),
    ("llama", {"num_key_value_heads": 4}),
    ("opt", {"enable_bias": False}),
    ("opt", {"tie_word_embeddings": False}),
    ("falcon-7b", {"multi_query": False}),
    ("falcon-40b", {"num_ln_in_parallel_attn": 1}),
    ("falcon-40b", {"tie_word_embeddings": False}),
]


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads(CONFIGS[family]().to_json_string()), **changes}


def refusal(config: dict[str, Any]) -> str:
    """The sentence a config is refused with; every one names a remedy after its last colon."""
    with pytest.raises(UnsupportedModelError) as caught:
        read_shape(config)
    assert ": use " in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(("family", "changes"), SERVED_VARIANTS)
def test_shape_is_that_of_the_real_tensors(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """Prevents a role that maps to a tensor of another shape, or a tensor of the model that no role covers."""
    checkpoint = Checkpoint(save_family(tmp_path, family, **changes))
    shape = checkpoint.shape
    elements = sum(checkpoint.shared(role).numel() for role in shape.shared_shapes())
    for layer in range(shape.num_layers):
        elements += sum(tensor.numel() for tensor in checkpoint.attention(layer).values())
        elements += sum(checkpoint.layer(layer, role).numel() for role in shape.ffn_shapes(layer))
        assert checkpoint.attention(layer).keys() == shape.attention_shapes().keys()
        assert {r: tuple(t.shape) for r, t in checkpoint.attention(layer).items()} == shape.attention_shapes()
    twin = make_model(CONFIGS[family](**changes))
    assert elements == shape.num_parameters() == twin.num_parameters()


@pytest.mark.parametrize(("family", "changes"), SERVED_VARIANTS)
def test_sizes_are_the_configs(family: str, changes: dict[str, Any]) -> None:
    """Prevents a dimension taken from a default or a nickname in place of the config."""
    config = CONFIGS[family](**changes)
    shape = read_shape(json.loads(config.to_json_string()))
    assert shape.ffn_sizes == (96, 96, 96)
    assert (shape.hidden_size, shape.num_heads, shape.vocabulary_size) == (32, 4, 4096)
    assert shape.max_positions == 128
    assert shape.activation == "relu"
    assert shape.gated == (family in ("llama", "mistral"))
    assert shape.neuron_matrices == (3 if shape.gated else 2)
    assert shape.sliding_window == (9 if family == "mistral" else None)
    assert shape.parallel_block == family.startswith("falcon")


@pytest.mark.parametrize("family", CONFIGS)
def test_minimal_config_has_the_defaults_of_transformers(family: str) -> None:
    """Prevents a default that differs from ``transformers``: published configs leave out what equals it."""
    kind = CONFIGS[family]().model_type
    defaults = json.loads(type(CONFIGS[family]())().to_json_string())
    assert read_shape({"model_type": kind}) == read_shape(defaults)


@pytest.mark.parametrize("family", CONFIGS)
def test_shape_survives_json(family: str) -> None:
    """Prevents a workspace whose model.json reads back as another model."""
    shape = read_shape(config_of(family))
    assert ModelShape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": "32"}, "hidden_size"),
        ({"ffn_sizes": []}, "ffn_sizes"),
        ({"ffn_sizes": [96, -1]}, "ffn_sizes"),
        ({"ffn_sizes": 96}, "ffn_sizes"),
        ({"family": None}, "family"),
        ({"gated": 1}, "gated"),
        ({"norm_epsilon": -1e-5}, "norm_epsilon"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"norm": "batch"}, "norm"),
        ({"num_heads": True}, "num_heads"),
        ({"rotary": {"theta": "x", "linear_factor": 1.0}}, "rotary"),
        ({"rotary": {"base": 1.0}}, "rotary"),
        ({"extra": 1}, "extra"),
        ({"activation_threshold": 0.1}, "activation_threshold"),
        ({"activation": "fatrelu", "activation_threshold": -0.1}, "activation_threshold"),
        ({"activation": "fatrelu", "activation_threshold": True}, "activation_threshold"),
    ],
)
def test_shape_record_with_wrong_values_is_refused(change: dict[str, Any], named: str) -> None:
    """Prevents a damaged model.json that fails later, far from the file that is wrong."""
    with pytest.raises(UnsupportedModelError, match=rf"{named}.*: run pi-profile again"):
        ModelShape.from_json({**read_shape(config_of("llama")).to_json(), **change})


def test_shape_record_without_a_key_is_refused() -> None:
    """Prevents a record of an older release that is read with invented values."""
    content = read_shape(config_of("opt")).to_json()
    del content["norm_epsilon"]
    with pytest.raises(UnsupportedModelError, match="norm_epsilon"):
        ModelShape.from_json(content)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("key", ["sandwich_norm", "logit_scale", "quantization_config", "auto_map"])
def test_unknown_key_is_refused_by_name(family: str, key: str) -> None:
    """Prevents a config key that changes the maths and is silently ignored."""
    assert key in refusal(config_of(family, **{key: {"x": 1}}))


def test_published_falcon_code_is_accepted_and_other_code_is_not(tmp_path: Path) -> None:
    """Prevents refusing tiiuae's Falcons, whose repositories still carry the code that ``transformers`` adopted."""
    published = {"AutoConfig": "configuration_falcon.FalconConfig", "AutoModel": "modeling_falcon.FalconModel"}
    directory = save_family(tmp_path, "falcon-7b")
    config = {**read_config(directory), "auto_map": published}
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(directory)
    assert checkpoint.shape == read_shape(config_of("falcon-7b"))
    assert type(load_hf_model(checkpoint, torch.device("cpu"), torch.float32)).__module__.startswith("transformers.")
    assert "auto_map" in refusal({**config, "auto_map": {**published, "AutoModel": "modeling_mine.Mine"}})


def test_nobody_is_asked_to_run_a_models_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a question on stdout, and a stranger's code that runs because the answer was "y"."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    directory = save_family(tmp_path, PROSPARSE)
    assert "auto_map" in read_config(directory)
    assert load_tokenizer(directory)("text")["input_ids"]


# What the published ProSparse models state beside sizes and neutral keys.
PUBLISHED_PROSPARSE = {
    "architectures": ["SparseLlamaForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_sparsellama.SparseLlamaConfig",
        "AutoModel": "modeling_sparsellama.SparseLlamaForCausalLM",
        "AutoModelForCausalLM": "modeling_sparsellama.SparseLlamaForCausalLM",
    },
    "hidden_act": "fatrelu",
    "hidden_act_param": 0.01,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_length": 4096,
    "max_position_embeddings": 4096,
    "model_type": "sparsellama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


def test_published_prosparse_config_is_read() -> None:
    """Prevents a threshold that is left unread, and a refusal over code that is not run anyway."""
    shape = read_shape(PUBLISHED_PROSPARSE)
    assert (shape.family, shape.activation, shape.activation_threshold) == ("llama", "fatrelu", 0.01)
    assert shape.falls_silent
    relu = {
        **PUBLISHED_PROSPARSE,
        "model_type": "llama",
        "hidden_act": "relu",
        "auto_map": None,
        "hidden_act_param": None,
    }
    assert replace(shape, activation="relu", activation_threshold=0.0) == read_shape(relu)
    assert ModelShape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


@pytest.mark.parametrize("zero", [0, 0.0])
def test_fatrelu_of_threshold_zero_is_relu(zero: float) -> None:
    """Prevents a threshold of nothing, which makes FATReLU ReLU, from being refused or taken for one that is missing."""
    shape = read_shape({**PUBLISHED_PROSPARSE, "hidden_act_param": zero})
    assert (shape.activation, shape.activation_threshold, shape.full_activation) == ("fatrelu", 0.0, "fatrelu:0.0")
    assert shape.falls_silent and ModelShape.from_json(json.loads(json.dumps(shape.to_json()))) == shape


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act_param": None}, "hidden_act_param"),
        ({"hidden_act_param": -0.01}, "hidden_act_param"),
        ({"hidden_act_param": float("inf")}, "hidden_act_param"),
        ({"hidden_act_param": "0.01"}, "hidden_act_param"),
        ({"hidden_act_param": True}, "hidden_act_param"),
        ({"hidden_act": "relu"}, "hidden_act_param"),
        ({"auto_map": {"AutoModel": "modeling_mine.Mine"}}, "auto_map"),
        ({"model_type": "llama"}, "auto_map"),
    ],
)
def test_prosparse_config_that_is_not_understood_is_refused(changes: dict[str, Any], named: str) -> None:
    """Prevents FATReLU without its threshold, a threshold that does nothing, and somebody's own code."""
    assert named in refusal({**PUBLISHED_PROSPARSE, **changes})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("opt", {"activation_function": "fatrelu"}),
        ("falcon-7b", {"activation": "fatrelu"}),
        ("mistral", {"model_type": "bamboo", "hidden_act": "fatrelu", "hidden_act_param": 0.1}),
    ],
)
def test_fatrelu_of_another_family_is_refused(family: str, changes: dict[str, Any]) -> None:
    """Prevents a threshold that nobody reads from being taken for zero."""
    assert "fatrelu" in refusal(config_of(family, **changes))


def test_a_threshold_of_zero_leaves_no_trace_in_records(tmp_path: Path) -> None:
    """Prevents fingerprints of ReLU models that change with a field they do not need."""
    shape = read_shape(config_of("llama"))
    assert "activation_threshold" not in shape.to_json()
    checkpoint = Checkpoint(save_family(tmp_path, PROSPARSE))
    assert checkpoint.shape.to_json()["activation_threshold"] == PROSPARSE_THRESHOLD


@pytest.mark.parametrize(
    ("text", "wanted"), [("relu", ("relu", 0.0)), ("fatrelu:0.01", ("fatrelu", 0.01)), ("fatrelu:0", ("fatrelu", 0.0))]
)
def test_activations_in_words(text: str, wanted: tuple[str, float]) -> None:
    """Prevents a threshold that is lost between what is said and what is meant."""
    assert parse_activation(text) == wanted


@pytest.mark.parametrize(
    "text", ["fatrelu", "fatrelu:", "fatrelu:x", "fatrelu:-1", "fatrelu:nan", "fatrelu:inf", "relu:1"]
)
def test_activations_in_other_words_are_refused(text: str) -> None:
    """Prevents FATReLU without a threshold from running as ReLU."""
    with pytest.raises(UnsupportedModelError, match=r"fatrelu:0\.01"):
        parse_activation(text)


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_switched_off_key_passes(value: object) -> None:
    """Prevents refusing models over a feature that they state not to use."""
    assert read_shape(config_of("llama", sandwich_norm=value)) == read_shape(config_of("llama"))


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim"),
        ("falcon-7b", {"alibi": True}, "alibi"),
        ("falcon-7b", {"bias": True}, "bias"),
        ("falcon-7b", {"parallel_attn": False}, "parallel_attn"),
        ("falcon-40b", {"alibi": True}, "alibi"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "yarn"),
        ("llama", {"rope_parameters": {}, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("mistral", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary"),
        ("llama", {"num_key_value_heads": 3}, "3 key/value heads"),
    ],
)
def test_variant_with_other_maths_is_refused(family: str, changes: dict[str, Any], named: str) -> None:
    """Prevents OPT-350M, ALiBi Falcons, scaled rotary positions … from being run with the wrong formula."""
    assert named in refusal(config_of(family, **changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"intermediate_size": True}, "intermediate_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_parameters": "default"}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 0.0}}, "factor"),
        ({"sliding_window": "wide"}, "sliding_window"),
        ({"hidden_act": ["relu"]}, "hidden_act"),
    ],
)
def test_malformed_value_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    """Prevents a traceback, or a nonsense shape, from a value of the wrong type."""
    assert named in refusal(config_of("mistral", **changes))


def test_unknown_architecture_names_the_known_ones() -> None:
    """Prevents a model whose FFN is elsewhere from being profiled as one of ours."""
    assert "falcon, llama, mistral, opt" in refusal({"model_type": "gpt2"})
    assert "None" in refusal({})


@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling", "rope_scaling with rope_type"])
def test_linear_rotary_scaling_of_every_age_is_read(style: str) -> None:
    """Prevents old configs (rope_theta, rope_scaling) from running with unscaled positions."""
    config = config_of("llama")
    del config["rope_parameters"]
    if style == "rope_parameters":
        config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    else:
        kind = "type" if style == "rope_scaling" else "rope_type"
        config |= {"rope_theta": 5e5, "rope_scaling": {kind: "linear", "factor": 4.0}}
    assert read_shape(config).rotary == Rotary(5e5, 4.0)


def test_mistral_without_sliding_window_has_none() -> None:
    """Prevents Mistral v0.2 and later (null) from attending to the last 4,096 tokens only."""
    assert read_shape(config_of("mistral", sliding_window=None)).sliding_window is None


def test_demo_models_are_read() -> None:
    """Prevents a family file from refusing what its demo model needs."""
    shapes = [read_shape(read_config(path)) for path in sorted((Path(__file__).parent / "models").glob("relu-*"))]
    assert {shape.family for shape in shapes} == {"llama", "opt"}
    assert all(shape.family in FAMILIES and shape.activation == "relu" for shape in shapes)
