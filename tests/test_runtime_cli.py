"""``pi-run`` as people call it: what it prints, what it finds by itself, and every refusal."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result

from pi_toolkit.predictor_training import predictor_file
from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.workspace import ModelRecord, Workspace, describe, read_model, write_model
from pi_toolkit.runtime.cli import main as pi_run
from pi_toolkit.solver import gpuidx
from pi_toolkit.solver.gpuidx import GpuIndex
from tiny_models import save_family

Refuses = Callable[..., str]
JSON_KEYS = """text token_ids prompt_tokens generated_tokens prompt_tokens_per_second decode_tokens_per_second mode
gpu_neuron_share""".split()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return make_workspace(tmp_path, "llama", "tiny")


def make_workspace(folder: Path, family: str, name: str, seed: int = 0, **changes: Any) -> Workspace:
    """A model and a workspace with ``model.json`` alone."""
    model = save_family(folder / name, family, seed, **changes)
    workspace = Workspace(folder / f"{name}-pi")
    write_model(workspace, describe(str(model), None, Checkpoint(model)))
    return workspace


def write_predictors(workspace: Workspace, fingerprint: str | None = None) -> None:
    shape = read_model(workspace).shape
    generator = torch.Generator().manual_seed(0)
    fc1 = tuple(torch.randn(32, shape.hidden_size, generator=generator) for _ in shape.ffn_sizes)
    fc2 = tuple(torch.randn(neurons, 32, generator=generator) for neurons in shape.ffn_sizes)
    predictors = PredictorSet.of_mlps(fc1, fc2, 1.0, fingerprint or read_model(workspace).fingerprint, None)
    predictor_file.write(workspace.predictor, predictors, {})
    config = json.loads((workspace.predictor / "config.json").read_text())
    del config["layers"]
    (workspace.predictor / "config.json").write_text(json.dumps(config))


def half_index(record: ModelRecord, **facts: Any) -> GpuIndex:
    sizes = record.shape.ffn_sizes
    ids = tuple(np.arange(0, neurons, 2, dtype=np.int32) for neurons in sizes)
    return GpuIndex(ids, sizes, vram_capacity_bytes=1, **facts)


def placement_facts() -> dict[str, Any]:
    """What pi-place states beside the neurons."""
    made_for = dict(hardware="h", dtype="float32", context=16, batch_size=1, gpu_budget_bytes=10**6)
    dense = dict(attention_on_gpu=(True,) * 3, predictor_on_gpu=(False,) * 3, head_on_gpu=False)
    return {**made_for, **dense, "objective_value": 1.0, "upper_bound": 1.0, "status": "optimal"}


def test_json_has_the_promised_keys(workspace: Workspace, run_json: Callable[..., dict[str, Any]]) -> None:
    """A script that reads the JSON line and misses a key."""
    result = run_json(pi_run, workspace.path, "-p", "Hello", "-n", 5)
    assert set(JSON_KEYS) <= set(result)
    assert result["generated_tokens"] == len(result["token_ids"]) == 5
    assert result["mode"] == "exact"
    assert result["gpu_neuron_share"] == 0.0


def test_stdout_is_the_text(workspace: Workspace, run: Callable[..., Result]) -> None:
    """Notes about the run mixed into the text of a pipe."""
    result = run(pi_run, workspace.path, "-p", "Hello", "-n", 5)
    text = json.loads(run(pi_run, workspace.path, "-p", "Hello", "-n", 5, "--json").stdout.splitlines()[-1])["text"]
    assert result.stdout == f"Hello{text}\n"
    assert "no placement" in result.stderr
    assert "no predictors" in result.stderr


def test_predictors_and_placement_are_found(workspace: Workspace, run: Callable[..., Result]) -> None:
    """Files of the earlier commands lying unused, silently."""
    record = read_model(workspace)
    write_predictors(workspace)
    gpuidx.write(workspace.gpuidx(record), half_index(record))
    result = run(pi_run, workspace.path, "-p", "Hello", "-n", 3, "--device", "cpu", "--json")
    answer = json.loads(result.stdout.splitlines()[-1])
    assert (answer["mode"], answer["gpu_neuron_share"]) == ("predicted", 0.5)
    assert "both tiers are on the CPU" in result.stderr
    assert "states no model fingerprint" in result.stderr, "a foreign placement is announced"


def test_the_context_ends_the_answer(workspace: Workspace, run: Callable[..., Result]) -> None:
    """A write beyond the cache, or an answer that stops without a word."""
    result = run(pi_run, workspace.path, "-p", "Hello there", "-n", 50, "--ctx", 8, "--json")
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["prompt_tokens"] + answer["generated_tokens"] == 8
    assert "the context of 8 tokens ends the answer" in result.stderr


def test_at_the_models_limit_no_larger_context_is_advised(workspace: Workspace, run: Callable[..., Result]) -> None:
    """Advice that the next call refuses."""
    errors = run(pi_run, workspace.path, "-p", "Hello", "-n", 500).stderr
    assert "the context of 128 tokens ends the answer" in errors
    assert "raise --ctx" not in errors


def test_generation_stops_at_the_end_token(workspace: Workspace, run_json: Callable[..., dict[str, Any]]) -> None:
    """Text that runs on behind the model's end of text."""
    ids = run_json(pi_run, workspace.path, "-p", "Hello", "-n", 12)["token_ids"]
    model = Path(read_model(workspace).model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[3], 4095]}))
    assert run_json(pi_run, workspace.path, "-p", "Hello", "-n", 12)["token_ids"] == ids[: ids.index(ids[3]) + 1]


@pytest.mark.parametrize("name", ["a b", "a;b", "été"])
def test_any_directory_name_works(tmp_path: Path, name: str, run_json: Callable[..., dict[str, Any]]) -> None:
    """Paths that break, or are executed, because of a space, a shell sign or an accent."""
    workspace = make_workspace(tmp_path, "opt", name)
    record = read_model(workspace)
    gpuidx.write(workspace.gpuidx(record), half_index(record))
    assert run_json(pi_run, workspace.path, "-p", "Hello", "-n", 2)["gpu_neuron_share"] == 0.5


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["-p", "Hello " * 200], "leaves no room for an answer: shorten the prompt"),
        (["-p", "Hello", "--ctx", 4096], "beyond the model's 128 positions: choose a smaller one"),
        (["-p", "Hello", "--mode", "predicted"], "no predictors for --mode predicted: run pi-train-predictor"),
        (["-p", "Hello", "--gpuidx", "nowhere.gpuidx"], "nowhere.gpuidx"),
        (["-p", "Hello", "--device", "cuda:9"], "use --device cpu"),
        (["-p", "Hello", "--device", "tpu"], "is not a"),
        (["-p", "Hello", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_refusals(workspace: Workspace, refuses: Refuses, options: list[object], sentence: str) -> None:
    """A traceback, or a run that goes on without what was asked for."""
    assert sentence in refuses(pi_run, workspace.path, *options)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-p", "a", "-n", 0],
        ["-p", "a", "-n", "x"],
        ["-p", "a", "--temperature", "nan"],
        ["-p", "a", "--temperature", -1],
        ["-p", "a", "--top-p", 0],
        ["-p", "a", "--top-p", 1.5],
        ["-p", "a", "--mode", "fast"],
        ["-p", "a", "--threads", 0],
        ["-p", "a", "--threads", 10**5],
        ["-p", "a", "--seed", 2**64],
        ["-p", "a\udcff"],
        ["-p", "a", "--ctx", 1],
    ],
)
def test_usage_errors(workspace: Workspace, run: Callable[..., Result], options: list[object]) -> None:
    """A nonsensical option accepted."""
    result = run(pi_run, workspace.path, *options)
    assert result.exit_code == 2, result.output


def test_no_workspace(tmp_path: Path, refuses: Refuses) -> None:
    """A missing or empty folder reported as a Python error."""
    assert "run pi-profile" in refuses(pi_run, tmp_path / "nowhere", "-p", "a")
    assert "run pi-profile" in refuses(pi_run, tmp_path, "-p", "a")


def test_an_empty_prompt_is_refused_where_the_tokenizer_adds_nothing(tmp_path: Path, refuses: Refuses) -> None:
    """An index error on a prompt of no token."""
    workspace = make_workspace(tmp_path, "llama", "tiny")
    model = Path(read_model(workspace).model)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "the prompt is empty" in refuses(pi_run, workspace.path, "-p", "")


def test_files_of_another_model_are_refused(workspace: Workspace, tmp_path: Path, refuses: Refuses) -> None:
    """Weights, predictors or a placement of a model with the same shapes taken for this one's."""
    other = make_workspace(tmp_path, "llama", "other", seed=1)
    foreign = read_model(other).fingerprint
    assert "are not those" in refuses(pi_run, workspace.path, "-p", "a", "--model", tmp_path / "other")
    write_predictors(workspace, foreign)
    assert "belongs to another model" in refuses(pi_run, workspace.path, "-p", "a")
    shutil.rmtree(workspace.predictor)
    record, path = read_model(workspace), tmp_path / "x.gpuidx"
    gpuidx.write(path, half_index(record, fingerprint=foreign, **placement_facts()))
    assert "belongs to another model" in refuses(pi_run, workspace.path, "-p", "a", "--gpuidx", path)


def test_the_context_is_the_placements(workspace: Workspace, run: Callable[..., Result], tmp_path: Path) -> None:
    """A KV cache of another size than the one that was budgeted."""
    record, path = read_model(workspace), tmp_path / "x.gpuidx"
    gpuidx.write(path, half_index(record, fingerprint=record.fingerprint, **placement_facts()))
    result = run(pi_run, workspace.path, "-p", "a", "-n", 50, "--gpuidx", path)
    assert "the context of 16 tokens" in result.stderr


@pytest.mark.parametrize("asked", [[], ["--mode", "dense"]])
def test_a_silu_model_runs_dense_and_says_why(tmp_path: Path, run: Callable[..., Result], asked: list[str]) -> None:
    """A slow run that nobody can explain."""
    workspace = make_workspace(tmp_path, "llama", "silu", hidden_act="silu")
    result = run(pi_run, workspace.path, "-p", "a", "-n", 3, "--json", *asked)
    assert json.loads(result.stdout.splitlines()[-1])["mode"] == "dense"
    assert "the model's activation is silu, so no neuron falls silent or can be skipped: running in mode dense" in (
        result.stderr
    )


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_modes_that_skip_neurons_are_refused_for_a_silu_model(tmp_path: Path, refuses: Refuses, mode: str) -> None:
    """Neurons skipped in a model that has no silent ones."""
    workspace = make_workspace(tmp_path, "llama", "silu", hidden_act="silu")
    assert f"no neuron falls silent that --mode {mode} could skip: use --mode dense" in refuses(
        pi_run, workspace.path, "-p", "a", "--mode", mode
    )


def test_an_activation_that_is_not_implemented_is_refused(tmp_path: Path, refuses: Refuses) -> None:
    """The nearest known activation in its place."""
    workspace = make_workspace(tmp_path, "llama", "squared", hidden_act="relu2")
    assert "'relu2' on gated neurons, and only relu, fatrelu, drelu, silu, gelu" in refuses(
        pi_run, workspace.path, "-p", "a"
    )


def test_interrupt_ends_in_one_sentence(workspace: Workspace) -> None:
    """A traceback on Ctrl-C."""
    start = "from pi_toolkit.runtime.cli import main; main()"  # what the console script does
    command = [sys.executable, "-c", start, str(workspace.path), "-p", "Hello", "-n", "100000"]
    record = read_model(workspace)
    (Path(record.model) / "generation_config.json").write_text("{}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == b"Hello"
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read().decode()
        process.stdout.read()
    assert "Traceback" not in errors
    assert process.returncode in (0, 1), errors
