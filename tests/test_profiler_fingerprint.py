"""The fingerprint names a model by its content: the same everywhere and in every release, another for any other weights."""

from pathlib import Path

import pytest
import torch

from pi_toolkit.profiler.checkpoint import Checkpoint
from test_profiler_checkpoint import model_directory, tensors_of
from tiny_models import save_family

# Of the tiny configs with every tensor counting 0, 0.01 … 2.5 and again.
GOLDEN_FINGERPRINTS = {
    "llama": "3af6e68ef44fe7f9be33dccfe6e7bdbfe4091230660b1032246d1e8a2118c493",
    "mistral": "48d8b211ea123f3e6ab29fb09a090854bb2432aac2d5f49a556e0e1fd4a9cd35",
    "opt": "745dfc8050504cd9d8d6b136f49fa58961af7510b0cc9f46108f28a4db1b564e",
    "falcon-7b": "58fa0b2e133f5f27c7489c02fcf315ed7bc8edb6d0cca005ba4db709f7aae47b",
    "falcon-40b": "4cfb41d83f2acfcf0f1a1569c68a9909fdfc8e425944f5701d3cfe57782b6408",
}


def test_fingerprint_does_not_depend_on_the_place(tmp_path: Path) -> None:
    """Prevents a moved or renamed model directory from being taken for another model."""
    first = save_family(tmp_path / "first", "opt")
    fingerprint = Checkpoint(first).fingerprint()
    assert len(fingerprint) == 64
    first.rename(tmp_path / "second")
    assert Checkpoint(tmp_path / "second").fingerprint() == fingerprint


@pytest.mark.parametrize(
    ("tensor", "position"),
    [("lm_head.weight", -1), ("model.layers.2.mlp.gate_proj.weight", 0), ("model.norm.weight", 16)],
)
def test_other_weights_have_another_fingerprint(tmp_path: Path, tensor: str, position: int) -> None:
    """Prevents counts of a model from being used with its fine-tuned version."""
    tensors = tensors_of("llama")
    before = Checkpoint(model_directory(tmp_path / "before", "llama", tensors=tensors)).fingerprint()
    tensors[tensor].view(-1)[position] += 1
    assert Checkpoint(model_directory(tmp_path / "after", "llama", tensors=tensors)).fingerprint() != before


def test_other_dtype_or_config_has_another_fingerprint(tmp_path: Path) -> None:
    """Prevents a fingerprint that overlooks what else changes the results: stored precision and the shape record."""
    original = save_family(tmp_path / "original", "llama")
    halved = model_directory(tmp_path / "half", "llama", tensors={n: t.half() for n, t in tensors_of("llama").items()})
    epsilon = save_family(tmp_path / "epsilon", "llama", rms_norm_eps=1e-5)
    assert len({Checkpoint(directory).fingerprint() for directory in (original, halved, epsilon)}) == 3
    assert Checkpoint(halved).dtype() == torch.float16


def test_equal_bytes_of_another_dtype_have_another_fingerprint(tmp_path: Path) -> None:
    """Prevents F16 and BF16 weights with the same bits, which mean other numbers, from passing for one model."""
    half = {name: tensor.half() for name, tensor in tensors_of("opt").items()}
    brain = {name: tensor.view(torch.bfloat16) for name, tensor in half.items()}
    directories = [model_directory(tmp_path / n, "opt", tensors=t) for n, t in (("half", half), ("brain", brain))]
    assert Checkpoint(directories[0]).fingerprint() != Checkpoint(directories[1]).fingerprint()


@pytest.mark.parametrize(("family", "fingerprint"), GOLDEN_FINGERPRINTS.items())
def test_fingerprint_is_that_of_earlier_releases(tmp_path: Path, family: str, fingerprint: str) -> None:
    """Prevents a release that takes every existing workspace for another model's."""
    shapes = {name: tensor.shape for name, tensor in tensors_of(family).items()}
    tensors = {name: (torch.arange(shape.numel()) % 251 / 100).view(shape) for name, shape in shapes.items()}
    assert Checkpoint(model_directory(tmp_path / "model", family, tensors=tensors)).fingerprint() == fingerprint
