"""What a placement needs to know of a workspace or model file besides its shape: types, predictors, machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi_toolkit.predictor_training.predictor_size import PredictorSize
from pi_toolkit.profiler.command_line import FiniteFloatType, note
from pi_toolkit.profiler.hardware import GIB, Hardware

from .memory import DTYPES, precise_dtype
from .token_time import ASSUMED_OVERSHOOT

if TYPE_CHECKING:
    from pi_toolkit.profiler.workspace import ModelRecord, Workspace

LARGEST_GIB = 2.0**20  # a pebibyte; keeps every byte count far inside 64 bits


@dataclass(frozen=True)
class VramType(click.ParamType):
    """GiB of one GPU, or of several separated by commas: ``24``, ``24,24``."""

    name = "gib[,gib…]"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        number = FiniteFloatType(exclusive=True, maximum=LARGEST_GIB)
        return tuple(number.convert(part, param, context) for part in str(value).split(","))


@dataclass(frozen=True)
class PinType(click.ParamType):
    """``LAYER=COUNT``: so many neurons of a layer on GPUs."""

    name = "layer=count"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        layer, _, count = str(value).partition("=")
        if not (layer.isascii() and layer.isdigit() and count.isascii() and count.isdigit()) or len(value) > 40:
            self.fail(f"{value!r} is no LAYER=COUNT: write for example 3=4096", param, context)
        return int(layer), int(count)


@dataclass(frozen=True)
class PredictorFacts:
    """What each layer's predictor is, the type of MLPs, and candidates per firing, one for all where none was measured."""

    sizes: list[PredictorSize] | None
    dtype: str | None
    overshoot: float | tuple[float, ...]


def with_vram(machine: Hardware, vram: Sequence[float] | None) -> Hardware:
    """*machine* with a GPU for each number of GiB in *vram*; one number is that of every GPU it has.

    Raises ``click.BadParameter`` for numbers that do not match several GPUs.
    """
    if vram is None or not machine.gpus:
        return machine
    if len(vram) == 1:
        vram = list(vram) * len(machine.gpus)
    if len(machine.gpus) not in (1, len(vram)):
        raise click.BadParameter(
            f"{len(vram)} numbers for the {len(machine.gpus)} GPUs of {machine.name}: give one for each",
            param_hint="--vram",
        )
    gpus = machine.gpus * len(vram) if len(machine.gpus) == 1 else machine.gpus
    return replace(
        machine, gpus=tuple(replace(gpu, memory_bytes=int(gib * GIB)) for gpu, gib in zip(gpus, vram, strict=True))
    )


def read_predictors(workspace: "Workspace", record: "ModelRecord", dtype: str) -> PredictorFacts:
    """The predictors inside a model file, or beside the counts; raises named errors for damaged ones."""
    from pi_toolkit.predictor_training.predictor_file import read_overshoot, read_sizes
    from pi_toolkit.profiler.model_gguf import GgufModel

    shape = record.shape
    if workspace.is_file:
        model = GgufModel(workspace.path)
        if (sizes := model.predictor_sizes()) is not None:
            return PredictorFacts(sizes, _held_in(model, dtype), ASSUMED_OVERSHOOT)
    if workspace.predictor.exists():
        sizes = read_sizes(workspace.predictor, shape.hidden_size, shape.ffn_sizes, record.fingerprint)
        measured = read_overshoot(workspace.predictor, shape.num_layers)
        return PredictorFacts(sizes, None, tuple(measured) if measured else ASSUMED_OVERSHOOT)
    return PredictorFacts(None, None, ASSUMED_OVERSHOOT)


def stored_dtype(workspace: "Workspace", record: "ModelRecord", model: str | None) -> str:
    """The type the FFN weights are stored in; bfloat16, announced, where there is no checkpoint here."""
    from pi_toolkit.profiler.model_gguf import GgufModel
    from pi_toolkit.profiler.workspace import open_checkpoint

    if model is None and not Path(record.model).exists() and not (model := downloaded(record)):
        note("the weights are not on this disk, so sizes are those of bfloat16: choose with --dtype")
        return "bfloat16"
    checkpoint: Any = open_checkpoint(workspace, record, model)
    if isinstance(checkpoint, GgufModel) and (kind := checkpoint.quantised_kind()):
        return kind
    name = str(checkpoint.dtype()).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def downloaded(record: "ModelRecord") -> str | None:
    """The directory of a hub model that an earlier command downloaded; a placement alone is not worth a download."""
    from pi_toolkit.profiler.checkpoint import Checkpoint, locate
    from pi_toolkit.profiler.errors import CheckpointError

    try:
        return str(Checkpoint(locate(record.model, record.revision, local_only=True)).directory)
    except CheckpointError:  # not there, or only its config, from an interrupted download
        return None


def _held_in(model: Any, dtype: str) -> str:
    """What the predictors of a file are held in: quantised ones as they are, in a quantised model."""
    from pi_toolkit.profiler.model_gguf import predictor_names
    from pi_toolkit.profiler.quantisation import KINDS

    mlp = next((layer for layer in range(model.num_predictors) if layer not in model.copy_thresholds), None)
    kind = None if mlp is None else KINDS.get(model.file.tensors[predictor_names(mlp)[0]].type)
    return kind if kind and dtype in ("q8_0", "q4_0") else precise_dtype(dtype)
