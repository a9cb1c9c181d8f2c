"""``pi-eval`` as people call it: its table, its JSON, its alarm and every refusal."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file

from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.workspace import Workspace, describe, read_model, write_model
from pi_toolkit.runtime.convert_cli import main as pi_convert
from pi_toolkit.runtime.eval_cli import main as pi_eval
from pi_toolkit.solver import gpuidx
from test_runtime_cli import half_index, make_workspace, write_predictors
from tiny_models import DEMO_MODELS, save_family

Refuses = Callable[..., str]
RunJson = Callable[..., dict[str, Any]]
JSON_KEYS = """perplexity_dense perplexity_exact perplexity_predicted delta_percent kl top1_agreement layers tokens
windows conditions""".split()
WINDOW = 32
QUICK = ("--window", WINDOW, "--tokens", 6 * WINDOW, "--prompts", 2, "-n", 5, "--device", "cpu", "--threads", 1)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = make_workspace(tmp_path_factory.mktemp("eval"), "llama", "tiny")
    write_predictors(workspace)
    return workspace


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text(
        "\n\n".join(f"Paragraph {i} of a text about the number {i * i} and what it is." for i in range(800))
    )
    return path


def test_json_has_the_promised_keys(workspace: Workspace, corpus: Path, run_json: RunJson) -> None:
    """A script that reads the JSON line and misses a key, or figures of one mode under the name of another."""
    result = run_json(pi_eval, workspace.path, "--corpus", corpus, *QUICK, "--reference")
    assert set(JSON_KEYS) <= set(result)
    assert (result["windows"], result["tokens"]) == (6, 6 * (WINDOW - 1))
    compared = result["compared"]
    assert list(compared) == ["dense", "exact", "predicted", "transformers"]
    for mode in ("dense", "exact", "predicted"):
        assert result[f"perplexity_{mode}"] == compared[mode]["perplexity"]
    for name in ("exact", "transformers"):
        assert compared[name]["perplexity"] == pytest.approx(result["perplexity_dense"], rel=1e-4)
        assert abs(compared[name]["kl"]) < 1e-6 and compared[name]["top1_agreement"] == 1.0
    change = 100 * (result["perplexity_predicted"] / result["perplexity_dense"] - 1)
    assert result["delta_percent"] == pytest.approx(change) != 0.0
    assert compared["predicted"]["delta_percent_error"] > 0
    assert result["kl"] > 0 and 0 < result["top1_agreement"] < 1
    layers = result["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2]
    assert all(0 < layer[name] < 1 for layer in layers for name in ("recall", "precision", "density"))
    assert layers != result["layers_on_windows"]
    conditions = result["conditions"]
    assert conditions["decoding_steps"] == 10
    wanted = dict(
        corpus="text.txt", split="held-out", bos="document", bos_id=0, window=WINDOW, stride=WINDOW, score_from=0
    )
    assert {name: conditions[name] for name in wanted} == wanted


def test_what_is_printed(workspace: Workspace, corpus: Path, run: Callable[..., Result]) -> None:
    """A perplexity without what it was measured on."""
    options = (*QUICK, "--stride", 8, "--score-from", 16, "--split", "all")
    result = run(pi_eval, workspace.path, "--corpus", corpus, *options)
    assert result.exit_code == 0, result.stderr
    for part in (
        "against dense",
        "KL (nats)",
        "neurons of predicted on the windows",
        "neurons of predicted in 10 decoding steps",
        "candidates per firing",
        "windows of 32 tokens, one every 8, from position 16 on",
        "all documents of text.txt",
        "BOS (token 0) in front of every window",
        "weights in float32",
    ):
        assert part in result.stdout, result.stdout
    assert "evaluating tiny in float32, modes dense, exact, predicted" in result.stderr


def test_without_predictors(tmp_path: Path, corpus: Path, run: Callable[..., Result]) -> None:
    """Figures of a mode that did not run, or no word of why it did not."""
    bare = make_workspace(tmp_path, "opt", "bare")
    answer = run(pi_eval, bare.path, "--corpus", corpus, *QUICK, "--json")
    result = json.loads(answer.stdout.splitlines()[-1])
    assert "mode predicted is left out" in answer.stderr
    assert result["perplexity_exact"] == pytest.approx(result["perplexity_dense"], rel=1e-4)
    for name in ("perplexity_predicted", "delta_percent", "kl", "top1_agreement"):
        assert result[name] is None
    assert all(layer["recall"] == 1.0 and layer["density"] == layer["firing_share"] for layer in result["layers"])


def test_a_model_that_never_falls_silent(tmp_path: Path, corpus: Path, run_json: RunJson) -> None:
    """Modes that skip what cannot be skipped, or shares of neurons that fire where none is silent."""
    smooth = make_workspace(tmp_path, "llama", "smooth", hidden_act="silu")
    result = run_json(pi_eval, smooth.path, "--corpus", corpus, *QUICK)
    assert list(result["compared"]) == ["dense"] and result["perplexity_exact"] is None and result["layers"] == []


def test_modes_that_were_asked_for(workspace: Workspace, corpus: Path, run_json: RunJson) -> None:
    """A comparison with a model that did not run."""
    both = run_json(pi_eval, workspace.path, "--corpus", corpus, *QUICK, "--mode", "predicted,dense")
    assert list(both["compared"]) == ["dense", "predicted"] and both["perplexity_exact"] is None
    alone = run_json(pi_eval, workspace.path, "--corpus", corpus, *QUICK, "--mode", "predicted", "--prompts", 0)
    assert alone["perplexity_predicted"] == both["perplexity_predicted"]
    assert alone["delta_percent"] is None and alone["alarm"] is None
    assert alone["layers"] == alone["layers_on_windows"] == both["layers_on_windows"]


def test_neither_placement_nor_slots_nor_file_change_the_figures(
    workspace: Workspace, corpus: Path, tmp_path: Path, run_json: RunJson
) -> None:
    """Neurons mixed up by a placement, windows by a batch."""
    options = ("--corpus", corpus, *QUICK)
    plain = run_json(pi_eval, workspace.path, *options, "--slots", 1)
    gpuidx.write(tmp_path / "half.gpuidx", half_index(read_model(workspace)))
    placed = run_json(pi_eval, workspace.path, *options, "--slots", 5, "--gpuidx", tmp_path / "half.gpuidx")
    run_json(pi_convert, workspace.path, "-o", tmp_path / "tiny.powerinfer.gguf", "--quantize", "f32")
    file = run_json(pi_eval, tmp_path / "tiny.powerinfer.gguf", *options, "--reference", read_model(workspace).model)
    for other in (placed, file):
        for name in ("perplexity_dense", "perplexity_exact", "perplexity_predicted"):
            assert other[name] == pytest.approx(plain[name], rel=1e-4)
        for mine, theirs in zip(other["layers_on_windows"], plain["layers_on_windows"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)
    assert file["compared"]["transformers"]["perplexity"] == pytest.approx(plain["perplexity_dense"], rel=1e-4)
    assert placed["conditions"]["gpu_neuron_share"] == 0.5


def test_tasks(workspace: Workspace, tmp_path: Path, run: Callable[..., Result]) -> None:
    """A question answered by one mode alone, or text read although only questions were asked for."""
    rows = [{"context": "One and one is", "choices": ["two", "a", "three"], "label": i % 3} for i in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ("--tasks", tmp_path / "sums.jsonl", "--limit", 3, "--device", "cpu", "--json")
    result = run(pi_eval, workspace.path, *options)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert set(found) == {"tasks", "conditions"}
    by_mode = found["tasks"][str(tmp_path / "sums.jsonl")]
    assert list(by_mode) == ["dense", "exact", "predicted"]
    assert all(mode["questions"] == 3 and mode["acc"] == pytest.approx(1 / 3) for mode in by_mode.values())
    assert "acc_norm" in result.stdout and "sums" in result.stdout


DEMO_TOKENS = ("--corpus", "wikipedia-intros", "--window", 128, "--tokens", 2048, "--prompts", 0, "--device", "cpu")


def demo_workspace(folder: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None] | None) -> Path:
    """A demo model with its config and tensors changed."""
    model = shutil.copytree(DEMO_MODELS / "relu-llama-5m", folder / "model")
    if change:
        config, tensors = json.loads((model / "config.json").read_text()), load_file(model / "model.safetensors")
        change(config, tensors)
        (model / "config.json").write_text(json.dumps(config))
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
    workspace = Workspace(folder / "demo-pi")
    write_model(workspace, describe(str(model), None, Checkpoint(model)))
    return workspace.path


def test_no_alarm_for_a_sound_model(tmp_path: Path, run_json: RunJson) -> None:
    """An alarm that always rings."""
    assert run_json(pi_eval, demo_workspace(tmp_path, None), *DEMO_TOKENS, "--mode", "dense")["alarm"] is None


def test_alarm_for_scrambled_embeddings(tmp_path: Path, run: Callable[..., Result]) -> None:
    """A careful comparison of two kinds of nonsense."""

    def scramble(_config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        rows = tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.weight"] = rows[
            torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        ]

    path = demo_workspace(tmp_path, scramble)
    result = run(pi_eval, path, *DEMO_TOKENS, "--mode", "dense", "--json")
    alarm = json.loads(result.stdout.splitlines()[-1])["alarm"]
    assert "above its vocabulary of 4,096" in alarm and "download or convert the model again" in alarm
    assert f"ALARM: {alarm}" in result.stdout
    agreed = run(pi_eval, path, *DEMO_TOKENS, "--mode", "dense", "--reference")
    assert (
        "and transformers agrees, so that config, tokenizer and weights are probably not of one model" in agreed.stdout
    )


def test_alarm_for_another_activation(tmp_path: Path, run_json: RunJson) -> None:
    """The commonest mistake, a ReLU model that is run with SiLU, and nobody told which it is."""

    def smooth(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["hidden_act"] = "silu"

    alarm = run_json(pi_eval, demo_workspace(tmp_path, smooth), *DEMO_TOKENS)["alarm"]
    assert "with the activation relu in place of silu it would be" in alarm, alarm


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--window", 4096], "beyond the model's 128 positions: choose a smaller window"),
        (["--tokens", 20], "holds 20 tokens, less than one window of 128"),
        (["--corpus", "nowhere.txt"], "check the spelling"),
        (["--tasks", "a.jsonl", "--ctx", 4096], "beyond the model's 128 positions"),
        (["--reference", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--gpuidx", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--tasks", "/nowhere/at/all.jsonl"], "/nowhere/at/all.jsonl"),
    ],
)
def test_refusals(workspace: Workspace, corpus: Path, refuses: Refuses, options: list[object], sentence: str) -> None:
    """A traceback, or figures of less than was asked for."""
    assert sentence in refuses(pi_eval, workspace.path, "--corpus", corpus, "--device", "cpu", *options)


def test_predictors_that_are_not_there(tmp_path: Path, corpus: Path, refuses: Refuses) -> None:
    """Mode predicted measured as something else."""
    bare = make_workspace(tmp_path, "llama", "bare")
    assert "no predictors for --mode predicted" in refuses(
        pi_eval, bare.path, "--corpus", corpus, "--mode", "predicted", *QUICK
    )


def test_lm_eval_is_not_installed(workspace: Workspace, refuses: Refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import error where one sentence says what to install."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install 'powerinfer-toolkit[eval]'" in refuses(pi_eval, workspace.path, "--tasks", "piqa")


@pytest.mark.parametrize(
    "options",
    [
        ["--window", 1],
        ["--window", 16, "--stride", 17],
        ["--window", 16, "--score-from", 15],
        ["--stride", 0],
        ["--mode", "fast"],
        ["--split", "training"],
        ["--bos", "never"],
        ["--tokens", "many"],
        ["--prompt-tokens", 128],
        ["--tasks", ","],
        ["--limit", 3],
        ["--fewshot", 5],
        ["--slots", 0],
        ["--slots", 10**20],
        ["--threads", 10**5],
    ],
)
def test_usage_errors(workspace: Workspace, corpus: Path, run: Callable[..., Result], options: list[object]) -> None:
    """A nonsensical option accepted."""
    result = run(pi_eval, workspace.path, "--corpus", corpus, *options)
    assert result.exit_code == 2, result.output


def test_help_leaves_torch_alone() -> None:
    """A slow ``--help``."""
    code = (
        "import sys; from pi_toolkit.runtime.eval_cli import main; main(['--help'], standalone_mode=False); "
        "sys.exit(bool({'torch', 'transformers', 'lm_eval'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_damaged_weight_is_told(tmp_path: Path, corpus: Path, run_json: RunJson) -> None:
    """NaN in a JSON that cannot hold it, or a comparison of NaN with NaN."""
    model = save_family(tmp_path / "model", "llama")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    workspace = Workspace(tmp_path / "pi")
    write_model(workspace, describe(str(model), None, Checkpoint(model)))
    result = run_json(pi_eval, workspace.path, "--corpus", corpus, *QUICK, "--prompts", 0)
    assert result["perplexity_dense"] is None and "no finite perplexity" in result["alarm"]


@pytest.mark.parametrize("options", [["--score-from", 5], ["--reference", "."], ["--tokens", "1k"]])
def test_options_of_text_beside_questions_alone(
    workspace: Workspace, run: Callable[..., Result], options: list[object]
) -> None:
    """An option ignored without a word."""
    result = run(pi_eval, workspace.path, "--tasks", "questions.jsonl", *options)
    assert result.exit_code == 2, result.output
    assert "is for evaluation on text: give --corpus too" in result.stderr
