"""Samples are exactly what the layer saw and did, document by document in its split; the disk is asked beforehand."""

import errno
import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from pi_toolkit.predictor_training.sample import SPLITS, SampleStore, collect_samples, reserve, split_tokens
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.corpus import split_of
from pi_toolkit.profiler.errors import CorpusError
from pi_toolkit.profiler.hf_model import load_hf_model
from pi_toolkit.profiler.token_windows import load_tokenizer
from tiny_models import CONFIGS, PROSPARSE, PROSPARSE_THRESHOLD, make_model, save_family

CPU = torch.device("cpu")
WINDOW = 16
TEXTS = [f"text {number} about the {'river ' * (number % 5)}and town {number * 7919}" for number in range(90)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("\n\n".join(TEXTS))
    return path


def collect(tmp_path: Path, family: str, corpus: Path, tokens: dict[Any, int], batch_size: int = 3) -> SampleStore:
    directory = save_family(tmp_path / f"model {batch_size}", family)
    checkpoint = Checkpoint(directory)
    (tmp_path / f"samples {batch_size}").mkdir()
    store = SampleStore(tmp_path / f"samples {batch_size}", checkpoint.shape, tokens, CPU)
    model = load_hf_model(checkpoint, CPU, torch.float32)
    collect_samples(model, store, str(corpus), load_tokenizer(directory), WINDOW, batch_size)
    return store


def split_ids(directory: Path, split: str, limit: int) -> list[list[int]]:
    """Windows of one split, by hand: its documents' ids one after another, cut at the limit."""
    tokenizer = load_tokenizer(directory)
    texts = [text for index, text in enumerate(TEXTS) if split_of(index) == split]
    last = len(TEXTS) - 1  # a paragraph keeps its line end, the last one has none
    ids = [i for text in texts for i in tokenizer(text + "\n" * (text is not TEXTS[last]))["input_ids"]][:limit]
    return [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]


def observed(
    model: Any, windows: list[list[int]], layer: int, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The predictor's input and the firing mask of one layer, from hooks of this test's own, one window at a time."""
    kind = model.config.model_type
    block = {"opt": lambda: model.model.decoder.layers, "falcon": lambda: model.transformer.h}.get(
        kind, lambda: model.model.layers
    )()[layer]
    watched = {"opt": lambda: block.final_layer_norm, "falcon": lambda: block}.get(
        kind, lambda: block.post_attention_layernorm
    )()
    first = {"opt": lambda: block.fc1, "falcon": lambda: block.mlp.dense_h_to_4h}.get(
        kind, lambda: block.mlp.gate_proj
    )()
    inputs: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    handles = [
        watched.register_forward_pre_hook(lambda _m, args: inputs.append(args[0].flatten(0, -2))),
        first.register_forward_hook(lambda _m, _a, out: masks.append(out.flatten(0, -2) > threshold)),
    ]
    with torch.inference_mode():
        for window in windows:
            model(input_ids=torch.tensor([window]))
    for handle in handles:
        handle.remove()
    return torch.cat(inputs), torch.cat(masks)


@pytest.mark.parametrize("family", [*CONFIGS, PROSPARSE])
def test_samples_are_what_the_layer_saw_and_did(tmp_path: Path, corpus: Path, family: str) -> None:
    """Prevents predictors that learn from the normed input, from another layer, or from masks shifted by a token."""
    tokens = {"training": 200, "calibration": 70, "held-out": 37}
    store = collect(tmp_path, family, corpus, tokens)
    threshold = PROSPARSE_THRESHOLD if family == PROSPARSE else 0.0
    model = make_model(CONFIGS["llama" if family == PROSPARSE else family]())
    if family == PROSPARSE:
        for layer in model.model.layers:
            layer.mlp.act_fn = torch.nn.Threshold(threshold, 0.0)
    for split in SPLITS:
        windows = split_ids(tmp_path / "model 3", split, tokens[split])
        for layer, samples in enumerate(store.layer(split, layer) for layer in range(3)):
            inputs, fires = observed(model, windows, layer, threshold)
            found_inputs, found_fires = samples.batch(slice(0, len(samples)))
            assert len(samples) == tokens[split] == len(inputs)
            assert torch.equal(found_fires, fires), (split, layer)
            torch.testing.assert_close(samples.inputs.float(), inputs.bfloat16().float(), rtol=0.008, atol=1e-6)
            assert torch.equal(found_inputs, samples.inputs.float())
            assert 0.2 < fires.float().mean() < 0.8


def test_inputs_are_rounded_once(tmp_path: Path, corpus: Path) -> None:
    """Prevents samples in F16, which overflows at 65,504, or rounded twice."""
    tokens = {"training": 40, "calibration": 20, "held-out": 20}
    store = collect(tmp_path, "opt", corpus, tokens)
    inputs, _ = observed(make_model(CONFIGS["opt"]()), split_ids(tmp_path / "model 3", "held-out", 20), 1)
    samples = store.layer("held-out", 1)
    assert samples.inputs.dtype == torch.bfloat16
    nearest = (samples.inputs.float() - inputs).abs() <= inputs.abs() * 2**-8 + 1e-6
    assert nearest.all()


@pytest.mark.parametrize("family", ["opt", "falcon-40b"])
def test_batch_size_does_not_change_the_samples(tmp_path: Path, corpus: Path, family: str) -> None:
    """Prevents samples out of order or from documents that see each other."""
    tokens = {"training": 100, "calibration": 30, "held-out": 17}
    alone, together = (collect(tmp_path, family, corpus, tokens, size) for size in (1, 8))
    for split in SPLITS:
        for layer in range(3):
            one, other = alone.layer(split, layer), together.layer(split, layer)
            assert torch.equal(one.firing, other.firing)
            torch.testing.assert_close(one.inputs.float(), other.inputs.float(), rtol=0.008, atol=1e-6)


def test_splits_are_by_document(tmp_path: Path, corpus: Path) -> None:
    """Prevents a document from being trained on and reported on, which flatters every number."""
    documents = {split: {i for i in range(len(TEXTS)) if split_of(i) == split} for split in SPLITS}
    assert sum(len(numbers) for numbers in documents.values()) == len(TEXTS)
    assert not documents["training"] & documents["held-out"] and not documents["calibration"] & documents["held-out"]
    store = collect(tmp_path, "opt", corpus, dict.fromkeys(SPLITS, 10**4))
    tokenizer = load_tokenizer(tmp_path / "model 3")
    for split in SPLITS:
        expected = sum(map(len, split_ids(tmp_path / "model 3", split, 10**4)))
        assert len(store.layer(split, 0)) == expected < 10**4
    everything = sum(len(tokenizer(text + "\n" * (text is not TEXTS[-1]))["input_ids"]) for text in TEXTS)
    assert store.tokens() == everything


@pytest.mark.parametrize(("documents", "missing"), [(1, "training"), (5, "calibration"), (10, "calibration")])
def test_too_few_documents_are_refused(tmp_path: Path, documents: int, missing: str) -> None:
    """Prevents thresholds chosen on nothing, or quality reported over no token."""
    path = tmp_path / "short.txt"
    path.write_text("\n\n".join(TEXTS[:documents]))
    with pytest.raises(CorpusError, match=f"has no {missing} document .*: give one with at least 20 documents"):
        collect(tmp_path, "opt", path, dict.fromkeys(SPLITS, 10))


def test_samples_have_their_room_on_the_disk(tmp_path: Path) -> None:
    """Prevents SIGBUS: a file with holes maps well and kills the process when the disk has filled up meanwhile."""
    reserve(tmp_path / "samples", 10**6)
    status = (tmp_path / "samples").stat()
    assert status.st_size == 10**6 and status.st_blocks * 512 >= 10**6


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL])
def test_file_systems_that_cannot_reserve_are_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Prevents a network file system without allocation from being no place for a workspace."""

    def refuse(*_: object) -> None:
        raise OSError(number, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    reserve(tmp_path / "samples", 10**6)
    assert (tmp_path / "samples").stat().st_size == 10**6


def test_full_disk_while_reserving_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents "No space left on device" without saying where."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError) as caught:
        reserve(tmp_path / "samples", 10**6)
    assert caught.value.filename == str(tmp_path / "samples")


def test_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents SIGBUS, which no program survives, when a memory-mapped file meets a full disk."""
    shape = Checkpoint(save_family(tmp_path / "model", "opt")).shape
    usage = namedtuple("usage", "total used free")
    need = 1_000_000 * 3 * (2 * 32 + 96 // 8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**12, 10**12 - need + 1, need - 1))
    (tmp_path / "samples").mkdir()
    tokens = {"training": 800_000, "calibration": 100_000, "held-out": 100_000}
    with pytest.raises(
        CorpusError, match=r"1,000,000 samples take 217\.4 MiB and .* has 217\.4 MiB free: lower --samples or --tokens"
    ):
        SampleStore(tmp_path / "samples", shape, tokens, CPU)
    assert list((tmp_path / "samples").iterdir()) == []


@pytest.mark.parametrize("total", [1, 2, 3, 10, 99, 200_000])
def test_tokens_are_divided_among_the_splits(total: int) -> None:
    """Prevents a split without room, and more tokens than asked for."""
    parts = split_tokens(total)
    assert list(parts) == list(SPLITS)
    assert all(part >= 1 for part in parts.values())
    assert sum(parts.values()) == max(total, 3)
    assert total < 10 or parts["calibration"] == parts["held-out"] == total // 10
