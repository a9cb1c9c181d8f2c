"""Counts are exactly the firings of ``transformers``' own activations, and models without exact zeros are refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import CheckpointError, CorpusError, UnsupportedModelError
from pi_toolkit.profiler.hf_model import load_hf_model, observe_ffn
from pi_toolkit.profiler.model_families import read_shape
from pi_toolkit.profiler.record import FiringCounter, verify_activation
from pi_toolkit.profiler.token_windows import window_batches
from pi_toolkit.profiler.window_batch import WindowBatch
from profiling_cases import record_firings
from tiny_models import (
    BAMBOO,
    CONFIGS,
    PROSPARSE,
    PROSPARSE_THRESHOLD,
    VOCABULARY,
    llama_config,
    make_model,
    mistral_config,
    save_family,
)

CPU = torch.device("cpu")


def load(directory: Path) -> tuple[Checkpoint, Any]:
    checkpoint = Checkpoint(directory)
    return checkpoint, load_hf_model(checkpoint, CPU, torch.float32)


def random_windows(count: int, length: int, seed: int = 7) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count, length), generator=generator).tolist()


def mlp_modules(model: Any) -> list[Any]:
    if model.config.model_type == "opt":
        return list(model.model.decoder.layers)
    return [layer.mlp for layer in (model.transformer.h if model.config.model_type == "falcon" else model.model.layers)]


def brute_force_counts(model: Any, windows: list[list[int]], threshold: float = 0.0) -> list[list[int]]:
    """One window at a time, one token at a time, one neuron at a time: the neuron's own dot product with the FFN input."""
    names = {"opt": "fc1", "falcon": "dense_h_to_4h"}
    firsts = [getattr(mlp, names.get(model.config.model_type, "gate_proj")) for mlp in mlp_modules(model)]
    counts = [[0] * first.out_features for first in firsts]
    inputs: dict[int, torch.Tensor] = {}
    handles = [
        first.register_forward_pre_hook(lambda _module, args, layer=layer: inputs.update({layer: args[0]}))
        for layer, first in enumerate(firsts)
    ]
    with torch.inference_mode():
        for window in windows:
            model(input_ids=torch.tensor([window]))
            for layer, first in enumerate(firsts):
                for x in inputs[layer].reshape(-1, first.in_features):
                    z = torch.nn.functional.linear(x, first.weight, first.bias)
                    for neuron, value in enumerate(z.tolist()):
                        counts[layer][neuron] += value > threshold
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize("family", CONFIGS)
def test_counts_equal_a_loop_over_tokens_and_neurons(tmp_path: Path, family: str) -> None:
    """Prevents counting at the wrong module, of the wrong sign, or with a token or a window counted twice."""
    checkpoint, model = load(save_family(tmp_path, family))
    windows = [*random_windows(3, 11), *random_windows(1, 4)]
    advanced: list[int] = []
    recording = record_firings(model, checkpoint.shape, window_batches(windows, 2), advanced.append)
    expected = brute_force_counts(make_model(CONFIGS[family]()), windows)
    assert [counts.tolist() for counts in recording.counts] == expected
    assert recording.tokens == 37 == sum(advanced)
    assert all(counts.dtype == np.int64 for counts in recording.counts)
    assert all(0 < counts.sum() < 37 * 96 for counts in recording.counts)


@pytest.mark.parametrize("family", CONFIGS)
def test_batch_size_does_not_change_the_counts(tmp_path: Path, family: str) -> None:
    """Prevents documents from seeing each other, or padding from being counted, in a larger batch."""
    checkpoint, model = load(save_family(tmp_path, family))
    windows = [*random_windows(5, 16), *random_windows(1, 3)]
    alone, together = (record_firings(model, checkpoint.shape, window_batches(windows, size)) for size in (1, 8))
    assert alone.tokens == together.tokens == 83
    for one, other in zip(alone.counts, together.counts, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("family", CONFIGS)
def test_no_hook_stays_behind(tmp_path: Path, family: str) -> None:
    """Prevents a second recording from counting into the first, also after a failure in the middle."""
    checkpoint, model = load(save_family(tmp_path, family))
    record_firings(model, checkpoint.shape, window_batches(random_windows(2, 5), 1))

    def fail(_layer: int, _tensor: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        observe_ffn(model, checkpoint.shape, pre_activation=fail, activation=fail, predictor_input=fail),
    ):
        model(input_ids=torch.tensor([[1, 2]]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_no_hook_stays_behind_when_a_module_is_missing(tmp_path: Path) -> None:
    """Prevents half-installed hooks when the model is not laid out as its config says."""
    checkpoint, model = load(save_family(tmp_path, "opt"))
    del model.model.decoder.layers[2].fc1
    with (
        pytest.raises(AttributeError),
        observe_ffn(model, checkpoint.shape, pre_activation=lambda *_: None, predictor_input=lambda *_: None),
    ):
        pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("family", "key", "activation"),
    [("llama", "hidden_act", "silu"), ("opt", "activation_function", "gelu"), ("falcon-40b", "activation", "gelu")],
)
def test_smooth_activation_is_refused_with_its_share_of_zeros(
    tmp_path: Path, family: str, key: str, activation: str
) -> None:
    """Prevents a SiLU or GELU model from being profiled as if its inactive neurons were worth nothing."""
    checkpoint, model = load(save_family(tmp_path, family, **{key: activation}))
    with pytest.raises(UnsupportedModelError) as caught:
        record_firings(model, checkpoint.shape, window_batches(random_windows(1, 12), 1))
    share = re.search(
        rf"'{activation}' and (\d+\.\d\d) % of its FFN activations are exactly zero", caught.value.message
    )
    assert share and float(share[1]) < 1
    assert "over 12 tokens" in caught.value.message
    assert ": use a ReLU version" in caught.value.message


def test_other_activation_with_zeros_is_not_said_to_have_none(tmp_path: Path) -> None:
    """Prevents a sentence that contradicts itself: 80 % exact zeros, "so no neuron can be skipped"."""
    checkpoint, model = load(save_family(tmp_path, "llama", hidden_act="relu2"))
    with pytest.raises(UnsupportedModelError, match=r"exactly zero over 12 tokens, but its maths is not implemented"):
        record_firings(model, checkpoint.shape, window_batches(random_windows(1, 12), 1))


@pytest.mark.parametrize("family", CONFIGS)
def test_layer_that_computes_nan_is_named(tmp_path: Path, family: str) -> None:
    """Prevents neurons of a damaged model from passing for silent ones, and blaming a layer before or after it."""
    checkpoint, model = load(save_family(tmp_path, family))
    names = {"opt": "fc1", "falcon": "dense_h_to_4h"}
    with torch.no_grad():
        getattr(mlp_modules(model)[1], names.get(model.config.model_type, "gate_proj")).weight[3] = float("nan")
    with pytest.raises(CheckpointError, match=r"the FFN of layer 1 computes values that are not finite"):
        record_firings(model, checkpoint.shape, window_batches(random_windows(2, 9), 2))


@pytest.mark.parametrize("family", CONFIGS)
def test_config_that_claims_relu_is_not_believed(tmp_path: Path, family: str) -> None:
    """Prevents counts of a model whose code computes another activation than its config names."""
    checkpoint, model = load(save_family(tmp_path, family))
    for mlp in mlp_modules(model):
        name = next(name for name in ("act_fn", "activation_fn", "act") if hasattr(mlp, name))
        setattr(mlp, name, torch.nn.SiLU())
    with pytest.raises(UnsupportedModelError, match=r"config.json says 'relu', but in layer 0 .*: use config and code"):
        record_firings(model, checkpoint.shape, window_batches(random_windows(2, 9), 2))


def test_one_other_layer_is_enough_to_refuse(tmp_path: Path) -> None:
    """Prevents a mean over layers from hiding the layer that is different."""
    checkpoint, model = load(save_family(tmp_path, "llama"))
    model.model.layers[2].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(UnsupportedModelError, match="in layer 2 "):
        verify_activation(model, checkpoint.shape, torch.tensor(random_windows(1, 9)))


def test_a_drelu_neuron_fires_when_both_products_are_positive(tmp_path: Path) -> None:
    """Prevents counting on the gate alone, twice as much as fires, in a model that transformers does not have."""
    checkpoint, model = load(save_family(tmp_path, BAMBOO))
    windows = [*random_windows(3, 11), *random_windows(1, 4)]
    recording = record_firings(model, checkpoint.shape, window_batches(windows, 2))
    plain, expected = make_model(mistral_config()), [[0] * 96 for _ in range(3)]
    for number, layer in enumerate(plain.model.layers):

        def both(mlp: Any, args: tuple[torch.Tensor, ...], number: int = number) -> None:
            for x in args[0].reshape(-1, 32):
                for neuron in range(96):
                    fires = min(float(mlp.gate_proj.weight[neuron] @ x), float(mlp.up_proj.weight[neuron] @ x)) > 0
                    expected[number][neuron] += fires

        layer.mlp.register_forward_pre_hook(both)
        layer.mlp.up_proj.register_forward_hook(lambda _module, _inputs, output: output.relu())
    with torch.inference_mode():
        for window in windows:
            plain(input_ids=torch.tensor([window]))
    assert [counts.tolist() for counts in recording.counts] == expected


def test_a_drelu_model_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    """Prevents firings of a gate and an up product whose activation is another."""
    checkpoint, model = load(save_family(tmp_path, BAMBOO))
    del model.model.layers[1].mlp.forward  # ReGLU, as in the class
    with pytest.raises(UnsupportedModelError, match="in layer 1 "):
        verify_activation(model, checkpoint.shape, torch.tensor(random_windows(1, 9)))


def test_a_fatrelu_neuron_fires_above_the_threshold(tmp_path: Path) -> None:
    """Prevents counting ProSparse's neurons as ReLU ones, or running them so: transformers does not have FATReLU."""
    checkpoint, model = load(save_family(tmp_path, PROSPARSE))
    windows = random_windows(4, 11)
    recording = record_firings(model, checkpoint.shape, window_batches(windows, 2))
    plain = make_model(llama_config())
    for layer in plain.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda _module, _inputs, z: z * (z > PROSPARSE_THRESHOLD))
    expected = brute_force_counts(plain, windows, PROSPARSE_THRESHOLD)
    assert [counts.tolist() for counts in recording.counts] == expected
    assert sum(map(sum, expected)) < 0.9 * sum(map(sum, brute_force_counts(plain, windows))), "the threshold matters"


def test_a_fatrelu_model_with_another_threshold_is_refused(tmp_path: Path) -> None:
    """Prevents zeros that are compared with those of a ReLU."""
    checkpoint, model = load(save_family(tmp_path, PROSPARSE))
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    with pytest.raises(UnsupportedModelError, match="says 'fatrelu', but in layer 1 "):
        verify_activation(model, checkpoint.shape, torch.tensor(random_windows(1, 9)))


def test_no_token_at_all_is_refused(tmp_path: Path) -> None:
    """Prevents a workspace full of zeros from an empty corpus."""
    checkpoint, model = load(save_family(tmp_path, "opt"))
    with pytest.raises(CorpusError, match=r"holds no text outside its held-out documents, .*: give it more documents"):
        record_firings(model, checkpoint.shape, iter(()))


def test_weights_that_transformers_does_not_find_are_an_error(tmp_path: Path) -> None:
    """Prevents freshly drawn random weights, which ``transformers`` substitutes with a warning, from being profiled."""
    from safetensors.torch import load_file, save_file

    checkpoint = Checkpoint(save_family(tmp_path, "llama"))
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor.clone() for name, tensor in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors \(model.layers.1.mlp.up_proj.weight"):
        load_hf_model(checkpoint, CPU, torch.float32)


def test_a_missing_package_is_not_the_models_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a whole model from being downloaded again where ``transformers`` lacks a package."""
    checkpoint = Checkpoint(save_family(tmp_path, "llama"))

    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise ModuleNotFoundError("Could not import module 'LlamaForCausalLM'")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    with pytest.raises(CheckpointError, match=r"'LlamaForCausalLM'.*: install what is missing"):
        load_hf_model(checkpoint, CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "neurons"), [(1, 1), (7, 3), (40, 96), (700, 999), (70_000, 4)])
def test_counter_equals_a_comparison_of_every_number(dtype: torch.dtype, tokens: int, neurons: int) -> None:
    """Prevents columns that run over into their neighbours, a threshold that is rounded, and -0 or NaN that fire."""
    shape = replace(read_shape(llama_config().to_dict()), ffn_sizes=(2, neurons), activation_threshold=0.01)
    values = torch.randn(tokens, neurons).to(dtype)
    for place, odd in enumerate((0.01, 0.0, -0.0, float("nan"), float("inf"))[: values.numel()]):
        values.view(-1)[place] = odd
    batch = (
        WindowBatch(([0] * tokens,), (0,)) if tokens < 7 else WindowBatch(([0] * (tokens // 7),) * 7, (1, 0) * 3 + (1,))
    )
    values = values[: batch.tokens]
    counter = FiringCounter(shape, CPU)
    for _ in range(2):
        counter.expect(batch)
        counter.count(1, values)
    fires, cut = values > 0.01, batch.first_half_tokens()
    expected = torch.stack([fires[:cut].sum(0), fires[cut:].sum(0)]) * 2
    assert counter.counts.dtype == torch.int64
    assert counter.counts[:, :2].sum() == 0 and torch.equal(counter.counts[:, 2:], expected)
