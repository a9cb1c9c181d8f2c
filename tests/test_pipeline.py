"""The four commands one after the other, on models whose hot neurons are known by construction."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from pi_toolkit.predictor_training.cli import main as pi_train_predictor
from pi_toolkit.profiler.cli import main as pi_profile
from pi_toolkit.profiler.hardware import GIB
from pi_toolkit.profiler.workspace import Workspace, read_model
from pi_toolkit.runtime.cli import main as pi_run
from pi_toolkit.runtime.convert_cli import main as pi_convert
from pi_toolkit.solver import gpuidx
from pi_toolkit.solver.cli import main as pi_place
from pi_toolkit.solver.memory import unit_bytes
from tiny_models import PROSPARSE, PROSPARSE_THRESHOLD, TOKENIZER_FILES, make_model, opt_config, save_family, save_model

LAYERS, NEURONS, HOT, WIDTH = 12, 160, 64, 32
RunJson = Callable[..., dict[str, Any]]


def hot_sets() -> list[np.ndarray]:
    """Another random set of neurons in every layer."""
    generator = np.random.default_rng(3)
    return [np.sort(generator.permutation(NEURONS)[:HOT]) for _ in range(LAYERS)]


def save_known_model(directory: Path) -> Path:
    """An OPT model in which the hot neurons of a layer fire on every token and the others on none, by their bias."""
    config = opt_config(num_hidden_layers=LAYERS, ffn_dim=NEURONS, max_position_embeddings=64)
    save_model(directory, config)
    model = make_model(config)
    with torch.no_grad():
        for layer, hot in zip(model.model.decoder.layers, hot_sets(), strict=True):
            layer.fc1.bias.fill_(-100.0)
            layer.fc1.bias[torch.from_numpy(hot)] = 100.0
    model.save_pretrained(directory)
    assert all((directory / name).exists() for name in TOKENIZER_FILES)
    return directory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {i} of a text about the number {i * i}." for i in range(120)))
    return path


@pytest.mark.parametrize("name", ["known", "a b", "a;b", "été"])
def test_the_hot_neurons_of_every_layer_reach_the_gpu(
    tmp_path: Path, corpus: Path, name: str, run_json: RunJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 2 given the neurons of layer 10 (file names sorted as text), or files found by a fragile path."""
    monkeypatch.chdir(tmp_path)
    model = save_known_model(tmp_path / name)
    profile = run_json(pi_profile, model, "--corpus", corpus, "--tokens", 600, "--window", 32)
    workspace = Workspace(Path(profile["workspace"]))
    assert workspace.path == Path(f"{name}-pi")
    assert profile["firing_share"] == [HOT / NEURONS] * LAYERS
    trained = run_json(
        pi_train_predictor, workspace.path, "--corpus", corpus, "--tokens", 1500, "--window", 32, "--hidden", WIDTH
    )
    assert min(layer["recall"] for layer in trained["layers"]) > 0.95
    assert trained["predictor_parameters"] == LAYERS * WIDTH * (32 + NEURONS)

    record = read_model(workspace)
    units = unit_bytes(record.shape, "float32", 64, 1, [WIDTH] * LAYERS)
    dense = sum(units.attention) + sum(units.predictor) + units.head
    vram = (dense + LAYERS * HOT * units.neuron + units.neuron // 2) / GIB
    options = ("--vram", vram, "--dtype", "float32", "--reserve", 0, "--sync-seconds", 0)
    placed = run_json(pi_place, workspace.path, *options)
    assert placed["status"] == "optimal"
    index = gpuidx.read(workspace.gpuidx(record), record.shape.ffn_sizes, record.fingerprint)
    for layer, hot in enumerate(hot_sets()):
        assert index.gpu_neurons[layer].tolist() == hot.tolist(), f"layer {layer}"

    first = Path(placed["gpuidx"]).read_bytes()
    run_json(pi_place, workspace.path, *options, "-o", tmp_path / "again.gpuidx")
    assert (tmp_path / "again.gpuidx").read_bytes() == first

    answers = {
        mode: run_json(pi_run, workspace.path, "-p", "Paragraph 7", "-n", 8, "--mode", mode)
        for mode in ("dense", "exact", "predicted")
    }
    assert answers["dense"]["token_ids"] == answers["exact"]["token_ids"]
    assert {answer["gpu_neuron_share"] for answer in answers.values()} == {HOT / NEURONS}


def test_a_prosparse_model_through_every_command(tmp_path: Path, corpus: Path, run_json: RunJson) -> None:
    """A command that takes FATReLU for ReLU, or asks transformers for an architecture it does not have."""
    model, workspace = save_family(tmp_path / "prosparse", PROSPARSE), tmp_path / "prosparse-pi"
    run_json(pi_profile, model, "--corpus", corpus, "--tokens", 600, "--window", 32, "-o", workspace)
    assert read_model(Workspace(workspace)).shape.full_activation == f"fatrelu:{PROSPARSE_THRESHOLD}"
    run_json(pi_train_predictor, workspace, "--corpus", corpus, "--tokens", 1500, "--window", 32, "--hidden", WIDTH)
    run_json(pi_place, workspace, "--vram", 0.001, "--dtype", "float32", "--reserve", 0, "--sync-seconds", 0)
    run_json(pi_convert, workspace, "-o", tmp_path / "p.powerinfer.gguf", "--quantize", "f32")
    answers = {
        (source.name, mode): run_json(pi_run, source, "-p", "Paragraph 7", "-n", 8, "--mode", mode)["token_ids"]
        for source in (workspace, tmp_path / "p.powerinfer.gguf")
        for mode in ("dense", "exact", "predicted")
    }
    for mode in ("exact", "predicted"):
        assert answers["prosparse-pi", mode] == answers["p.powerinfer.gguf", mode]
    assert answers["prosparse-pi", "dense"] == answers["prosparse-pi", "exact"] == answers["p.powerinfer.gguf", "dense"]


def test_a_stage_says_which_one_comes_before_it(
    tmp_path: Path, corpus: Path, refuses: Callable[..., str], run: Callable[..., Result]
) -> None:
    """A newcomer who runs the commands out of order and gets a missing-file error."""
    for main, options in ((pi_train_predictor, ()), (pi_place, ("--vram", 1)), (pi_run, ("-p", "a"))):
        assert "run pi-profile" in refuses(main, tmp_path / "none-pi", *options)
    model = save_known_model(tmp_path / "known")
    workspace = tmp_path / "known-pi"
    result = run(pi_profile, model, "--corpus", corpus, "--tokens", 100, "--window", 32, "-o", workspace)
    assert result.exit_code == 0, result.stderr
    assert "run pi-train-predictor" in refuses(pi_run, workspace, "-p", "a", "--mode", "predicted")
