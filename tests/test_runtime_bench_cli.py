"""``pi-bench`` as people call it: who takes part, what its JSON holds, and every refusal."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from pi_toolkit.profiler.errors import BenchmarkError
from pi_toolkit.profiler.workspace import Workspace, read_model
from pi_toolkit.runtime import bench_setup
from pi_toolkit.runtime.bench_cli import main as pi_bench
from pi_toolkit.runtime.bench_contenders import LlamaCpp, LlamaCppRecipe, Own, OwnRecipe, Task
from pi_toolkit.runtime.convert_cli import main as pi_convert
from test_runtime_cli import make_workspace, write_predictors
from tiny_models import BAMBOO, PROSPARSE

Refuses = Callable[..., str]
CONTENDER_KEYS = """name mode dtype decode_tokens_per_second prompt_tokens_per_second min max bytes_per_token
bandwidth_share""".split()
QUICK = ("-p", "4,9", "-n", 3, "--runs", 2, "--threads", 1)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    workspace = make_workspace(tmp_path_factory.mktemp("bench"), "llama", "tiny")
    write_predictors(workspace)
    return workspace


@pytest.fixture(autouse=True)
def small_read_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_setup, "READ_BYTES", 2**22)


def test_everybody_in_turn(workspace: Workspace, tmp_path: Path, run_json: Callable[..., dict[str, Any]]) -> None:
    """A contender left out, a promised key missing, or figures that are no numbers."""
    pytest.importorskip("xllamacpp")
    dense = tmp_path / "dense.gguf"
    run_json(pi_convert, workspace.path, "-o", dense)
    hf = read_model(workspace).model
    against = ("--against", f"llama.cpp:{dense}", "--against", f"transformers:{hf}")
    report = run_json(pi_bench, workspace.path, *against, *QUICK)
    rows = {row["name"]: row for row in report["contenders"]}
    modes = ("dense", "exact", "predicted")
    assert list(rows) == [
        *(f"{mode} float32" for mode in modes),
        "llama.cpp:dense.gguf float16",
        "transformers:tiny bfloat16",
    ]
    for row in rows.values():
        assert set(CONTENDER_KEYS) <= set(row)
        assert row["min"] <= row["decode_tokens_per_second"] <= row["max"]
        assert row["prompt_tokens_per_second"] > 0 and set(row["prompts"]) == {"4", "9"}
        assert row["bandwidth_share"] > 0 and len(row["decode_runs"]) == 2
    read = [rows[f"{mode} float32"]["bytes_per_token"] for mode in modes]
    neurons = [rows[f"{mode} float32"]["touched"]["neuron_bytes"] for mode in modes]
    assert read[0] > read[1] and neurons[0] > neurons[1] > neurons[2]
    # Half the bytes of dense float32, but for norms, which stay float32, and the cache.
    assert 2 * rows["llama.cpp:dense.gguf float16"]["bytes_per_token"] == pytest.approx(read[0], rel=0.01)
    assert 2 * rows["transformers:tiny bfloat16"]["bytes_per_token"] == pytest.approx(read[0], rel=0.01)
    assert {row["against"] for row in report["ratios"]} == {
        "dense float32", "llama.cpp:dense.gguf float16", "transformers:tiny bfloat16",
    }  # fmt: skip
    assert report["agreement"][0] == {"name": "exact float32", "against": "dense float32", "equal": 4, "tokens": 4}
    conditions = report["conditions"]
    assert {"xllamacpp", "transformers", "torch", "powerinfer-toolkit"} <= set(conditions["versions"])
    assert conditions["threads"] == 1 and conditions["file_bytes"] == {"dense.gguf": dense.stat().st_size}
    assert set(conditions["instruction_sets"]) == {"tiny-pi (auto)", "llama.cpp:dense.gguf"}


def test_a_quantised_file_at_made_up_densities(
    workspace: Workspace, tmp_path: Path, run: Callable[..., Result]
) -> None:
    """A sweep whose densities are all the same, or a speed that is taken for a model's."""
    file = tmp_path / "tiny.powerinfer.gguf"
    assert run(pi_convert, workspace.path, "-o", file, "--quantize", "q4_0").exit_code == 0
    result = run(pi_bench, file, *QUICK, "--density", "0.05,0.4", "--mode", "dense,predicted", "--json")
    assert result.exit_code == 0, result.stderr
    assert "densities are made up" in result.stdout
    dense, low, high = json.loads(result.stdout.splitlines()[-1])["contenders"]
    assert (dense["name"], dense["density"]) == ("dense q4_0", None)
    assert (low["name"], high["name"]) == ("predicted q4_0 at 5 %", "predicted q4_0 at 40 %")
    assert low["candidate_share"] < 0.1 < high["candidate_share"]
    assert low["bytes_per_token"] < high["bytes_per_token"] < dense["bytes_per_token"]


@pytest.mark.parametrize("family", [BAMBOO, PROSPARSE])
def test_other_activations(family: str, tmp_path: Path, run_json: Callable[..., dict[str, Any]]) -> None:
    """A dReLU or FATReLU model that is refused, or whose neurons are counted as ReLU's."""
    workspace = make_workspace(tmp_path, family, "tiny")
    write_predictors(workspace)
    report = run_json(pi_bench, workspace.path, "-p", 4, "-n", 3, "--runs", 1, "--threads", 1)
    dense, exact, predicted = report["contenders"]
    assert dense["touched"]["firing_share"] == exact["touched"]["firing_share"] < 0.45
    read = [row["touched"]["neuron_bytes"] for row in (dense, exact, predicted)]
    assert read[0] > read[1] > read[2]
    assert report["agreement"][0]["equal"] == report["agreement"][0]["tokens"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["-p", 200, "-n", 2], "need 203 positions, more than the model's 128 positions: lower -p or -n"),
        (["-p", 8, "-n", 20, "--ctx", 16], "more than the context of 16: lower -p or -n, or raise --ctx"),
        (["-p", 8, "--ctx", 4096], "beyond the model's 128 positions: choose a smaller one"),
        (["-p", 8, "-n", 2, "--against", "llama.cpp:nowhere.gguf"], "write a dense one with pi-convert"),
        (["-p", 8, "-n", 2, "--against", "transformers:/nowhere/at/all"], "give a Hugging Face directory"),
        (["-p", 8, "-n", 2, "--text", "/nowhere/at/all"], "/nowhere/at/all"),
        (["-p", 8, "-n", 2, "--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_refusals(workspace: Workspace, refuses: Refuses, options: list[object], sentence: str) -> None:
    """A traceback, or a comparison of less than was asked for."""
    assert sentence in refuses(pi_bench, workspace.path, *options)


def test_predictors_that_are_not_there(tmp_path: Path, refuses: Refuses) -> None:
    """Mode predicted timed as something else."""
    bare = make_workspace(tmp_path, "opt", "bare")
    assert "no predictors for --mode predicted" in refuses(pi_bench, bare.path, "--mode", "predicted", *QUICK)


def test_a_baseline_of_another_model(workspace: Workspace, tmp_path: Path, refuses: Refuses, run: Any) -> None:
    """A ratio between two models."""
    other = make_workspace(tmp_path, "llama", "other", intermediate_size=128)
    assert run(pi_convert, other.path, "-o", tmp_path / "other.gguf").exit_code == 0
    options = ["--against", f"llama.cpp:{tmp_path / 'other.gguf'}", *QUICK]
    assert "a model of other sizes" in refuses(pi_bench, workspace.path, *options)


def test_without_xllamacpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import error where one sentence says what to install."""
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(BenchmarkError, match="run pip install xllamacpp"):
        LlamaCpp(LlamaCppRecipe(Path("x.gguf"), 16, 1))


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["w", "--mode", "fast"],
        ["w", "--mode", "dense,"],
        ["w", "--dtype", "int8"],
        ["w", "--against", "vllm:x"],
        ["w", "--against", "llama.cpp:"],
        ["w", "-p", "8,0"],
        ["w", "-p", "8,x"],
        ["w", "-n", 0],
        ["w", "--runs", 0],
        ["w", "--density", "0"],
        ["w", "--density", "nan"],
        ["w", "--density", "0.5,2"],
        ["w", "--machine", "-o", "x.toml"],
        ["w", "-o", "x.toml"],
    ],
)
def test_usage_errors(run: Callable[..., Result], options: list[object]) -> None:
    """A nonsensical option accepted."""
    result = run(pi_bench, *options)
    assert result.exit_code == 2, result.output


def test_prompts_have_their_length(workspace: Workspace) -> None:
    """A short text that makes a short prompt, which is then faster to read."""
    recipe = OwnRecipe(workspace.path, "float32", 64, 1, "cpu", with_predictors=False)
    own = recipe.open()
    assert isinstance(own, Own)
    whole = own.prompt("A few words.", 40)
    assert len(whole) == 40 and own.prompt("A few words.", 5) == whole[:5]
    with pytest.raises(BenchmarkError, match="give another with --text"):
        own.prompt(" ", 5)
    timing = own.time(Task(whole, 3, "dense"))
    assert len(timing.token_ids) == 4 and timing.prompt_seconds > 0 and timing.decode_seconds > 0


def test_help_leaves_torch_alone() -> None:
    """A slow ``--help``."""
    code = (
        "import sys; from pi_toolkit.runtime.bench_cli import main; main(['--help'], standalone_mode=False); "
        "sys.exit(bool({'torch', 'transformers', 'xllamacpp'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
