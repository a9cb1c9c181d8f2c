"""``pi-place`` as its users meet it: what it writes and prints, and one sentence for every bad input."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from shlex import quote

import cbcbox
import numpy as np
import pulp
import pytest
import torch
from click.testing import CliRunner, Result

from pi_toolkit.predictor_training import predictor_file
from pi_toolkit.profiler.hardware import GIB
from pi_toolkit.solver import cli, gpuidx, placement, placement_report
from pi_toolkit.solver.memory import unit_bytes
from solver_cases import FINGERPRINT, make_workspace, tiny_shape, zipf_counts
from test_profiler_checkpoint import cached_on_the_hub
from tiny_models import save_family

SHAPE = tiny_shape((128, 192))
JSON_KEYS = (
    "gpu_budget_bytes gpu_bytes cpu_bytes gpu_neurons min_gpu_neurons objective objective_value bound gap status seconds "
    "gpuidx"
).split()


@pytest.fixture
def workspace(tmp_path):
    return make_workspace(tmp_path / "tiny-pi", SHAPE, zipf_counts(SHAPE.ffn_sizes))


def pi_place(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def refused(result: Result, sentence: str, exit_code: int = 1) -> None:
    assert result.exit_code == exit_code, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output and isinstance(result.exception, SystemExit)


def vram_for(shape, budget_bytes: int) -> float:
    """--vram that leaves exactly *budget_bytes* with --reserve 0."""
    return budget_bytes / GIB


def test_each_layer_gets_its_own_hot_neurons(tmp_path):
    """PowerInfer's exporter sorts file names as text, so layer 2 got the neurons of layer 10."""
    layers, neurons, hot = 12, 256, 64
    rng = np.random.default_rng(7)
    shape = tiny_shape((neurons,) * layers)
    hot_sets = [np.sort(rng.choice(neurons, hot, replace=False)) for _ in range(layers)]
    counts = tuple(np.zeros(neurons, dtype=np.int64) for _ in range(layers))
    for layer_counts, ids in zip(counts, hot_sets, strict=True):
        layer_counts[ids] = rng.integers(1, 1000, hot)
    made = make_workspace(tmp_path / "w", shape, counts)
    units = unit_bytes(shape, "float32", 64, 1)
    budget = sum(units.attention) + units.head + layers * hot * units.neuron
    result = pi_place(
        made.path, "--vram", vram_for(shape, budget), "--reserve", 0, "--sync-seconds", 0, "--dtype", "float32"
    )
    assert result.exit_code == 0, result.output
    index = gpuidx.read(made.path / "tiny.gpuidx", shape.ffn_sizes, FINGERPRINT)
    assert [ids.tolist() for ids in index.gpu_neurons] == [ids.tolist() for ids in hot_sets]
    assert index.vram_capacity_bytes == layers * hot * units.neuron


def test_json_is_the_last_line_and_agrees_with_the_file(workspace):
    vram = vram_for(SHAPE, 100_000)
    result = pi_place(workspace.path, "--vram", vram, "--reserve", 0, "--sync-seconds", 0, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout.splitlines()[-1])
    assert set(JSON_KEYS) <= set(content)
    index = gpuidx.read(Path(content["gpuidx"]), SHAPE.ffn_sizes, FINGERPRINT)
    assert content["gpu_neurons"] == [len(ids) for ids in index.gpu_neurons]
    assert content["gpu_bytes"] <= content["gpu_budget_bytes"] == 100_000
    assert (index.dtype, index.context, index.batch_size) == ("bfloat16", 64, 1)
    assert index.attention_on_gpu == (True, True) and index.predictor_on_gpu == (False, False)


def test_same_input_same_bytes_anywhere(tmp_path):
    """A path or a time in the file would make every placement look new."""
    contents = []
    for name in ("here", "there"):
        made = make_workspace(tmp_path / name, SHAPE, zipf_counts(SHAPE.ffn_sizes))
        assert pi_place(made.path, "--vram", 0.001, "--reserve", 0.0009).exit_code == 0
        contents.append((made.path / "tiny.gpuidx").read_bytes())
    assert contents[0] == contents[1]


def test_output_says_what_was_assumed(workspace):
    result = pi_place(workspace.path, "--vram", 10)
    assert "speeds are those of rtx2080ti-i7-12700k" in result.stderr
    assert "the weights are not on this disk" in result.stderr
    assert "T_sync" in result.stdout and "assumed" in result.stdout
    assert "reserve 768.0 MiB" in result.stdout and "gap" in result.stdout


def test_cpu_only_needs_no_vram_and_places_nothing(workspace):
    result = pi_place(workspace.path, "--hardware", "cpu-only", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout.splitlines()[-1])
    assert content["gpu_neurons"] == [0, 0] and content["min_gpu_neurons"] == [None, None]


def test_a_named_gpu_brings_its_own_memory(workspace):
    result = pi_place(workspace.path, "--hardware", "rtx4090-i9-13900k", "--json")
    assert json.loads(result.stdout.splitlines()[-1])["gpu_budget_bytes"] == int(23.25 * GIB)


def test_a_reserve_beyond_vram_is_announced(workspace):
    """0.5 GiB minus a reserve of 0.75 GiB must not become a negative budget."""
    result = pi_place(workspace.path, "--vram", 0.5, "--json")
    assert result.exit_code == 0 and "the reserve takes all" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["gpu_bytes"] == 0


def test_predictors_take_their_place(workspace):
    generator = torch.Generator().manual_seed(0)
    fc1 = tuple(torch.randn(32, 32, generator=generator) for _ in SHAPE.ffn_sizes)
    fc2 = tuple(torch.randn(n, 32, generator=generator) for n in SHAPE.ffn_sizes)
    predictors = predictor_file.PredictorSet.of_mlps(fc1, fc2, 1.0, FINGERPRINT, None)
    predictor_file.write(workspace.predictor, predictors, {})
    (workspace.predictor / "config.json").write_text('{"sparse_threshold": 1.0}')
    before = pi_place(workspace.path, "--hardware", "cpu-only", "--json")
    result = pi_place(workspace.path, "--vram", 10, "--objective", "firings", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["predictor_on_gpu"] == [True, True]
    cpu_bytes = json.loads(before.stdout.splitlines()[-1])["cpu_bytes"]
    units = unit_bytes(SHAPE, "bfloat16", 64, 1, [32, 32])
    assert cpu_bytes == sum(units.attention + units.predictor) + units.embedding + units.head + 320 * units.neuron


def test_greedy_is_announced(workspace, monkeypatch):
    monkeypatch.setattr(cbcbox, "cbc_bin_path", lambda: "/no/such/cbc")
    monkeypatch.setattr(pulp.HiGHS, "available", lambda _: False)
    result = pi_place(workspace.path, "--vram", 10, "--sync-seconds", 0, "--json")
    assert result.exit_code == 0 and "greedy placement is used" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["status"] == "greedy"


def test_unwritable_output_is_refused_before_solving(workspace, monkeypatch, tmp_path):
    """Minutes of solving must not end in 'permission denied'."""
    monkeypatch.setattr(placement, "place", lambda *_: pytest.fail("solved before looking at the output"))
    (tmp_path / "a file").write_bytes(b"")
    refused(pi_place(workspace.path, "--vram", 8, "-o", tmp_path / "a file" / "x.gpuidx"), "cannot write")
    refused(
        pi_place(workspace.path, "--vram", 8, "-o", tmp_path), "is a directory: move it away or choose another name"
    )
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("a file")
    for name in ("pipe", "link"):
        refused(pi_place(workspace.path, "--vram", 8, "-o", tmp_path / name), "is no regular file: move it away")
    refused(pi_place(workspace.path, "--vram", 8, "-o", "/dev/null"), "is no regular file")


def test_interruption_after_writing_says_so(workspace, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(placement_report, "print_placement", interrupt)
    refused(pi_place(workspace.path, "--vram", 8), "tiny.gpuidx' was already written, run the command again")
    assert (workspace.path / "tiny.gpuidx").exists()


def test_terminated_command_takes_its_solver_along(tmp_path):
    """CBC went on until its time limit, at full load, and its files stayed in the folder for temporary ones."""
    made = make_workspace(tmp_path / "w", SHAPE, zipf_counts(SHAPE.ffn_sizes))
    started, temporary = tmp_path / "started", tmp_path / "temporary"
    temporary.mkdir()
    solver = tmp_path / "cbc"
    solver.write_text(
        f"#!/bin/sh\ncd {quote(str(tmp_path))}\necho $$ > started.part && mv started.part started\nexec sleep 600\n"
    )
    solver.chmod(0o755)
    code = (
        f"import cbcbox\ncbcbox.cbc_bin_path = lambda: {str(solver)!r}\nfrom pi_toolkit.solver.cli import main\nmain()"
    )
    command = [sys.executable, "-c", code, str(made.path), "--vram", "8", "--sync-seconds", "0"]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        deadline = time.monotonic() + 300
        while not started.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        child = int(started.read_text())
        process.terminate()
        _, message = process.communicate(timeout=300)
    assert process.returncode == 1 and message.splitlines()[-1].startswith("Error: interrupted before the end"), message
    assert not list(temporary.iterdir())
    if sys.platform.startswith("linux"):
        state = Path(f"/proc/{child}/stat")
        while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not state.exists() or state.read_text().split()[2] == "Z", "the solver outlived its command"


@pytest.mark.parametrize("change", [{"vocabulary_size": 10**400}, {"ffn_sizes": [10**400, 128]}])
def test_absurd_sizes_are_one_sentence(workspace, change):
    """OverflowError came from the very sentence that says that the model does not fit."""
    content = json.loads(workspace.model_json.read_text())
    content["shape"] |= change
    workspace.model_json.write_text(json.dumps(content))
    refused(pi_place(workspace.path, "--vram", 8), "has a malformed")


@pytest.mark.parametrize("memory_gib", ["9e11", "9e8"])
def test_huge_memory_is_refused_or_fits_the_file(workspace, memory_gib, tmp_path):
    """struct.error: bytes beyond the 64 bits that the placement's file has for them."""
    text = (Path(cli.__file__).parents[1] / "profiler/hardware_presets/rtx4090-i9-13900k.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("memory_gib = 24", f"memory_gib = {memory_gib}"))
    result = pi_place(workspace.path, "--hardware", tmp_path / "mine.toml")
    assert result.exit_code == (1 if memory_gib == "9e11" else 0), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_downloaded_model_brings_its_dtype(tmp_path, monkeypatch):
    """A hub id was taken for weights that are elsewhere, and its sizes for bfloat16's."""
    from pi_toolkit.profiler.activation_stats import ActivationStats
    from pi_toolkit.profiler.activation_stats import write as write_counts
    from pi_toolkit.profiler.checkpoint import Checkpoint
    from pi_toolkit.profiler.workspace import Workspace, describe, write_model

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    original = save_family(tmp_path / "model", "opt")
    cached_on_the_hub(tmp_path / "cache", original, "someone/tiny")
    made, record = Workspace(tmp_path / "w"), describe("someone/tiny", None, Checkpoint(original))
    write_model(made, record)
    write_counts(made.activation, ActivationStats(zipf_counts(record.shape.ffn_sizes), record.fingerprint, 10**6))
    result = pi_place(made.path, "--vram", 8, "--json")
    assert "not on this disk" not in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["dtype"] == "float32"
    for file in (tmp_path / "cache").rglob("*.safetensors"):  # an interrupted download
        file.unlink()
    assert "not on this disk" in pi_place(made.path, "--vram", 8, "--json").stderr


def test_interruption_leaves_the_old_placement(workspace, monkeypatch):
    assert pi_place(workspace.path, "--vram", 8).exit_code == 0
    before = sorted((path, path.read_bytes()) for path in workspace.path.iterdir() if path.is_file())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(placement, "place", interrupt)
    refused(pi_place(workspace.path, "--vram", 4), "interrupted")
    assert sorted((path, path.read_bytes()) for path in workspace.path.iterdir() if path.is_file()) == before


@pytest.mark.parametrize("name", ["a b", "a;b", "été", "$(x)", "-dash"])
def test_folder_names_are_only_names(name, tmp_path):
    """PowerInfer passes the path to a shell."""
    made = make_workspace(tmp_path / name, SHAPE, zipf_counts(SHAPE.ffn_sizes))
    result = pi_place("--vram", 8, "--json", "--", made.path)
    assert result.exit_code == 0, result.output
    assert Path(json.loads(result.stdout.splitlines()[-1])["gpuidx"]).parent == made.path


def test_dtype_auto_is_the_checkpoints(tmp_path):
    """The model directory in the tests is stored in one dtype, and --model finds it."""
    from pi_toolkit.profiler.activation_stats import ActivationStats
    from pi_toolkit.profiler.activation_stats import write as write_counts
    from pi_toolkit.profiler.checkpoint import Checkpoint
    from pi_toolkit.profiler.workspace import Workspace, describe, write_model

    directory = Path(__file__).parent / "models" / "relu-llama-5m"
    checkpoint = Checkpoint(directory)
    made, record = Workspace(tmp_path / "w"), describe(str(directory), None, checkpoint)
    write_model(made, replace(record, model="not/here"))
    counts = zipf_counts(record.shape.ffn_sizes)
    write_counts(made.activation, ActivationStats(counts, record.fingerprint, 10**6))
    result = pi_place(made.path, "--vram", 8, "--model", directory, "--json")
    assert result.exit_code == 0, result.output
    stored = str(checkpoint.dtype()).removeprefix("torch.")
    assert json.loads(result.stdout.splitlines()[-1])["dtype"] == stored


def test_help_imports_neither_torch_nor_pulp():
    """--help that takes two seconds is not read."""
    code = (
        "import sys\n"
        "from pi_toolkit.solver.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "assert not {'torch', 'pulp', 'pandas'} & set(sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "pi-place opt-6.7b-pi --vram 24" in finished.stdout
