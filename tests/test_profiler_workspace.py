"""A workspace knows its model: model.json survives the disk, refuses damage, and finds the weights again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import CheckpointError, FingerprintMismatchError, ToolkitError, WorkspaceError
from pi_toolkit.profiler.workspace import (
    ModelRecord,
    Workspace,
    describe,
    model_name,
    open_checkpoint,
    read_model,
    refuse_other_model,
    write_model,
)
from tiny_models import CONFIGS, save_family


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_family(tmp_path / "a model", "llama")


@pytest.fixture
def workspace(tmp_path: Path, model: Path) -> Workspace:
    """A workspace that holds nothing but its model.json."""
    place = Workspace(tmp_path / "pi")
    write_model(place, describe(str(model), None, Checkpoint(model)))
    return place


def refusal(workspace: Workspace) -> str:
    with pytest.raises(ToolkitError) as caught:
        read_model(workspace)
    assert isinstance(caught.value, WorkspaceError)
    return caught.value.message


@pytest.mark.parametrize("family", CONFIGS)
def test_record_survives(tmp_path: Path, family: str) -> None:
    """Prevents a workspace from describing another model after it was written and read."""
    directory = save_family(tmp_path / "été; a", family)
    record = describe(str(directory), "main", Checkpoint(directory))
    write_model(Workspace(tmp_path / "new" / "pi"), record)
    assert read_model(Workspace(tmp_path / "new" / "pi")) == record
    assert record.name == "été; a"
    assert [path.name for path in (tmp_path / "new" / "pi").iterdir()] == ["model.json"]


def test_model_json_is_what_is_documented(workspace: Workspace, model: Path) -> None:
    """Prevents an undocumented change of the format."""
    content = json.loads(workspace.model_json.read_text("utf-8"))
    assert set(content) == {"format", "version", "name", "model", "revision", "fingerprint", "shape"}
    assert (content["format"], content["version"]) == ("powerinfer-toolkit/model", 1)
    assert (content["model"], content["revision"]) == (str(model), None)
    assert content["fingerprint"] == Checkpoint(model).fingerprint()


def test_paths_of_a_workspace(workspace: Workspace) -> None:
    """Prevents a layout that differs from PowerInfer's published repositories."""
    record = read_model(workspace)
    assert workspace.activation == workspace.path / "activation"
    assert workspace.predictor == workspace.path / "predictor"
    assert workspace.gpuidx(record) == workspace.path / "a model.gpuidx"


def test_relative_model_is_found_from_anywhere(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents the weights from being lost when the next command starts in another folder."""
    monkeypatch.chdir(tmp_path)
    record = describe(model.name, None, Checkpoint(Path(model.name)))
    monkeypatch.chdir("/")
    assert open_checkpoint(Workspace(tmp_path), record, None).fingerprint() == record.fingerprint


@pytest.mark.parametrize(
    ("model", "name"),
    [("facebook/opt-6.7b", "opt-6.7b"), ("/models/opt/", "opt"), ("opt", "opt"), ("./opt/.", "opt"), ("/", "model")],
)
def test_name_is_the_last_part(model: str, name: str) -> None:
    """Prevents workspaces called after a whole path."""
    assert model_name(model) == name


def test_name_of_the_current_and_the_parent_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents a workspace called ``-pi`` or ``..-pi``."""
    (tmp_path / "parent" / "child").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "parent" / "child")
    assert (model_name("."), model_name("..")) == ("child", "parent")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "other"}, "states format 'other'"),
        ({"version": 2}, "version 2, and this release reads 'powerinfer-toolkit/model' version 1"),
        ({"fingerprint": "abc"}, "is damaged"),
        ({"fingerprint": "AB" * 32}, "is damaged"),
        ({"fingerprint": None}, "is damaged"),
        ({"model": 7}, "is damaged"),
        ({"name": "a/b"}, "is damaged"),
        ({"name": "../b"}, "is damaged"),
        ({"name": ""}, "is damaged"),
        ({"name": 7}, "is damaged"),
        ({"revision": ["main"]}, "is damaged"),
        ({"name": "a\0b"}, "is damaged (name)"),
        ({"model": "a\0b"}, "is damaged (name)"),
        ({"name": "\ud800"}, "is damaged"),
        ({"shape": None}, "is damaged"),
        ({"shape": {}}, "is damaged"),
        ({"shape": "llama"}, "is damaged"),
    ],
)
def test_malformed_model_json_is_refused(workspace: Workspace, change: dict[str, Any], sentence: str) -> None:
    """Prevents a damaged workspace from failing later, or from writing outside itself through its name."""
    content = json.loads(workspace.model_json.read_text("utf-8"))
    workspace.model_json.write_text(json.dumps({**content, **change}), "utf-8")
    assert sentence in refusal(workspace)
    assert "model.json'" in refusal(workspace)


@pytest.mark.parametrize("key", ["name", "model", "revision", "fingerprint", "shape"])
def test_absent_key_is_named(workspace: Workspace, key: str) -> None:
    """Prevents KeyError."""
    content = json.loads(workspace.model_json.read_text("utf-8"))
    del content[key]
    workspace.model_json.write_text(json.dumps(content), "utf-8")
    assert f"is damaged ('{key}'): run pi-profile MODEL to make the workspace" in refusal(workspace)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_model_json_that_is_no_json_is_refused(workspace: Workspace, content: bytes) -> None:
    """Prevents a traceback from a damaged file."""
    workspace.model_json.write_bytes(content)
    assert "run pi-profile MODEL to make the workspace" in refusal(workspace)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 10**400) for key in ("vocabulary_size", "hidden_size", "max_positions", "ffn_sizes", "norm_epsilon")),
        ("vocabulary_size", 2**40 + 1),
    ],
)
def test_sizes_beyond_reason_are_refused(workspace: Workspace, key: str, value: int) -> None:
    """Prevents OverflowError where bytes become floating point, far from the file that is wrong."""
    content = json.loads(workspace.model_json.read_text("utf-8"))
    content["shape"][key] = [value] if key == "ffn_sizes" else value
    workspace.model_json.write_text(json.dumps(content), "utf-8")
    assert f"has a malformed {key}: run pi-profile again" in refusal(workspace)


def test_home_of_an_unknown_user_is_one_sentence(workspace: Workspace) -> None:
    """Prevents RuntimeError from a path that begins with ``~``."""
    for model in ("~nosuchuser", "~nosuchuser/model"):
        with pytest.raises(CheckpointError, match=r"no known user's home .*: give the path in full"):
            model_name(model)
        with pytest.raises(CheckpointError, match=r"no known user's home .*: give the path in full"):
            open_checkpoint(workspace, replace(read_model(workspace), model=model), None)


def test_missing_workspace_says_what_to_run(tmp_path: Path) -> None:
    """Prevents FileNotFoundError when the first command was skipped."""
    assert "is not a workspace directory: run pi-profile MODEL" in refusal(Workspace(tmp_path / "pi"))
    assert "model.json' is missing: run pi-profile MODEL" in refusal(Workspace(tmp_path))


def test_workspace_of_another_model_is_refused(tmp_path: Path, workspace: Workspace) -> None:
    """Prevents one model's counts from being written beside another's predictors."""
    other = save_family(tmp_path / "other", "llama", seed=1)
    record = describe(str(other), None, Checkpoint(other))
    with pytest.raises(FingerprintMismatchError, match="already belongs to another model: choose another workspace"):
        refuse_other_model(workspace, record)
    refuse_other_model(workspace, read_model(workspace))
    refuse_other_model(Workspace(tmp_path / "new"), record)


def test_weights_that_moved_are_found_at_another_place(tmp_path: Path, workspace: Workspace, model: Path) -> None:
    """Prevents a workspace from being useless on the machine it was copied to."""
    record = read_model(workspace)
    shutil.move(model, tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"are no longer at .*: say where they are with --model"):
        open_checkpoint(workspace, record, None)
    assert open_checkpoint(workspace, record, str(tmp_path / "moved")).fingerprint() == record.fingerprint


def test_changed_weights_are_refused(tmp_path: Path, workspace: Workspace, model: Path) -> None:
    """Prevents predictors and placements of one training run from being used with the next one's weights."""
    record = read_model(workspace)
    shutil.rmtree(model)
    save_family(model, "llama", seed=1)
    with pytest.raises(FingerprintMismatchError, match=r"are not those .*: give the right ones with --model"):
        open_checkpoint(workspace, record, None)


def test_record_whose_shape_was_edited_is_refused(workspace: Workspace) -> None:
    """Prevents a shape that contradicts the fingerprint beside it, such as one layer less, from being trusted."""
    record: ModelRecord = read_model(workspace)
    edited = replace(record, shape=replace(record.shape, ffn_sizes=record.shape.ffn_sizes[:-1]))
    with pytest.raises(FingerprintMismatchError, match="are not those"):
        open_checkpoint(workspace, edited, None)
