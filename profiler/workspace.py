"""The workspace directory and its ``model.json``, which says whose neurons everything in it is about.

    opt-6.7b-pi/
      model.json                     this file's format, below
      activation/activation_{i}.pt   firing counts and profile.json     (profiler/activation_stats.py)
      predictor/model_{i}.pt         predictors and config.json         (predictor_training/predictor_file.py)
      opt-6.7b.gpuidx                the placement                      (solver/gpuidx.py)

``model.json`` (UTF-8 JSON): ``format`` "powerinfer-toolkit/model", ``version`` 1, ``name``, ``model`` (hub id or
absolute path, for people and for finding the weights; no part of any comparison), ``revision`` (hub revision or null),
``fingerprint`` (64 hexadecimal digits, see :mod:`.checkpoint`), ``shape`` (:class:`ModelShape`).

A model file stands for a workspace of its own: it says which model it is, has its predictors inside, and PowerInfer's
names for what lies beside it, ``activation/`` and ``<file>.generated.gpuidx``.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from .checkpoint import Checkpoint, expand, locate, weight_files
from .errors import CheckpointError, FingerprintMismatchError, UnsupportedModelError, WorkspaceError
from .json_file import read_json, require_format, write_json
from .model_families import ModelShape
from .model_gguf import GgufModel, is_model_file

FORMAT, VERSION = "powerinfer-toolkit/model", 1
_REMEDY = "run pi-profile MODEL to make the workspace"


@dataclass(frozen=True)
class ModelRecord:
    """Which model a workspace belongs to."""

    name: str
    model: str
    revision: str | None
    fingerprint: str
    shape: ModelShape


@dataclass(frozen=True)
class Workspace:
    """Paths of one workspace, a directory or a model file; the folders need not exist yet."""

    path: Path

    @property
    def is_file(self) -> bool:
        return is_model_file(self.path)

    @cached_property
    def model_file(self) -> GgufModel:
        """The model file, opened once for all who ask; raises ``GgufError``."""
        return GgufModel(self.path)

    @property
    def model_json(self) -> Path:
        return self.path / "model.json"

    @property
    def activation(self) -> Path:
        return (self.path.parent if self.is_file else self.path) / "activation"

    @property
    def predictor(self) -> Path:
        return self.path / "predictor"

    @property
    def file_gpuidx(self) -> Path:
        """PowerInfer's name for the placement of a model file."""
        return self.path.with_name(f"{self.path.name}.generated.gpuidx")

    def gpuidx(self, record: ModelRecord) -> Path:
        return self.file_gpuidx if self.is_file else self.path / f"{record.name}.gpuidx"


def model_name(model: str) -> str:
    """The last part of a directory or hub id, or that of a model file without its endings."""
    path = expand(model)
    if is_model_file(model):
        return path.name.removesuffix(".gguf").removesuffix(".powerinfer") or "model"
    return (path.resolve() if path.name in ("", "..") else path).name or "model"


def describe(model: str, revision: str | None, checkpoint: Checkpoint | GgufModel) -> ModelRecord:
    """The record of an opened checkpoint or model file; reads 12 KiB of every tensor."""
    path = expand(model)
    if isinstance(checkpoint, GgufModel):
        return ModelRecord(checkpoint.name, str(path.absolute()), None, checkpoint.fingerprint(), checkpoint.shape)
    reference = str(path.absolute()) if path.is_dir() else model
    return ModelRecord(model_name(model), reference, revision, checkpoint.fingerprint(), checkpoint.shape)


def write_model(workspace: Workspace, record: ModelRecord) -> None:
    """Write ``model.json`` atomically."""
    content = {"format": FORMAT, "version": VERSION, **vars(record)} | {"shape": record.shape.to_json()}
    write_json(workspace.model_json, content)


def read_model(workspace: Workspace) -> ModelRecord:
    """Read ``model.json``; raises ``WorkspaceError`` when it is missing, malformed or of another version.

    A model file describes itself; raises ``GgufError`` when it is damaged.
    """
    if workspace.is_file:
        return describe(str(workspace.path), None, workspace.model_file)
    if not workspace.path.is_dir():
        raise WorkspaceError(f"{str(workspace.path)!r} is not a workspace directory: {_REMEDY}")
    content = read_json(workspace.model_json, WorkspaceError, _REMEDY)
    require_format(content, workspace.model_json, FORMAT, VERSION, WorkspaceError)
    try:
        shape = ModelShape.from_json(content["shape"])
        record = ModelRecord(content["name"], content["model"], content["revision"], content["fingerprint"], shape)
        texts = isinstance(record.model, str) and isinstance(record.revision, str | None)
        if not texts or not re.fullmatch(r"[0-9a-f]{64}", record.fingerprint):
            raise ValueError("model, revision or fingerprint")
        if not record.name or Path(record.name).name != record.name or "\0" in record.name + record.model:
            raise ValueError("name")
        (record.name + record.model).encode()  # half of a surrogate pair is no name of a file either
    except (KeyError, TypeError, ValueError, UnsupportedModelError) as error:
        raise WorkspaceError(f"{str(workspace.model_json)!r} is damaged ({error}): {_REMEDY}") from error
    return record


def refuse_other_model(workspace: Workspace, record: ModelRecord) -> None:
    """Raise ``FingerprintMismatchError`` if *workspace* exists and describes another model than *record*, and
    ``WorkspaceError`` if what it describes cannot be read."""
    if not workspace.model_json.exists():
        return
    try:
        fingerprint = read_model(workspace).fingerprint
    except WorkspaceError as error:
        raise WorkspaceError(
            f"{str(workspace.path)!r} holds a model.json that cannot be read, so whose workspace it is remains unknown: "
            "choose another workspace with -o, or remove that file"
        ) from error
    if fingerprint != record.fingerprint:
        raise FingerprintMismatchError(
            f"{str(workspace.path)!r} already belongs to another model: choose another workspace with -o"
        )


def open_weights(
    model: str,
    revision: str | None,
    activation: str | None = None,
    before: Callable[[list[Path]], object] = lambda _: None,
) -> Checkpoint:
    """The weights of a model directory, hub id or model file.

    *activation* is that of a model file that does not state its own, *before* is called with the files that are about to be
    read. A :class:`GgufModel` answers what a checkpoint
    does, and to code that knows quantised matrices it hands those.
    """
    if is_model_file(model):
        before([expand(model)])
        opened = GgufModel(expand(model), activation)
        opened.announce_dequantised()
        return cast(Checkpoint, opened)
    directory = locate(model, revision)
    before(weight_files(directory))
    return Checkpoint(directory)


def open_checkpoint(
    workspace: Workspace,
    record: ModelRecord,
    model: str | None,
    before: Callable[[list[Path]], object] = lambda _: None,
) -> Checkpoint:
    """The weights the workspace was made from, found where ``model.json`` says or at *model*; calls *before* with their
    files when they are about to be read.

    Raises ``CheckpointError`` when they are gone and ``FingerprintMismatchError`` when they are others.
    """
    if not model and Path(record.model).is_absolute() and not Path(record.model).exists():
        raise CheckpointError(
            f"the weights of {str(workspace.path)!r} are no longer at {record.model!r}: say where they are with --model"
        )
    if workspace.is_file and not model:
        workspace.model_file.announce_dequantised()
        before(workspace.model_file.files)
        return cast(Checkpoint, workspace.model_file)
    checkpoint = open_weights(
        model or record.model, None if model else record.revision, record.shape.full_activation, before
    )
    if checkpoint.shape != record.shape or checkpoint.fingerprint() != record.fingerprint:
        raise FingerprintMismatchError(
            f"the weights in {str(checkpoint.directory)!r} are not those {str(workspace.path)!r} was made from: give "
            "the right ones with --model, or run pi-profile again"
        )
    return checkpoint
