"""What ``pi-convert`` reads: a workspace, a model directory or hub id with folders beside it, or a model file."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from pi_toolkit.predictor_training import predictor_file
from pi_toolkit.profiler import activation_stats
from pi_toolkit.profiler.activation_stats import numbered_files
from pi_toolkit.profiler.atomic_write import atomic_directory, atomic_file
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.errors import ActivationStatsError, FingerprintMismatchError
from pi_toolkit.profiler.gguf_container import KeyValue
from pi_toolkit.profiler.gguf_tokenizer_keys import tokenizer_keys
from pi_toolkit.profiler.model_gguf import GgufModel
from pi_toolkit.profiler.model_gguf_layout import OURS
from pi_toolkit.profiler.workspace import Workspace, describe, open_checkpoint, open_weights, read_model
from pi_toolkit.solver import gpuidx

from .model_gguf_export import ExportSource
from .model_gguf_predictors import predictors_of


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
    workspace = Workspace(Path(source))
    index = None
    if workspace.is_file or workspace.model_json.exists():
        record = read_model(workspace)
        opened: Checkpoint | GgufModel = open_checkpoint(workspace, record, model)
        predictor = predictor or (workspace.predictor if workspace.predictor.exists() else None)
        activation = activation or (workspace.activation if workspace.activation.exists() else None)
        if (path := workspace.gpuidx(record)).exists():
            gpuidx.read(path, record.shape.ffn_sizes, record.fingerprint)
            index = path
    else:
        opened = open_weights(source, None)
        record = describe(source, None, opened)
    predictors = predictors_of(opened) if isinstance(opened, GgufModel) else None
    if predictor:
        shape = opened.shape
        predictors = predictor_file.read(predictor, shape.hidden_size, shape.ffn_sizes, record.fingerprint)
    if activation:
        activation_stats.read(activation, record.shape.ffn_sizes, record.fingerprint)
    export = ExportSource(opened, record.name, record.fingerprint, predictors, _tokenizer_keys(opened))
    return ConvertSource(export, activation, index)


def check_companions(source: ConvertSource, out: Path) -> None:
    """Raise now what :func:`write_companions` would raise after minutes of writing."""
    _counts_are_there(source, Workspace(out).activation)


def write_companions(source: ConvertSource, out: Path) -> dict[str, str]:
    """Copy counts and placement to where the model file *out* wants them; what was written, by kind.

    Raises ``ActivationStatsError`` when the folder already holds another model's counts.
    """
    written, beside = {}, Workspace(out)
    if source.activation and not _counts_are_there(source, beside.activation):
        _copy_counts(source.activation, beside.activation, source.export.model.shape.num_layers)
        written["activation"] = str(beside.activation)
    if source.gpuidx:
        target = beside.file_gpuidx
        with atomic_file(target) as temporary:
            shutil.copyfile(source.gpuidx, temporary)
        written["gpuidx"] = str(target)
    return written


def _tokenizer_keys(model: Checkpoint | GgufModel) -> list[KeyValue]:
    if not isinstance(model, GgufModel):
        return tokenizer_keys(model.directory, model.shape.vocabulary_size)
    keys = model.file.key_values.values()
    return [item for item in keys if item.name.startswith("tokenizer.") or item.name == f"{OURS}end_token_ids"]


def _counts_are_there(source: ConvertSource, target: Path) -> bool:
    """Whether *target* is the folder the counts come from; raises when it holds another model's."""
    if source.activation is None or not target.exists():
        return False
    if target.resolve() == source.activation.resolve():
        return True
    export = source.export
    try:
        activation_stats.read(target, export.model.shape.ffn_sizes, export.fingerprint)
    except (ActivationStatsError, FingerprintMismatchError) as error:
        raise ActivationStatsError(
            f"{str(target)!r} holds the counts of another model: choose another folder for the file with -o"
        ) from error
    return False


def _copy_counts(source: Path, target: Path, layers: int) -> None:
    files = numbered_files(source, "activation", layers, ActivationStatsError, "run pi-profile to write it again")
    with atomic_directory(target) as temporary:
        for file in [*files, source / "profile.json", source / "locality.png"]:
            if file.exists():
                shutil.copyfile(file, temporary / file.name)
