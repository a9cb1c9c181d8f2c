"""Training that is killed, resumed or divided among processes ends in the same predictors and leaves nothing behind."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pi_toolkit.predictor_training.cli import main
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.progress_file import ProgressFile
from pi_toolkit.profiler.workspace_lock import locked
from random_kills import WORKSPACE, kill_at_random

PLAIN = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ONE_THREAD = PLAIN | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@pytest.fixture
def options(corpus: Path) -> list[str]:
    return [
        "--corpus",
        str(corpus),
        "--tokens",
        "1.2k",
        "--window",
        "16",
        "--batch-size",
        "2",
        "--epochs",
        "2",
        "--rounds",
        "1",
    ]


def predictors(workspace: Path) -> dict[str, Any]:
    folder = workspace / "predictor"
    return {path.name: torch.load(path) for path in sorted(folder.glob("model_*.pt"))} | {
        "config": json.loads((folder / "config.json").read_text())
    }


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, weights in expected.items():
        if name == "config":
            assert found[name]["layers"] == weights["layers"]
        else:
            assert all(torch.equal(found[name][key], weights[key]) for key in weights)


def test_kills_at_random_moments_change_no_predictor(tmp_path: Path, workspace: Path, options: list[str]) -> None:
    """Samples counted twice, half a predictor taken for a whole one, other predictors than without a kill, gigabytes left
    behind."""
    import shutil

    whole, killed = (shutil.copytree(workspace, tmp_path / name) for name in ("whole", "killed"))
    given = [WORKSPACE, *options]
    moments = kill_at_random("pi_toolkit.predictor_training.cli", given, whole, killed, kills=5, seed=0)
    assert_equal(predictors(killed), predictors(whole))
    assert {path.relative_to(killed) for path in killed.rglob("*")} == {
        p.relative_to(whole) for p in whole.rglob("*")
    }, moments


def test_two_processes_train_the_predictors_of_one(tmp_path: Path, workspace: Path, options: list[str]) -> None:
    """Layers trained twice or by nobody, samples of one process that overwrite another's, two writers."""
    import shutil

    alone = shutil.copytree(workspace, tmp_path / "alone")
    trainer = [sys.executable, "-m", "pi_toolkit.predictor_training"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    for command in ([*trainer, str(alone)], [*launcher, *trainer, str(workspace)]):
        result = subprocess.run(
            [*command, *options, "--device", "cpu"], capture_output=True, text=True, check=False, env=ONE_THREAD
        )
        assert result.returncode == 0, result.stderr
    assert_equal(predictors(workspace), predictors(alone))
    assert {path.name for path in workspace.iterdir()} == {"model.json", "activation", "predictor"}
    assert result.stdout.count("mean recall") == 1


def test_interruption_that_comes_late_keeps_the_work(
    workspace: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    """Ctrl-C after hours that throws everything away, or keeps it and does not say so."""
    from pi_toolkit.predictor_training import adaptive_training

    train, trained = adaptive_training.train_layer, []

    def interrupted(*arguments: Any) -> Any:
        if trained:
            raise KeyboardInterrupt
        trained.append(train(*arguments))
        return trained[0]

    monkeypatch.setattr(adaptive_training, "train_layer", interrupted)
    result = run(main, workspace, *options)
    assert result.exit_code == 1
    assert "the work done so far is in" in result.stderr and result.stderr.strip().endswith("with --resume")
    monkeypatch.setattr(adaptive_training, "train_layer", lambda *a: trained.append(train(*a)) or trained[-1])
    resumed = run(main, workspace, *options, "--resume")
    assert resumed.exit_code == 0, (resumed.stderr, resumed.exception)
    assert len(trained) == 3, "the finished layer was trained again"
    assert not (workspace / "training-progress").exists()


def test_other_options_are_no_continuation(
    workspace: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    """Half of the predictors for one recall and half for another."""
    monkeypatch.setattr(ProgressFile, "due", lambda _self: True)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("pi_toolkit.predictor_training.adaptive_training.train_layer", interrupt)
    assert run(main, workspace, *options).exit_code == 1
    result = run(main, workspace, *options, "--recall", "0.9", "--resume")
    assert result.exit_code == 1 and "give the same options, or run the command again without --resume" in result.stderr
    monkeypatch.undo()
    assert run(main, workspace, *options, "--recall", "0.9").exit_code == 0


@pytest.mark.parametrize("sampling_saved", [True, False])
def test_another_text_is_no_continuation(
    workspace: Path,
    corpus: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Any],
    sampling_saved: bool,
) -> None:
    """Samples, or layers, of two texts in one set of predictors, because a file was replaced by another of its name."""
    from pi_toolkit.predictor_training import adaptive_training

    text = workspace.parent / corpus.name
    text.write_text(corpus.read_text())
    given = [str(text) if option == str(corpus) else option for option in options]
    monkeypatch.setattr(ProgressFile, "due", lambda _self: sampling_saved)
    train = adaptive_training.train_layer

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(adaptive_training, "train_layer", interrupt)
        return train(*arguments)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(adaptive_training, "train_layer", interrupted)
    assert run(main, workspace, *given).exit_code == 1
    saved = {path.name for path in (workspace / "training-progress").iterdir()}
    assert any(name.startswith("layer_0") for name in saved) and ("sampling.0" in saved) == sampling_saved
    for other in (text.read_text().replace("cat", "dog"), text.read_text()[: len(text.read_text()) // 2]):
        text.write_text(other)
        refused = run(main, workspace, *given, "--resume")
        assert refused.exit_code == 1
        assert "the corpus does not begin with the text that the saved progress was made on" in refused.stderr
    assert {path.name for path in (workspace / "training-progress").iterdir()} == saved
    text.write_text(corpus.read_text())
    monkeypatch.setattr(adaptive_training, "train_layer", train)
    assert run(main, workspace, *given, "--resume").exit_code == 0


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: os.truncate(path, 100)])
def test_samples_that_are_gone_are_not_zeros(
    workspace: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Any],
    damage: Callable[[Path], None],
) -> None:
    """Predictors trained on nothing, because the large files were deleted to make room and the small ones were not."""
    monkeypatch.setattr(ProgressFile, "due", lambda _self: True)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("pi_toolkit.predictor_training.adaptive_training.train_layer", interrupt)
    assert run(main, workspace, *options).exit_code == 1
    damage(workspace / "training-progress" / "training.1.firing")
    result = run(main, workspace, *options, "--resume")
    assert result.exit_code == 1
    assert "training.1.firing' is missing or not as it was saved: run the command again without" in result.stderr


def test_a_resumed_training_keeps_its_dtype(
    model: Path, workspace: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    """A refusal because less memory is free than when the training began."""
    monkeypatch.setattr(ProgressFile, "due", lambda _self: True)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pi_toolkit.predictor_training.adaptive_training.train_layer", interrupt)
        assert run(main, workspace, *options).exit_code == 1
    (saved,) = (workspace / "training-progress").glob("sampling.*")
    sampled_at = saved.stat().st_mtime_ns
    weights = 4 * Checkpoint(model).shape.num_parameters()
    monkeypatch.setattr("pi_toolkit.profiler.device._free_bytes", lambda: weights + 1)
    refused = run(main, workspace, *options, "--dtype", "bfloat16", "--resume")
    assert refused.exit_code == 1 and "was saved with dtype 'float32'" in refused.stderr
    assert saved.stat().st_mtime_ns == sampled_at
    result = run(main, workspace, *options, "--resume")
    assert result.exit_code == 0, result.stderr


def test_two_trainings_of_one_workspace_are_refused(workspace: Path, options: list[str], refuses: Any) -> None:
    """Samples of two runs in the same files."""
    with locked(workspace):
        assert "another pi-profile or pi-train-predictor is at work in" in refuses(main, workspace, *options)
    assert {path.name for path in workspace.iterdir()} == {"model.json", "activation"}


@pytest.mark.parametrize(("tokens", "samples"), [("700", "400"), ("600", "600"), ("300", "1k")])
def test_samples_are_bounded_and_spread(
    workspace: Path, corpus: Path, run_json: Any, tokens: str, samples: str
) -> None:
    """A store that grows with --tokens, or one that holds the first documents alone."""
    run_json(main, workspace, "--corpus", corpus, "--tokens", tokens, "--samples", samples, "--epochs", "1")
    training = json.loads((workspace / "predictor" / "config.json").read_text())["training"]
    read, kept = (1000 * float(n[:-1]) if n.endswith("k") else float(n) for n in (tokens, samples))
    assert training["tokens"] == read
    assert training["samples"] == min(read, kept)


def test_accuracy_rule_and_report(workspace: Path, options: list[str], run_json: Any) -> None:
    """The paper's first rule, and a page that says what was measured."""
    result = run_json(main, workspace, *options, "--rule", "accuracy")
    page = (workspace / "predictor" / "report.html").read_text()
    assert "Predictors of tiny" in page and "<svg" in page and "<script" not in page
    for layer in result["layers"]:
        assert f"{layer['recall']:.4f}" in page
    assert result["perplexity_predicted"] > 0 and result["rounds"] >= 1
