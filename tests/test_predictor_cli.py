"""pi-train-predictor as a user meets it: what it writes, what it prints, and one sentence for every way it can fail."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from folder_contents import contents
from pi_toolkit.predictor_training import predictor_file
from pi_toolkit.predictor_training.cli import main
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.cli import main as pi_profile
from pi_toolkit.profiler.workspace import Workspace, read_model
from tiny_corpus import WORDS
from tiny_models import CONFIGS, save_family

RunJson = Callable[..., dict[str, Any]]
Refuses = Callable[..., str]
PREDICTOR_FILES = {"config.json", "report.html", "model_0.pt", "model_1.pt", "model_2.pt"}


@pytest.fixture
def quick(corpus: Path) -> list[object]:
    return ["--corpus", corpus, "--tokens", "400", "--epochs", "1", "--window", "32"]


def test_result_and_files(workspace: Path, corpus: Path, run_json: RunJson) -> None:
    """Prevents a change of what scripts read from the last line, or of what the next commands read from the disk."""
    before = set(contents(workspace))
    result = run_json(main, workspace, "--corpus", corpus, "--tokens", "1.5k", "--hidden", "64", "--epochs", "3")
    measured = ["perplexity_dense", "perplexity_predicted", "failed_layers", "rounds"]
    assert list(result) == ["layers", "predictor_parameters", "predictor_bytes", *measured, "seconds", "workspace"]
    for number, layer in enumerate(result["layers"]):
        assert list(layer) == ["layer", "hidden", "recall", "precision", "density", "firing_share"]
        assert (layer["layer"], layer["hidden"]) == (number, 64)
        assert layer["recall"] > 0.8 and 0.8 * layer["firing_share"] < layer["density"] < 1
    assert result["predictor_parameters"] == 3 * 64 * (32 + 96)
    assert result["predictor_bytes"] == 2 * result["predictor_parameters"]
    assert set(contents(workspace)) - before == {f"predictor/{name}" for name in PREDICTOR_FILES}
    assert {path.name for path in workspace.iterdir()} == {"model.json", "activation", "predictor"}


def test_files_hold_what_was_reported(workspace: Path, quick: list[object], run_json: RunJson) -> None:
    """Prevents a report about other predictors than those on the disk."""
    result = run_json(main, workspace, *quick)
    record = read_model(Workspace(workspace))
    found = predictor_file.read(workspace / "predictor", 32, record.shape.ffn_sizes, record.fingerprint)
    assert (found.threshold, found.fingerprint) == (1.0, record.fingerprint)
    mlps = [layer for layer in found.layers if isinstance(layer, predictor_file.MlpWeights)]
    assert sum(layer.fc1.numel() + layer.fc2.numel() for layer in mlps) == result["predictor_parameters"]
    assert [layer.recall for layer in found.quality or ()] == [layer["recall"] for layer in result["layers"]]
    training = json.loads((workspace / "predictor" / "config.json").read_text())["training"]
    assert training["corpus"] == "corpus.txt"
    assert (training["tokens"], training["window"], training["epochs"], training["seed"]) == (400, 32, 1, 0)


def test_default_width_is_within_a_tenth_of_the_model(workspace: Path, quick: list[object], run_json: RunJson) -> None:
    """Prevents predictors that outgrow the model when no width is given."""
    result = run_json(main, workspace, *quick)
    assert result["predictor_parameters"] <= read_model(Workspace(workspace)).shape.num_parameters() / 10


def test_same_seed_gives_identical_files(workspace: Path, quick: list[object], run_json: RunJson) -> None:
    """Prevents results that cannot be reproduced, also with other windows per pass; another seed must differ."""
    runs = []
    for extra in ((), ("--batch-size", "8"), ("--seed", "1")):
        run_json(main, workspace, *quick, *extra)
        runs.append(contents(workspace / "predictor"))
    assert runs[0] == runs[1]
    assert runs[0]["model_0.pt"] != runs[2]["model_0.pt"]


def test_progress_is_not_on_stdout(workspace: Path, quick: list[object], run: Callable[..., Any]) -> None:
    """Prevents progress from being piped into a file with the table."""
    result = run(main, workspace, *quick)
    assert result.exit_code == 0
    assert result.stderr.splitlines() == ["training 3 predictors of adaptive width for tiny_llama on cpu"]
    assert "mean recall" in result.stdout and "of the model's parameters" in result.stdout


def test_corpus_that_ends_early_is_announced(workspace: Path, corpus: Path, run: Callable[..., Any]) -> None:
    """Prevents predictors trained on far fewer tokens than asked for from going unnoticed."""
    result = run(main, workspace, "--corpus", corpus, "--tokens", "100k", "--epochs", "1")
    assert result.exit_code == 0
    sampled = json.loads((workspace / "predictor" / "config.json").read_text())["training"]["tokens"]
    assert f"the corpus ended after {sampled:,} of 100,000 tokens" in result.stderr


@pytest.mark.parametrize("tokens", [1, 3, 20, 330])
def test_short_runs_are_legal(workspace: Path, corpus: Path, run_json: RunJson, tokens: int) -> None:
    """Prevents a traceback from a first try with a handful of tokens."""
    result = run_json(main, workspace, "--corpus", corpus, "--tokens", tokens, "--epochs", "1")
    assert len(result["layers"]) == 3


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_is_trained(
    tmp_path: Path, corpus: Path, quick: list[object], run_json: RunJson, family: str
) -> None:
    """Prevents a family that can be profiled and then not be trained."""
    directory = save_family(tmp_path / "model", family)
    run_json(pi_profile, directory, "--corpus", corpus, "--tokens", "100", "-o", tmp_path / "pi")
    layers = run_json(main, tmp_path / "pi", *quick)["layers"]
    assert all(0.2 < layer["firing_share"] < 0.8 and layer["recall"] > 0.7 for layer in layers)


# Arguments, in which {tmp}, {pi} and {corpus} stand for paths, and the sentence they end in.
REFUSALS: dict[str, tuple[str, str]] = {
    "missing workspace": ("{tmp}/nowhere --corpus {corpus}", "is not a workspace directory: run pi-profile MODEL"),
    "workspace is a file": ("{tmp}/file --corpus {corpus}", "is not a workspace directory: run pi-profile MODEL"),
    "workspace without model.json": ("{tmp} --corpus {corpus}", "model.json' is missing: run pi-profile MODEL"),
    "other model": ("{pi} --corpus {corpus} --model {tmp}/other", "are not those"),
    "missing model": ("{pi} --corpus {corpus} --model {tmp}/nowhere", "neither a directory nor a valid hub id"),
    "missing corpus": ("{pi} --corpus {tmp}/c.txt", "is neither a file nor one of wikipedia"),
    "too few documents": ("{pi} --corpus {tmp}/short.txt", "has no calibration document"),
    "empty corpus": ("{pi} --corpus {tmp}/empty.txt", "has no training document"),
    "window too long": ("{pi} --corpus {corpus} --window 129", "--window 129 is beyond the model's 128 positions"),
    "no such device": ("{pi} --corpus {corpus} --device tpu", "is not a device: use auto, cpu, cuda or cuda:1"),
    "more tokens than disk": ("{pi} --corpus {corpus} --tokens 900000G", "free: lower --samples or --tokens, or free"),
    "unknown home": ("{pi} --corpus {corpus} --model ~nosuchuser/x", "give the path in full"),
    "unnamed corpus": ("{pi} --corpus=", "the name of the corpus is empty"),
    "broken corpus": ("{pi} --corpus {tmp}/broken.jsonl", "is not valid JSON: mend or remove it"),
    "diverged": (
        "{pi} --corpus {corpus} --tokens 400 --learning-rate 1e30",
        "does not fit in F16: train with a lower --learning-rate",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal_changes_nothing(tmp_path: Path, workspace: Path, corpus: Path, refuses: Refuses, case: str) -> None:
    """Prevents tracebacks, lost predictors and gigabytes of left-over samples from ordinary mistakes."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "short.txt").write_text("\n\n".join(" ".join(WORDS) for _ in range(5)))
    save_family(tmp_path / "other", "llama", seed=1)
    template, sentence = REFUSALS[case]
    before = contents(tmp_path)
    arguments = [part.format(tmp=tmp_path, pi=workspace, corpus=corpus) for part in template.split()]
    assert sentence in refuses(main, *arguments)
    assert contents(tmp_path) == before
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize(
    "option",
    [
        *("--tokens=0", "--tokens=abc", "--recall=1.5", "--recall=nan", "--recall=0", "--recall=1", "--recall=high"),
        *("--learning-rate=0", "--learning-rate=nan", "--learning-rate=inf", "--hidden=0", "--epochs=0", "--seed=-1"),
        *("--learning-rate=1e300", f"--hidden={2**20 + 1}", f"--seed={2**63}", "--window=1"),
    ],
)
def test_malformed_option_is_a_usage_error(workspace: Path, refuses: Refuses, option: str) -> None:
    """Prevents training for nothing towards a target that cannot be reached or is no number."""
    message = refuses(main, workspace, option, exit_code=2)
    assert message.startswith(f"Error: Invalid value for '{option.partition('=')[0]}'")


def test_model_directory_that_moved_is_given_by_option(
    tmp_path: Path, model: Path, corpus: Path, quick: list[object], run_json: RunJson, refuses: Refuses
) -> None:
    """Prevents a workspace from being useless after its model was moved."""
    place = shutil.copytree(model, tmp_path / "model")
    run_json(pi_profile, place, "--corpus", corpus, "--tokens", "100", "-o", tmp_path / "pi")
    place.rename(tmp_path / "moved")
    message = refuses(main, tmp_path / "pi", *quick)
    assert "are no longer at" in message and message.endswith(": say where they are with --model")
    assert len(run_json(main, tmp_path / "pi", *quick, "--model", tmp_path / "moved")["layers"]) == 3


def test_changed_weights_are_refused(
    tmp_path: Path, corpus: Path, quick: list[object], run_json: RunJson, refuses: Refuses
) -> None:
    """Prevents predictors of one training run from being stored as those of another."""
    run_json(
        pi_profile, save_family(tmp_path / "m", "llama"), "--corpus", corpus, "--tokens", "99", "-o", tmp_path / "pi"
    )
    shutil.rmtree(tmp_path / "m")
    save_family(tmp_path / "m", "llama", seed=1)
    assert "are not those" in refuses(main, tmp_path / "pi", *quick)
    assert not (tmp_path / "pi" / "predictor").exists()


def test_smooth_model_is_refused_at_once(tmp_path: Path, quick: list[object], refuses: Refuses) -> None:
    """Prevents minutes of sampling a model none of whose neurons can be skipped."""
    from pi_toolkit.profiler.workspace import describe, write_model

    directory = save_family(tmp_path / "model", "llama", hidden_act="silu")
    write_model(Workspace(tmp_path / "pi"), describe(str(directory), None, Checkpoint(directory)))
    assert (
        "'silu', and only neurons of relu, fatrelu, drelu are known to contribute exactly zero when they are"
        in refuses(main, tmp_path / "pi", *quick)
    )


def test_damaged_model_is_named_before_the_training(
    tmp_path: Path, corpus: Path, quick: list[object], refuses: Refuses
) -> None:
    """Prevents the learning rate from being blamed for weights that are not finite."""
    from pi_toolkit.profiler.workspace import describe, write_model

    directory = save_family(tmp_path / "model", "opt")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.decoder.layers.1.fc1.weight"][0] = float("nan")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_model(Workspace(tmp_path / "pi"), describe(str(directory), None, Checkpoint(directory)))
    assert "the FFN of layer 1 computes values that are not finite" in refuses(main, tmp_path / "pi", *quick)
    assert {path.name for path in (tmp_path / "pi").iterdir()} == {"model.json"}


def test_model_that_says_nothing_is_one_sentence(
    tmp_path: Path, corpus: Path, quick: list[object], refuses: Refuses
) -> None:
    """Prevents a traceback from weights that no file can hold, which inputs that are all zero lead to."""
    from pi_toolkit.profiler.workspace import describe, write_model

    directory = save_family(tmp_path / "model", "llama")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"].zero_()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_model(Workspace(tmp_path / "pi"), describe(str(directory), None, Checkpoint(directory)))
    assert "the predictor of layer 0 does not fit in F16" in refuses(main, tmp_path / "pi", *quick)
    assert {path.name for path in (tmp_path / "pi").iterdir()} == {"model.json"}


@pytest.mark.parametrize("hidden", [[], ["--hidden", "32"]])
def test_damaged_head_is_named_before_the_training(
    tmp_path: Path,
    corpus: Path,
    quick: list[object],
    refuses: Refuses,
    monkeypatch: pytest.MonkeyPatch,
    hidden: list[object],
) -> None:
    """Prevents hours of training that end in a traceback, because no number holds the perplexity."""
    from pi_toolkit.profiler.workspace import describe, write_model

    directory = save_family(tmp_path / "model", "llama")
    tensors = load_file(directory / "model.safetensors")
    monkeypatch.setattr("pi_toolkit.predictor_training.adaptive_training.train_layer", None)
    for factor in (1e6, float("nan")):
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * factor
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        place = tmp_path / f"{factor}-pi"
        write_model(Workspace(place), describe(str(directory), None, Checkpoint(directory)))
        assert "the model's perplexity is beyond every number (a loss of " in refuses(main, place, *quick, *hidden)
        assert {path.name for path in place.iterdir()} == {"model.json"}


def test_file_in_place_of_the_predictors_is_left_alone(workspace: Path, quick: list[object], refuses: Refuses) -> None:
    """Prevents a user's file from being replaced by a directory without a word."""
    (workspace / "predictor").write_text("mine")
    assert "predictor' is no regular directory: move it away" in refuses(main, workspace, *quick)
    assert (workspace / "predictor").read_text() == "mine"


def test_help_is_quick() -> None:
    """Prevents two seconds of importing torch before ``--help`` answers."""
    code = (
        "import sys\nfrom pi_toolkit.predictor_training.cli import main\nmain(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "pi-train-predictor opt-6.7b-pi --tokens 400k" in result.stdout
