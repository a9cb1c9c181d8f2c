"""What pi-place refuses, in one sentence: options, counts, predictors and models that cannot be placed."""

from dataclasses import replace

import pytest
import torch

from pi_toolkit.predictor_training import predictor_file
from solver_cases import make_workspace, tiny_shape, zipf_counts
from test_solver_cli import SHAPE, pi_place, refused


@pytest.fixture
def workspace(tmp_path):
    return make_workspace(tmp_path / "w", SHAPE, zipf_counts(SHAPE.ffn_sizes))


@pytest.mark.parametrize("vram", ["nan", "0", "-1", "inf", "much", "1e300"])
def test_bad_vram_is_a_usage_error(workspace, vram):
    refused(pi_place(workspace.path, "--vram", vram), "--vram", exit_code=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--vram", 8, "--ctx", 65],
        ["--vram", 8, "--ctx", 0],
        ["--vram", 8, "--batch-size", 0],
        ["--vram", 8, "--dtype", "q3"],
        ["--vram", 8, "--reserve", "nan"],
        ["--vram", 8, "--sync-seconds", "-1"],
        ["--vram", 8, "--time-limit", 0],
    ],
)
def test_other_usage_errors(workspace, arguments):
    refused(pi_place(workspace.path, *arguments), "Usage", exit_code=2)


def test_context_beyond_the_model_says_what_is_possible(workspace):
    refused(pi_place(workspace.path, "--vram", 8, "--ctx", 65), "beyond the model's 64 positions: give at most 64", 2)


def test_unknown_hardware_is_refused(workspace):
    refused(pi_place(workspace.path, "--vram", 8, "--hardware", "rtx9999"), "neither a hardware file nor a preset")


def test_missing_workspace_and_missing_model_json(tmp_path):
    refused(pi_place(tmp_path / "nowhere", "--vram", 8), "run pi-profile")
    refused(pi_place(tmp_path, "--vram", 8), "run pi-profile")


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        (torch.full((128,), float("nan")), "not finite"),
        (torch.full((128,), float("inf")), "not finite"),
        (torch.full((128,), -1), "negative"),
        (torch.zeros(127, dtype=torch.int64), "127 neurons"),
        (torch.zeros(2, 64), "one numeric vector"),
        ({"counts": torch.zeros(128)}, "one numeric vector"),
    ],
)
def test_bad_counts_are_refused(workspace, counts, sentence):
    """NaN sorts anywhere, and a negative count makes the coldest neuron the hottest of a float key."""
    torch.save(counts, workspace.activation / "activation_0.pt")
    refused(pi_place(workspace.path, "--vram", 8), sentence)
    assert not (workspace.path / "tiny.gpuidx").exists()


def test_a_stray_file_beside_the_counts_is_refused(workspace):
    (workspace.activation / "activation_3.pt.bak").write_bytes(b"")
    refused(pi_place(workspace.path, "--vram", 8), "activation_3.pt.bak")


def test_a_missing_layer_is_refused(workspace):
    (workspace.activation / "activation_1.pt").unlink()
    refused(pi_place(workspace.path, "--vram", 8), "lacks 'activation_1.pt'")


def test_counts_of_another_model_are_refused(tmp_path):
    made = make_workspace(tmp_path / "w", SHAPE, zipf_counts(SHAPE.ffn_sizes), fingerprint="cd" * 32)
    refused(pi_place(made.path, "--vram", 8), "another model")


def test_counts_without_a_fingerprint_are_announced(tmp_path):
    made = make_workspace(tmp_path / "w", SHAPE, zipf_counts(SHAPE.ffn_sizes))
    (made.activation / "profile.json").unlink()
    result = pi_place(made.path, "--vram", 8)
    assert result.exit_code == 0 and "no model fingerprint" in result.stderr


def test_predictors_without_a_fingerprint_are_announced(workspace):
    fc1, fc2 = (torch.ones(32, 32),) * 2, tuple(torch.ones(n, 32) for n in SHAPE.ffn_sizes)
    predictor_file.write(workspace.predictor, predictor_file.PredictorSet.of_mlps(fc1, fc2, 1.0, None, None), {})
    (workspace.predictor / "config.json").unlink()
    notes = pi_place(workspace.path, "--hardware", "cpu-only").stderr.splitlines()
    assert [line for line in notes if "fingerprint" in line] == [
        f"{str(workspace.predictor)!r} states no model fingerprint: it was checked by its shapes alone"
    ]


def test_a_file_in_place_of_the_predictors_is_refused(workspace):
    """It was taken for no predictors, and the GPU filled with neurons in their place."""
    workspace.predictor.touch()
    refused(pi_place(workspace.path, "--vram", 8), "predictor' is no directory: move it away")


def test_counts_of_another_width_are_refused(tmp_path):
    """Layers of equal number and other n_ff: PowerInfer's engine would accept them."""
    made = make_workspace(tmp_path / "w", SHAPE, zipf_counts(SHAPE.ffn_sizes))
    make_workspace(tmp_path / "other", tiny_shape((128, 128)), zipf_counts((128, 128)))
    made.model_json.write_bytes((tmp_path / "other" / "model.json").read_bytes())
    refused(pi_place(made.path, "--vram", 8), "counts 192 neurons")


def test_a_model_that_fits_nowhere_is_refused(tmp_path):
    """The sentence must name a way out."""
    shape = replace(tiny_shape((64,)), vocabulary_size=10**10)
    made = make_workspace(tmp_path / "w", shape, zipf_counts(shape.ffn_sizes))
    refused(pi_place(made.path, "--vram", 8), "use a smaller --dtype")
