"""``pi-place`` beyond its defaults: several GPUs, pins, explanations, other solvers, hostile surroundings."""

import errno
import json
import os
import resource
import subprocess
import sys

import cbcbox
import numpy as np
import pytest
from click.testing import CliRunner, Result

from pi_toolkit.profiler.hardware import GIB
from pi_toolkit.solver import cli, gpuidx
from pi_toolkit.solver.memory import unit_bytes
from solver_cases import FINGERPRINT, make_workspace, tiny_shape, zipf_counts

SHAPE = tiny_shape((1280, 1920))
UNITS = unit_bytes(SHAPE, "bfloat16", 64, 1)
# Attention and head, and a third of the neurons; free synchronisation, without which so small a model stays on the CPU.
BUDGET = sum(UNITS.attention) + UNITS.head + sum(SHAPE.ffn_sizes) * UNITS.neuron // 3
OPTIONS = ["--reserve", 0, "--sync-seconds", 0, "--hardware", "rtx4090-i9-13900k"]


@pytest.fixture
def workspace(tmp_path):
    return make_workspace(tmp_path / "tiny-pi", SHAPE, zipf_counts(SHAPE.ffn_sizes))


def gib(num_bytes: int) -> str:
    return repr(num_bytes / GIB)


def pi_place(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def placed(*arguments: object) -> tuple[dict, Result]:
    result = pi_place(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1]), result


@pytest.mark.parametrize("objective", ["latency", "firings"])
def test_objectives_are_compared(workspace, objective):
    """The comparison is the reason to believe that the placement is worth anything."""
    content, result = placed(workspace.path, "--vram", gib(BUDGET), *OPTIONS, "--objective", objective)
    line = next(line for line in result.stdout.splitlines() if line.startswith("predicted:"))
    assert [part.split()[-2 if "this" in part else -1] for part in line.split("/")[:4]]
    assert [word for word in ("random", "layer-wise", "paper", "this", "tokens/s") if word not in line] == []
    assert content["objective"] == objective
    rivals = content["rivals_tokens_per_second"]
    if objective == "latency":
        assert content["predicted_tokens_per_second"] >= max(rivals.values()) * (1 - 1e-12)
        assert content["objective_value"] == pytest.approx(content["predicted_seconds_per_token"])
    else:
        assert content["predicted_tokens_per_second"] == pytest.approx(rivals["paper"])
    index = gpuidx.read(workspace.path / "tiny.gpuidx", SHAPE.ffn_sizes, FINGERPRINT)
    assert (index.objective, index.objective_value) == (objective, content["objective_value"])


def test_explanation_accounts_for_every_byte(workspace):
    """A budget whose parts do not sum to it hides what was forgotten."""
    _, result = placed(workspace.path, "--vram", gib(BUDGET), "--explain", *OPTIONS)
    text = result.stdout
    for name in ("attention", "KV cache", "predictors", "output head", "neurons", "embedding", "CUDA context"):
        assert f"{name} " in text
    assert "prompt scratch" in text and "margin" in text and "free" in text
    for column in ("T_gpu", "T_cpu", "C_l", "y_l", "firings on GPU", "layer µs"):
        assert column in text
    assert "ms with a full KV cache" in text


def test_two_gpus(workspace):
    half = gib(BUDGET // 2)
    content, result = placed(workspace.path, "--vram", f"{half},{half}", *OPTIONS)
    assert len(content["gpus"]) == 2 and all(gpu["bytes"] <= gpu["budget_bytes"] for gpu in content["gpus"])
    index = gpuidx.read(workspace.path / "tiny.gpuidx", SHAPE.ffn_sizes, FINGERPRINT)
    assert index.gpu_budgets == tuple(gpu["budget_bytes"] for gpu in content["gpus"])
    for gpu, said in enumerate(content["gpus"]):
        assert said["neurons"] == [int((layer == gpu).sum()) for layer in index.devices.neurons]
    on_any = [np.flatnonzero(layer >= 0).tolist() for layer in index.devices.neurons]
    assert on_any == [ids.tolist() for ids in index.gpu_neurons]
    assert "GPU 1 budget" in result.stdout


def test_pins_limits_and_thresholds(workspace):
    content, _ = placed(workspace.path, "--vram", gib(BUDGET), *OPTIONS, "--pin", "0=100", "--pin", "1=0")
    assert content["gpu_neurons"] == [100, 0]
    content, _ = placed(workspace.path, "--vram", gib(BUDGET), *OPTIONS, "--min-gpu-neurons", 900)
    assert all(neurons == 0 or neurons >= 900 for neurons in content["gpu_neurons"])
    cpu = content["cpu_bytes"] + 100
    content, _ = placed(workspace.path, "--vram", gib(BUDGET), *OPTIONS, "--max-cpu-gib", gib(cpu))
    assert content["cpu_bytes"] <= cpu


@pytest.mark.parametrize(
    ("options", "sentence", "code"),
    [
        (["--pin", "3=9000"], "layer 3 is pinned and the model has layers 0 … 1", 1),
        (["--pin", "1=9000"], "layer 1 is pinned to 9000 neurons of which 1920 exist", 1),
        (["--pin", "1"], "no LAYER=COUNT", 2),
        (["--pin", "x=1"], "no LAYER=COUNT", 2),
        (["--max-cpu-gib", "1e-9"], "are beyond the CPU's memory", 1),
        (["--vram", "1,x"], "'x' is not a number", 2),
        (["--vram", "1,,1"], "'' is not a number", 2),
        (["--gap", "-1"], "--gap", 2),
        (["--sync-seconds", "1e300"], "at most 1e+09", 2),
        (["--group-size", "0"], "--group-size", 2),
        (["--solver", "gurobi"], "--solver", 2),
    ],
)
def test_impossible_options_are_explained(workspace, options, sentence, code):
    result = pi_place(workspace.path, "--vram", gib(BUDGET), *OPTIONS, *options)
    assert result.exit_code == code and sentence in result.output and "Traceback" not in result.output, result.output
    assert not (workspace.path / "tiny.gpuidx").exists()


def test_groups_that_would_be_too_many_are_coarsened(tmp_path):
    """Hours of solving, or the end of the memory."""
    shape = tiny_shape((60_000, 60_000))
    made = make_workspace(tmp_path / "w", shape, zipf_counts(shape.ffn_sizes))
    content, result = placed(made.path, "--vram", 0.001, *OPTIONS, "--group-size", 1, "--solver", "greedy")
    assert content["group_size"] == 2 and "groups of 1 neurons would be more than 100,000, so 2" in result.stderr


@pytest.mark.parametrize("solver", ["cbc", "highs", "greedy"])
@pytest.mark.parametrize("objective", ["latency", "firings"])
def test_solvers(workspace, solver, objective):
    content, result = placed(
        workspace.path, "--vram", gib(BUDGET), *OPTIONS, "--solver", solver, "--objective", objective
    )
    assert content["status"] == ("greedy" if solver == "greedy" else "optimal") and content["gap"] <= 0.05
    assert "instead" not in result.stderr and "HiGHS" not in result.stdout


@pytest.mark.parametrize("objective", ["latency", "firings"])
def test_synchronisation_that_nothing_is_worth(workspace, objective):
    """Numbers beyond the solvers' were a traceback."""
    options = ["--vram", gib(BUDGET), *OPTIONS, "--objective", objective, "--sync-seconds", "1e9"]
    content, result = placed(workspace.path, *options)
    assert content["gpu_neurons"] == [0, 0] and content["status"] == "optimal" and "instead" not in result.stderr


def fake_cbc(monkeypatch, tmp_path, body: str) -> None:
    script = tmp_path / "cbc"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(cbcbox, "cbc_bin_path", lambda: str(script))


@pytest.mark.parametrize("objective", ["latency", "firings"])
@pytest.mark.parametrize("body", ["kill -9 $$", "exit 3", "exit 0"])
def test_a_killed_cbc_is_no_optimum(workspace, monkeypatch, tmp_path, body, objective):
    """The next solver answers, which is said; what it answers is checked."""
    fake_cbc(monkeypatch, tmp_path, body)
    content, result = placed(workspace.path, "--vram", gib(BUDGET), *OPTIONS, "--objective", objective)
    assert content["status"] == "optimal"
    assert "HiGHS is used instead: CBC cannot be used (it ended without an answer): reinstall" in result.stderr


@pytest.mark.parametrize("objective", ["latency", "firings"])
def test_a_millisecond_is_no_proof(workspace, objective):
    content, result = placed(
        workspace.path, "--vram", gib(BUDGET), *OPTIONS, "--objective", objective, "--time-limit", 0.001
    )
    assert content["status"] in ("greedy", "feasible") or content["gap"] <= 1e-4
    assert content["status"] != "greedy" or "the greedy placement is used instead" in result.stderr
    said = f": another may be up to {100 * content['gap']:.2g} % better"
    assert (said in result.stdout) == (content["status"] != "optimal")


def test_a_full_folder_of_temporary_files_is_named(workspace, monkeypatch):
    """To install CBC again makes no room for its files."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    _, result = placed(workspace.path, "--vram", gib(BUDGET), *OPTIONS)
    assert "HiGHS is used instead: CBC cannot be used (no room for its files in" in result.stderr
    assert "name another folder in TMPDIR" in result.stderr and "pip install" not in result.stderr


def command(workspace, *arguments: object) -> list[str]:
    module = [sys.executable, "-m", "pi_toolkit.solver.cli"]
    return [*module, str(workspace), "--vram", gib(BUDGET), *map(str, [*OPTIONS, *arguments])]


def test_surroundings_do_not_matter(tmp_path):
    """A current directory that cannot be written, spaces and accents in every path; PuLP splits CBC's command at spaces."""
    made = make_workspace(tmp_path / "mön mödel pi", SHAPE, zipf_counts(SHAPE.ffn_sizes))
    temporary, here = tmp_path / "tmp é dir", tmp_path / "read only"
    temporary.mkdir()
    here.mkdir(mode=0o555)
    environment = os.environ | {"TMPDIR": str(temporary)}
    code = "from pi_toolkit.solver.cli import main\nmain()"
    arguments = [sys.executable, "-c", code, *command(made.path, "--json")[3:]]
    runs = [
        subprocess.Popen(
            [*arguments, "-o", str(made.path / name)], cwd=here, env=environment, stdout=-1, stderr=-1, text=True
        )
        for name in ("a.gpuidx", "b.gpuidx")
    ]
    for run in runs:  # two at once
        out, error = run.communicate(timeout=120)
        assert run.returncode == 0, error
        assert json.loads(out.splitlines()[-1])["status"] == "optimal" and "instead" not in error
    assert (made.path / "a.gpuidx").read_bytes() == (made.path / "b.gpuidx").read_bytes()
    assert not list(temporary.iterdir()) and not list(here.iterdir())


def test_a_full_disk_is_one_sentence(workspace):
    """Files of at most 4 KiB stand in for it: CBC's input is cut off, and so is the placement."""
    code = "from pi_toolkit.solver.cli import main\nmain()"
    finished = subprocess.run(
        [sys.executable, "-c", code, *command(workspace.path)[3:]],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 1 and "Traceback" not in finished.stderr
    assert finished.stderr.splitlines()[-1].startswith("Error:") and "disk has room" in finished.stderr
    assert not (workspace.path / "tiny.gpuidx").exists()


def test_a_model_file_gets_blocks_of_256_beside_it(tmp_path):
    """PowerInfer's engine reads the file of this name, and its CUDA kernel drops rows beyond a multiple of 256."""
    from gguf_cases import WIDTH, source_of
    from pi_toolkit.profiler import activation_stats
    from pi_toolkit.profiler.gguf_types import TensorType
    from pi_toolkit.profiler.workspace import Workspace, read_model
    from pi_toolkit.runtime.model_gguf_export import export
    from tiny_models import save_family

    checkpoint = save_family(tmp_path / "model", "llama", intermediate_size=1152)
    file = tmp_path / "files" / "tiny.powerinfer.gguf"
    file.parent.mkdir()
    export(file, "PWRI", source_of(checkpoint), TensorType.F32)
    record = read_model(Workspace(file))
    counts = zipf_counts(record.shape.ffn_sizes)
    stats = activation_stats.ActivationStats(counts, record.fingerprint, 10**6)
    activation_stats.write(file.parent / "activation", stats)
    (file.parent / "activation" / "profile.json").unlink()  # as PowerInfer publishes them
    units = unit_bytes(record.shape, "float32", 128, 1, [WIDTH] * 3)
    budget = sum(units.attention) + sum(units.predictor) + units.head + 1300 * units.neuron
    for objective in ("latency", "firings"):
        content, _ = placed(file, "--vram", gib(budget), *OPTIONS, "--objective", objective)
        assert content["gpuidx"] == f"{file}.generated.gpuidx" and content["group_size"] == 256
        assert sum(content["gpu_neurons"]) == 1280 and all(n % 256 == 0 for n in content["gpu_neurons"])
        assert content["dtype"] == "float32"
