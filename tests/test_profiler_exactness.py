"""The same windows give the same counts, however they are batched, padded or passed: alone, together, layer by layer."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pi_toolkit.profiler import layer_by_layer, whole_model
from pi_toolkit.profiler.activation_stats import read
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.cli import main
from pi_toolkit.profiler.hf_model import load_hf_model
from pi_toolkit.profiler.layer_by_layer import LayerByLayer
from pi_toolkit.profiler.record import FiringCounter, Recording, record_firings
from pi_toolkit.profiler.token_windows import Window
from pi_toolkit.profiler.whole_model import WholeModel
from pi_toolkit.profiler.window_batch import WindowBatch, halved_batches
from pi_toolkit.runtime.convert_cli import main as pi_convert
from tiny_corpus import WORDS, save_corpus
from tiny_models import BAMBOO, CONFIGS, PROSPARSE, VOCABULARY, save_family

CPU = torch.device("cpu")


def windows(count: int, length: int, last: int) -> list[Window]:
    """Random windows whose documents are of one, two or three windows; the last one is shorter."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (count, length), generator=generator).tolist()
    return [Window(row[:last] if n == count - 1 else row, n * 2 // 3) for n, row in enumerate(ids)]


def assert_equal(one: Recording, other: Recording) -> None:
    assert one.half_tokens == other.half_tokens
    for mine, theirs in zip(one.half_counts, other.half_counts, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*CONFIGS, BAMBOO, PROSPARSE])
def test_layer_by_layer_counts_what_the_whole_model_does(
    tmp_path: Path, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prevents --low-memory from running a layer with another's weights, mask or rotation, in any architecture."""
    checkpoint = Checkpoint(save_family(tmp_path, family))
    given = windows(9, 12, 5)
    model = load_hf_model(checkpoint, CPU, dtype)
    whole = record_firings(WholeModel(model, checkpoint.shape), checkpoint.shape, halved_batches(given, 4, VOCABULARY))
    monkeypatch.setattr(layer_by_layer, "HIDDEN_STATE_BYTES", 4 * 12 * 32 * dtype.itemsize)  # rounds of 4, 4 and 1
    layered = LayerByLayer(checkpoint, CPU, dtype, 12)
    advanced: list[int] = []
    one_each = record_firings(layered, checkpoint.shape, halved_batches(given, 1, VOCABULARY), advanced.append)
    assert_equal(one_each, whole)
    assert sum(advanced) == 8 * 12 + 5 and min(whole.half_tokens) > 0


def test_layer_by_layer_holds_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents weights from staying behind, layer after layer, until the memory is full."""
    checkpoint = Checkpoint(save_family(tmp_path, "llama"))
    layered = LayerByLayer(checkpoint, CPU, torch.float32, 12)
    layers = layered._model.model.layers
    seen: list[list[bool]] = []

    def count(_counter: Any, _layer: int, _tensor: torch.Tensor) -> None:
        seen.append([not any(weight.is_meta for weight in layer.parameters()) for layer in layers])

    monkeypatch.setattr(FiringCounter, "count", count)
    record_firings(layered, checkpoint.shape, halved_batches(windows(3, 12, 12), 1, VOCABULARY))
    assert len(seen) == 9 and all(sum(resident) == 1 for resident in seen)
    assert all(weight.is_meta for layer in layers for weight in layer.parameters())
    assert layered._model.lm_head.weight.is_meta


@pytest.mark.parametrize("format", ["safetensors", "bin", "gguf"])
def test_low_memory_from_every_kind_of_file(
    tmp_path: Path, run_json: Callable[..., dict[str, Any]], format: str
) -> None:
    """Prevents --low-memory from working with one kind of checkpoint alone."""
    model = save_family(tmp_path / "tiny", "falcon-40b")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join([" ".join(WORDS)] * 50))
    if format == "bin":
        torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
        (model / "model.safetensors").unlink()
    given: Path = model
    if format == "gguf":
        given = tmp_path / "tiny.gguf"
        run_json(pi_convert, model, "-o", given)
    options = ("--corpus", corpus, "--tokens", "300", "--window", "32")
    results = [
        run_json(main, given, *options, *more, "-o", tmp_path / name)
        for name, more in (("a", ()), ("b", ("--low-memory",)))
    ]
    shape = Checkpoint(model).shape
    fingerprint = json.loads((tmp_path / "a" / "model.json").read_text())["fingerprint"]
    stats = [read(tmp_path / name / "activation", shape.ffn_sizes, fingerprint) for name in "ab"]
    assert results[0]["firing_share"] == results[1]["firing_share"]
    for one, other in zip(stats[0].counts, stats[1].counts, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("side", ["left", "right"])
def test_batch_size_and_padding_side_change_nothing(
    tmp_path: Path, run_json: Callable[..., dict[str, Any]], side: str
) -> None:
    """Prevents pads from being counted, or a token from seeing them, where the tokenizer has a padding side of its own."""
    model = save_family(tmp_path / "tiny", "llama")
    corpus = tmp_path / "corpus.txt"
    save_corpus(corpus, 80)
    options = ("--corpus", corpus, "--tokens", "700", "--window", "48")
    plain = run_json(main, model, *options, "--batch-size", "1", "-o", tmp_path / "plain")
    config = json.loads((model / "tokenizer_config.json").read_text())
    token = config.get("eos_token") or "</s>"
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"padding_side": side, "pad_token": token}))
    padded = run_json(main, model, *options, "--batch-size", "8", "-o", tmp_path / "padded")
    assert padded["tokens"] == plain["tokens"] == 700  # of windows of 48 the last is short
    for file in sorted((tmp_path / "plain" / "activation").iterdir()):
        assert file.read_bytes() == (tmp_path / "padded" / "activation" / file.name).read_bytes(), file.name


class RoundsByBatch(torch.nn.Module):
    """A model whose numbers depend on how many windows are together, as those of some kernels do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model, self.batches = model.base_model, []

        def jitter(module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            return output + 1e-3 * (len(output) - 1)

        model.base_model.embed_tokens.register_forward_hook(jitter)
        model.base_model.register_forward_pre_hook(
            lambda _module, _args, kwargs: self.batches.append(len(kwargs["input_ids"])), with_kwargs=True
        )

    def get_submodule(self, target: str) -> torch.nn.Module:
        return self.base_model.get_submodule(target.removeprefix("model."))


def test_windows_go_alone_where_a_batch_would_change_them(tmp_path: Path) -> None:
    """Prevents counts that depend on --batch-size on a machine whose products of many rows add in another order."""
    checkpoint = Checkpoint(save_family(tmp_path, "llama"))
    given = windows(10, 12, 5)
    recordings = []
    for batch_size in (1, 4):
        model = RoundsByBatch(load_hf_model(checkpoint, CPU, torch.float32))
        execution = WholeModel(model, checkpoint.shape)
        recordings.append(record_firings(execution, checkpoint.shape, halved_batches(given, batch_size, VOCABULARY)))
    assert_equal(*recordings)
    assert max(model.batches) == 4 and model.batches.count(4) == 1  # tried once


def test_exact_batches_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents the trial from failing where nothing is wrong, which would cost the speed of batches unnoticed."""
    checkpoint = Checkpoint(save_family(tmp_path, "llama"))
    model = load_hf_model(checkpoint, CPU, torch.float32)
    sizes: list[int] = []
    passes = whole_model.WholeModel._pass

    def watched(self: WholeModel, batch: WindowBatch) -> torch.Tensor:
        sizes.append(len(batch.windows))
        return passes(self, batch)

    monkeypatch.setattr(whole_model.WholeModel, "_pass", watched)
    record_firings(
        WholeModel(model, checkpoint.shape), checkpoint.shape, halved_batches(windows(12, 16, 16), 4, VOCABULARY)
    )
    assert sizes == [4, 1, 1, 1, 1, 4, 4, 4]


def test_memory_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    """Prevents a corpus from being collected before it is counted."""
    checkpoint = Checkpoint(save_family(tmp_path, "llama"))
    model = load_hf_model(checkpoint, CPU, torch.float32)
    taken, counted = 0, 0

    def stream() -> Iterator[Window]:
        nonlocal taken
        for window in windows(40, 8, 8):
            taken += 1
            assert taken - counted <= 2 * 4 + 1
            yield window

    def advance(tokens: int) -> None:
        nonlocal counted
        counted += tokens // 8

    record_firings(
        WholeModel(model, checkpoint.shape), checkpoint.shape, halved_batches(stream(), 4, VOCABULARY), advance
    )
    assert counted == 40
