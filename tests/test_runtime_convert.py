"""``pi-convert``: from workspaces, directories and files, with what belongs beside a file, and back to the same text."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from gguf_cases import random_predictors, source_of
from pi_toolkit.predictor_training import predictor_file
from pi_toolkit.profiler.activation_stats import ActivationStats
from pi_toolkit.profiler.activation_stats import write as write_counts
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.cli import main as pi_profile
from pi_toolkit.profiler.gguf_container import TensorType
from pi_toolkit.profiler.model_gguf import GgufModel
from pi_toolkit.profiler.workspace import Workspace, describe, write_model
from pi_toolkit.runtime.cli import main as pi_run
from pi_toolkit.runtime.convert_cli import main as pi_convert
from pi_toolkit.runtime.model_gguf_export import export
from pi_toolkit.solver import gpuidx
from pi_toolkit.solver.cli import main as pi_place
from pi_toolkit.solver.gpuidx import GpuIndex
from tiny_models import save_family


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_family(tmp_path_factory.mktemp("model") / "tiny-llama", "llama", intermediate_size=128)


@pytest.fixture
def workspace(directory, tmp_path) -> Workspace:
    """A workspace with counts, predictors and a placement."""
    found = Workspace(tmp_path / "tiny-pi")
    checkpoint = Checkpoint(directory)
    record = describe(str(directory), None, checkpoint)
    write_model(found, record)
    counts = tuple(torch.randint(1, 900, (n,)).numpy() for n in record.shape.ffn_sizes)
    write_counts(found.activation, ActivationStats(counts, record.fingerprint, 1000, "x", 64, "float32"))
    predictor_file.write(found.predictor, random_predictors(checkpoint, record.fingerprint), {})
    config = json.loads((found.predictor / "config.json").read_text())
    del config["layers"]
    (found.predictor / "config.json").write_text(json.dumps(config))
    neurons = tuple(torch.arange(0, n, 2).int().numpy() for n in record.shape.ffn_sizes)
    gpuidx.write(found.gpuidx(record), GpuIndex(neurons, record.shape.ffn_sizes, 1000))
    return found


def text_of(run_json, model: Path | Workspace, *options: object) -> str:
    path = model.path if isinstance(model, Workspace) else model
    return run_json(pi_run, path, "-p", "The city", "-n", 12, "--device", "cpu", "--dtype", "float32", *options)["text"]


def test_a_workspace_becomes_a_file_that_runs_alone(run_json, workspace, tmp_path):
    """Predictors, threshold, tokenizer or placement left behind: another text, or none."""
    out = tmp_path / "elsewhere" / "tiny.powerinfer.gguf"
    result = run_json(pi_convert, workspace.path, "-o", out, "--quantize", "f32")
    assert result["kind"] == "powerinfer"
    assert result["sparse_threshold"] == 0.25
    assert result["bytes"] == out.stat().st_size
    assert Path(result["activation"]) == out.parent / "activation"
    assert Path(result["gpuidx"]) == out.with_name("tiny.powerinfer.gguf.generated.gpuidx")
    wanted = text_of(run_json, workspace)
    run = run_json(pi_run, out, "-p", "The city", "-n", 12, "--device", "cpu", "--dtype", "float32")
    assert run["text"] == wanted
    assert run["mode"] == "predicted"
    assert run["gpu_neuron_share"] == 0.5


def test_a_directory_with_predictors_and_counts(run_json, directory, workspace, tmp_path):
    """PowerInfer's own way of keeping things: no workspace."""
    out = tmp_path / "out" / "x.powerinfer.gguf"
    folders = ["--predictor", workspace.predictor, "--activation", workspace.activation]
    result = run_json(pi_convert, directory, *folders, "-o", out)
    assert result["type"] == "f16"
    assert sorted(path.name for path in (out.parent / "activation").glob("*.pt")) == [
        f"activation_{i}.pt" for i in range(3)
    ]
    assert GgufModel(out).fingerprint() == Checkpoint(directory).fingerprint()


def test_a_dense_file_runs_to_the_text_of_the_directory(run_json, directory, workspace, tmp_path):
    out = tmp_path / "x.gguf"
    result = run_json(pi_convert, directory, "-o", out, "--quantize", "f32")
    assert (result["kind"], result["sparse_threshold"], result["activation"]) == ("dense", None, None)
    assert text_of(run_json, out, "--mode", "dense") == text_of(run_json, workspace, "--mode", "dense")


def test_a_file_becomes_another_type(run_json, workspace, tmp_path):
    """Quantising afterwards, as PowerInfer's quantize does, gives the same bytes as at once."""
    at_once, first, then = (tmp_path / name / "x.powerinfer.gguf" for name in "abc")
    run_json(pi_convert, workspace.path, "-o", at_once, "--quantize", "q4_0")
    run_json(pi_convert, workspace.path, "-o", first, "--quantize", "f32")
    result = run_json(pi_convert, first, "-o", then, "--quantize", "q4_0")
    assert Path(result["activation"]).is_dir()
    assert Path(result["gpuidx"]).is_file()
    one, other = GgufModel(at_once).file, GgufModel(then).file
    assert one.tensors == other.tensors
    for name in one.tensors:
        assert one.data(name).tobytes() == other.data(name).tobytes(), name
    assert run_json(pi_convert, then, "-o", tmp_path / "d" / "x.powerinfer.gguf")["type"] == "q4_0"


def test_same_source_same_bytes(run_json, workspace, tmp_path):
    """A file that differs from run to run cannot be compared."""
    for name in ("a", "b"):
        run_json(pi_convert, workspace.path, "-o", tmp_path / name / "x.powerinfer.gguf", "--quantize", "q8_0")
    assert (tmp_path / "a/x.powerinfer.gguf").read_bytes() == (tmp_path / "b/x.powerinfer.gguf").read_bytes()


def test_into_the_workspace_itself(run_json, workspace):
    """The counts are already beside the file; copying a folder onto itself would lose it."""
    result = run_json(pi_convert, workspace.path, "-o", workspace.path / "x.powerinfer.gguf")
    assert result["activation"] is None
    assert (workspace.activation / "profile.json").exists()


def test_a_file_can_be_placed(run_json, workspace, tmp_path):
    """The counts beside a file are for its placement."""
    out = tmp_path / "out" / "x.powerinfer.gguf"
    run_json(pi_convert, workspace.path, "-o", out)
    options = ["--vram", "0.001", "--reserve", "0", "--dtype", "float32"]
    result = run_json(pi_place, out, *options)
    in_workspace = run_json(pi_place, workspace.path, *options)
    of_this_run = {"gpuidx": 0, "seconds": 0, "group_size": 0}
    assert {**result, **of_this_run} == {**in_workspace, **of_this_run}
    assert (result["group_size"], in_workspace["group_size"]) == (256, 64)  # what PowerInfer's own engine needs
    assert result["gpuidx"] == str(out) + ".generated.gpuidx"
    assert text_of(run_json, out)


def test_a_dense_file_can_be_profiled(run_json, directory, tmp_path):
    """Firing counts of a model that exists as a file alone; the workspace then runs from it."""
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n\n".join(f"The city of {n} lies on the river {n * n}." for n in range(200)))
    out, place = tmp_path / "tiny.gguf", tmp_path / "ws"
    run_json(pi_convert, directory, "-o", out, "--quantize", "f32")
    options = ["--corpus", corpus, "--tokens", 500, "--window", 64, "--dtype", "float32", "--device", "cpu"]
    from_file = run_json(pi_profile, out, *options, "-o", place)
    from_directory = run_json(pi_profile, directory, *options, "-o", tmp_path / "other")
    assert from_file["firing_share"] == from_directory["firing_share"]
    assert json.loads((place / "model.json").read_text())["model"] == str(out)
    assert text_of(run_json, place) == text_of(run_json, tmp_path / "other")


@pytest.mark.parametrize("family", ["opt", "falcon-7b", "falcon-40b", "mistral"])
def test_files_of_every_family_can_be_profiled(family, run_json, tmp_path):
    """A transformers config or a fused matrix put together wrongly out of a file."""
    model = save_family(tmp_path / "hf", family)
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n\n".join(f"The city of {n} lies on the river {n * n}." for n in range(200)))
    export(tmp_path / "x.gguf", "GGUF", source_of(model), TensorType.F32)
    options = ["--corpus", corpus, "--tokens", 300, "--window", 64, "--dtype", "float32", "--device", "cpu"]
    shares = [
        run_json(pi_profile, path, *options, "-o", tmp_path / name)["firing_share"]
        for path, name in ((model, "a"), (tmp_path / "x.gguf", "b"))
    ]
    assert shares[0] == shares[1]


def test_llama_cpps_own_file_needs_its_activation(run, run_json, refuses, directory, tmp_path):
    """llama.cpp's format cannot say ReLU, so a converted ReLU model looks like a SiLU one."""
    from pi_toolkit.profiler import gguf_container

    run_json(pi_convert, directory, "-o", tmp_path / "ours.gguf")
    file = gguf_container.read(tmp_path / "ours.gguf", "GGUF")
    keys = [item for item in file.key_values.values() if not item.name.startswith("powerinfer_toolkit.")]
    foreign = tmp_path / "foreign.gguf"
    gguf_container.write(foreign, "GGUF", keys, list(file.tensors.values()), [file.data(name) for name in file.tensors])
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n\n".join(f"The city of {n} lies on the river." for n in range(100)))
    options = ["--corpus", corpus, "--tokens", 200, "--window", 64, "-o", tmp_path / "ws", "--device", "cpu"]
    assert "the model's activation is 'silu'" in refuses(pi_profile, foreign, *options)
    assert (
        "the model's activation is silu, which its file leaves unsaid"
        in run(pi_run, foreign, "-p", "x", "-n", 2).stderr
    )
    run_json(pi_profile, foreign, *options, "--activation", "relu")
    assert text_of(run_json, tmp_path / "ws")


REFUSALS = [
    ("x.bin", "ends in neither .powerinfer.gguf nor .gguf: name the output so", 2),
    (
        "x.powerinfer.gguf",
        "would have no predictors, which PowerInfer's engine needs: run pi-train-predictor or give",
        1,
    ),
]


@pytest.mark.parametrize(("name", "message", "exit_code"), REFUSALS)
def test_refusals(name, message, exit_code, refuses, directory, tmp_path):
    """A file that nothing can use, or a traceback."""
    assert message in refuses(pi_convert, directory, "-o", tmp_path / name, exit_code=exit_code)
    assert not (tmp_path / name).exists()


def test_predictors_in_a_dense_file_are_refused(refuses, directory, workspace, tmp_path):
    """Predictors that silently go nowhere."""
    message = refuses(pi_convert, directory, "--predictor", workspace.predictor, "-o", tmp_path / "x.gguf", exit_code=2)
    assert "a dense file holds no predictors" in message


def test_a_missing_source(refuses, tmp_path):
    message = refuses(pi_convert, tmp_path / "nothing.gguf", "-o", tmp_path / "x.gguf")
    assert "cannot be read (No such file or directory): check the path" in message


def test_predictors_and_counts_of_another_model_are_refused(refuses, directory, workspace, tmp_path):
    """The right shapes and the wrong neurons."""
    other = save_family(tmp_path / "other", "llama", seed=1, intermediate_size=128)
    out = tmp_path / "x.powerinfer.gguf"
    for option, folder in (("--predictor", workspace.predictor), ("--activation", workspace.activation)):
        assert "another model" in refuses(pi_convert, other, option, folder, "-o", out)
    assert not out.exists()


def test_counts_of_another_model_beside_the_output_are_kept(refuses, run_json, workspace, tmp_path):
    """Two models in one folder share the name activation/."""
    out = tmp_path / "shared" / "x.powerinfer.gguf"
    shutil.copytree(workspace.activation, out.parent / "activation")
    profile = out.parent / "activation" / "profile.json"
    content = json.loads(profile.read_text()) | {"fingerprint": "0" * 64}
    profile.write_text(json.dumps(content))
    message = refuses(pi_convert, workspace.path, "-o", out)
    assert "holds the counts of another model: choose another folder for the file with -o" in message
    assert not out.exists()
    assert json.loads(profile.read_text()) == content


def test_notes_about_other_programs(run, directory, workspace, tmp_path):
    """A file that PowerInfer's engine reads as garbage, without a word."""
    result = run(pi_convert, workspace.path, "-o", tmp_path / "x.powerinfer.gguf", "--quantize", "q8_0")
    assert "PowerInfer's engine computes F16 and Q4_0 alone: a file in Q8_0 is for this toolkit" in result.stderr
    result = run(pi_convert, directory, "-o", tmp_path / "x.gguf")
    assert "llama.cpp will run this file with SiLU in place of relu" in result.stderr
