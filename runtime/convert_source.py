"""What ``pi-convert`` reads: a workspace, a model directory or hub id with folders beside it, or a model file."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from pi_toolkit.predictor_training import predictor_file
from pi_toolkit.predictor_training.predictor_file import PredictorSet
from pi_toolkit.profiler import activation_stats
from pi_toolkit.profiler.activation_stats import numbered_files
from pi_toolkit.profiler.atomic_write import atomic_directory, atomic_file
from pi_toolkit.profiler.checkpoint import Checkpoint, locate
from pi_toolkit.profiler.command_line import note
from pi_toolkit.profiler.errors import ActivationStatsError, FingerprintMismatchError
from pi_toolkit.profiler.gguf_tokenizer_keys import tokenizer_keys
from pi_toolkit.profiler.model_gguf import GgufModel, is_model_file
from pi_toolkit.profiler.workspace import Workspace, describe, open_checkpoint, read_model
from pi_toolkit.solver import gpuidx

from .model_gguf_export import ExportSource
from .model_gguf_files import activation_beside, gpuidx_beside, predictors_of


@dataclass(frozen=True)
class ConvertSource:
    """What is written into the file, and the activation counts and the placement that go beside it (None: there is none)."""

    export: ExportSource
    activation: Path | None
    gpuidx: Path | None


def open_source(source: str, model: str | None, predictor: Path | None, activation: Path | None) -> ConvertSource:
    """Open what *source* names; *predictor* and *activation* are used in place of what belongs to it.

    Raises named errors for anything missing, damaged, or of another model.
    """
    if is_model_file(source):
        return _from_file(Path(source), predictor, activation)
    workspace = Workspace(Path(source))
    if workspace.model_json.exists():
        return _from_workspace(workspace, model, predictor, activation)
    checkpoint = Checkpoint(locate(source))
    record = describe(source, None, checkpoint)
    keys = tokenizer_keys(checkpoint.directory, checkpoint.shape.vocabulary_size)
    predictors = _predictors(predictor, checkpoint, record.fingerprint)
    _check_activation(activation, checkpoint, record.fingerprint)
    return ConvertSource(ExportSource(checkpoint, record.name, record.fingerprint, predictors, keys), activation, None)


def write_companions(source: ConvertSource, path: Path) -> dict[str, str]:
    """Copy counts and placement to where the model file *path* wants them; what was written, by kind.

    Raises ``ActivationStatsError`` when the folder already holds another model's counts.
    """
    written = {}
    if source.activation is not None:
        target = activation_beside(path)
        if _copy_counts(source.activation, target, source.export):
            written["activation"] = str(target)
    if source.gpuidx is not None:
        target = gpuidx_beside(path)
        with atomic_file(target) as temporary:
            shutil.copyfile(source.gpuidx, temporary)
        written["gpuidx"] = str(target)
    return written


def check_companions(source: ConvertSource, path: Path) -> None:
    """Raise now what :func:`write_companions` would raise after minutes of writing."""
    if source.activation is not None:
        _same_counts(source.activation, activation_beside(path), source.export)


def _from_workspace(
    workspace: Workspace, model: str | None, predictor: Path | None, activation: Path | None
) -> ConvertSource:
    record = read_model(workspace)
    checkpoint = open_checkpoint(workspace, record, model)
    if isinstance(checkpoint, GgufModel):
        keys = _tokenizer_keys_of(checkpoint)
    else:
        keys = tokenizer_keys(checkpoint.directory, record.shape.vocabulary_size)
    predictor = predictor or (workspace.predictor if workspace.predictor.exists() else None)
    activation = activation or (workspace.activation if workspace.activation.exists() else None)
    predictors = _predictors(predictor, checkpoint, record.fingerprint)
    _check_activation(activation, checkpoint, record.fingerprint)
    index = workspace.gpuidx(record)
    if index.exists():
        gpuidx.read(index, record.shape.ffn_sizes, record.fingerprint)
    export = ExportSource(checkpoint, record.name, record.fingerprint, predictors, keys)
    return ConvertSource(export, activation, index if index.exists() else None)


def _from_file(path: Path, predictor: Path | None, activation: Path | None) -> ConvertSource:
    model = GgufModel(path)
    model.announce_dequantised()
    fingerprint = model.fingerprint()
    predictors = _predictors(predictor, model, fingerprint) or predictors_of(model)
    if activation is None and activation_beside(path).is_dir():
        activation = activation_beside(path)
    _check_activation(activation, model, fingerprint)
    index = gpuidx_beside(path)
    export = ExportSource(model, model.name, fingerprint, predictors, _tokenizer_keys_of(model))
    return ConvertSource(export, activation, index if index.exists() else None)


def _tokenizer_keys_of(model: GgufModel) -> list:
    return [
        item
        for name, item in model.file.key_values.items()
        if name.startswith("tokenizer.") or name == "powerinfer_toolkit.end_token_ids"
    ]


def _predictors(directory: Path | None, model: Checkpoint | GgufModel, fingerprint: str) -> PredictorSet | None:
    if directory is None:
        return None
    shape = model.shape
    predictors = predictor_file.read(directory, shape.hidden_size, shape.ffn_sizes, fingerprint)
    if predictors.fingerprint is None:
        note(f"{str(directory)!r} states no model fingerprint: it was checked by its shapes alone")
    return predictors


def _check_activation(directory: Path | None, model: Checkpoint | GgufModel, fingerprint: str) -> None:
    if directory is not None:
        activation_stats.read(directory, model.shape.ffn_sizes, fingerprint)


def _same_counts(source: Path, target: Path, export: ExportSource) -> bool:
    """Whether *target* already is these counts; raises when it is something else."""
    if not target.exists():
        return False
    if target.resolve() == source.resolve():
        return True
    shape = export.model.shape
    try:
        activation_stats.read(target, shape.ffn_sizes, export.fingerprint)
    except (ActivationStatsError, FingerprintMismatchError) as error:
        raise ActivationStatsError(
            f"{str(target)!r} holds the counts of another model: choose another folder for the file with -o"
        ) from error
    return False


def _copy_counts(source: Path, target: Path, export: ExportSource) -> bool:
    if _same_counts(source, target, export):
        return False
    layers = export.model.shape.num_layers
    files = numbered_files(source, "activation", layers, ActivationStatsError, "run pi-profile to write it again")
    with atomic_directory(target) as temporary:
        for file in [*files, source / "profile.json", source / "locality.png"]:
            if file.exists():
                shutil.copyfile(file, temporary / file.name)
    return True
