"""pi-profile on models that are odd, damaged or incomplete: one sentence, and nothing left behind."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pi_toolkit.profiler.cli import main
from tiny_models import save_family

Refuses = Callable[..., str]


# What an edited or foreign config.json can hold: a key, its value, and the families it is tried on.
ODD_CONFIGS: list[tuple[str, Any]] = [
    ("hidden_act", None),
    ("attention_bias", 0),
    ("use_cache", None),
    ("rms_norm_eps", 3),
    ("rms_norm_eps", 10**400),
    ("rope_theta", 10**400),
    ("tie_word_embeddings", 1.5),
    ("eos_token_id", "4"),
    ("pad_token_id", 10**30),
    ("rope_scaling", "abc"),
    ("id2label", 0),
    ("quantization_config", 0),
    ("auto_map", 0),
    ("layer_types", 0),
    ("num_hidden_layers", 10**30),
    ("num_hidden_layers", 10**8),
    ("hidden_size", 10**400),
    ("vocab_size", 10**30),
    ("max_position_embeddings", 10**30),
    ("head_dim", 10**400),
    ("generation", []),
]


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize(("key", "value"), ODD_CONFIGS, ids=[f"{key}={str(v)[:9]}" for key, v in ODD_CONFIGS])
def test_odd_config_is_one_sentence_or_harmless(
    tmp_path: Path, corpus: Path, run: Callable[..., Any], family: str, key: str, value: Any
) -> None:
    """Prevents the dozen types that transformers' validators raise, and numbers beyond every float, from being tracebacks."""
    directory = save_family(tmp_path / "model", family)
    if key == "generation":
        (directory / "generation_config.json").write_text(json.dumps(value))
    else:
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {key: value}))
    result = run(main, directory, "--corpus", corpus, "--tokens", "100", "-o", tmp_path / "pi")
    if result.exit_code:
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit), repr(result.exception)
        message = result.stderr.strip().splitlines()[-1]
        assert message.startswith("Error: ") and len(message) < 500, message
        assert not (tmp_path / "pi").exists()


def edit_tensor(directory: Path, name: str, change: Callable[[torch.Tensor], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors[name])
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, corpus: Path, refuses: Refuses, value: float) -> None:
    """Prevents a profile of 0 % from a damaged model: no comparison with NaN holds, so its neurons seem silent."""
    directory = save_family(tmp_path / "model", "opt")
    edit_tensor(directory, "model.decoder.layers.1.fc1.weight", lambda weight: weight.fill_(value))
    message = refuses(main, directory, "--corpus", corpus, "--tokens", "100", "-o", tmp_path / "pi")
    assert "the FFN of layer 1 computes values that are not finite" in message
    assert message.endswith("download the model again, or use --dtype float32")
    assert not (tmp_path / "pi").exists()


def test_token_beyond_the_embedding_is_refused(tmp_path: Path, corpus: Path, refuses: Refuses) -> None:
    """Prevents an IndexError from a tokenizer with a larger id than its number of tokens."""
    directory = save_family(tmp_path / "model", "llama")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[max(vocabulary, key=lambda piece: (vocabulary[piece] < 4000) * len(piece))] = 4096
    for piece in vocabulary:
        if piece.strip("Ġ▁") == "the":
            vocabulary[piece] = 5000
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refuses(main, directory, "--corpus", corpus, "--tokens", "100", "-o", tmp_path / "pi")
    assert message.endswith("use tokenizer and weights of the same model")


def test_missing_tokenizer_files_are_named(tmp_path: Path, corpus: Path, refuses: Refuses) -> None:
    """Prevents "the corpus holds no text" when transformers makes an empty tokenizer of the config alone."""
    directory = save_family(tmp_path / "model", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    message = refuses(main, directory, "--corpus", corpus, "--tokens", "100", "-o", tmp_path / "pi")
    assert message.endswith(": download the model's tokenizer files into it")


def test_corpus_is_tried_before_the_model_is_loaded(
    tmp_path: Path, model: Path, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents minutes of loading a model for a corpus that cannot be read."""
    monkeypatch.setattr("pi_toolkit.profiler.whole_model.load_hf_model", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "broken.jsonl").write_text("{")
    assert "is not valid JSON" in refuses(main, model, "--corpus", tmp_path / "broken.jsonl", "-o", tmp_path / "pi")


def shift_biases(directory: Path, layer: int, shift: float) -> None:
    edit_tensor(directory, f"model.decoder.layers.{layer}.fc1.bias", lambda bias: bias.fill_(shift))


@pytest.mark.parametrize(
    ("shifts", "sentence"),
    [
        ({0: -1e4}, "in layer 0 (almost) no neuron fires: check"),
        ({0: -1e4, 1: -1e4}, "in layers 0-1 (almost) no neuron fires: check"),
        ({2: 1e4}, "in layer 2 (almost) every neuron fires on every token: check"),
        (
            {0: 1e4, 1: -1e4, 2: 1e4},
            "in layer 1 (almost) no neuron fires and in layers 0, 2 (almost) every neuron fires",
        ),
    ],
)
def test_layers_that_never_or_always_fire_are_announced(
    tmp_path: Path, corpus: Path, run: Callable[..., Any], shifts: dict[int, float], sentence: str
) -> None:
    """Prevents a wrong model, activation or threshold from being profiled, trained and placed without a word."""
    directory = save_family(tmp_path / "model", "opt")
    for layer, shift in shifts.items():
        shift_biases(directory, layer, shift)
    result = run(main, directory, "--corpus", corpus, "--tokens", "200", "-o", tmp_path / "pi", "--json")
    assert result.exit_code == 0, result.stderr
    (said,) = [line for line in result.stderr.splitlines() if "fires" in line]
    assert said.startswith(sentence) and "activation and threshold" in said
    shares = json.loads(result.stdout.splitlines()[-1])["firing_share"]
    assert all((shares[layer] > 0.5) == (shift > 0) for layer, shift in shifts.items())
