"""Writes model files: a model with its predictors as ``.powerinfer.gguf``, or a dense ``.gguf`` for llama.cpp.

What the file looks like is described in :mod:`pi_toolkit.profiler.model_gguf_layout`. Tensors are read, turned and
written one at a time. Matrices are stored in the type that is asked for, vectors in F32, with three exceptions, all as
PowerInfer's engine wants or takes them: in quantised files the output head is Q8_0 and learned positions are F16, and a
matrix whose rows are no whole number of blocks is F16.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pi_toolkit.predictor_training.predictor_file import MlpWeights, PredictorSet, RowsCopy
from pi_toolkit.profiler import gguf_container
from pi_toolkit.profiler.checkpoint import Checkpoint
from pi_toolkit.profiler.command_line import note
from pi_toolkit.profiler.errors import GgufError, UnsupportedModelError
from pi_toolkit.profiler.gguf_container import KeyValue, Magic, TensorInfo, TensorType, ValueType
from pi_toolkit.profiler.model_gguf import GgufModel
from pi_toolkit.profiler.model_gguf_layout import (
    OURS,
    SPARSE_ACTIVATION,
    VERSION,
    activation_keys,
    architecture,
    interleaved_rows,
    layer_name,
    predictor_names,
    shape_keys,
    shared_name,
    stored_layer_shapes,
)
from pi_toolkit.profiler.quantisation import KINDS, QuantisedMatrix, TurnedMatrix, dense, quantisable, quantise

if TYPE_CHECKING:
    import torch

    Weight = torch.Tensor | QuantisedMatrix

# general.file_type of each type that can be asked for
FILE_TYPES = {TensorType.F32: 0, TensorType.F16: 1, TensorType.Q4_0: 2, TensorType.Q8_0: 7, TensorType.BF16: 32}
_ENGINE_TYPES = (TensorType.F16, TensorType.Q4_0)
_QUANTISATION_VERSION = 2
_LLAMA_CPP_RUNS = {"llama": "SiLU", "falcon": "GELU"}


@dataclass(frozen=True)
class ExportSource:
    """What is written: a model, its name and fingerprint, its predictors, and the keys of its tokenizer."""

    model: Checkpoint | GgufModel
    name: str
    fingerprint: str
    predictors: PredictorSet | None
    tokenizer_keys: list[KeyValue]


@dataclass(frozen=True)
class _Entry:
    """One tensor to write, and how to get it."""

    info: TensorInfo
    load: "Callable[[], Weight]"


def export(
    path: Path,
    magic: Magic,
    source: ExportSource,
    weight_type: TensorType,
    advance: Callable[[int], None] = lambda _: None,
) -> list[TensorInfo]:
    """Write *source* to *path*, atomically, and return the tensors; calls *advance* with the bytes of each.

    Raises ``UnsupportedModelError`` for a sparse file of a model that PowerInfer's engine would compute with another
    activation, and ``GgufError`` for a sparse file without predictors and for weights that the type cannot hold.
    """
    shape = source.model.shape
    if magic == "PWRI":
        if shape.activation not in (SPARSE_ACTIVATION[shape.family], "fatrelu"):
            raise UnsupportedModelError(
                f"the model's activation is {shape.activation!r}, and PowerInfer's engine computes {shape.family} models "
                f"with {SPARSE_ACTIVATION[shape.family]}: name the output .gguf for a dense file"
            )
        if source.predictors is None:
            raise GgufError(
                f"{str(path)!r} would have no predictors, which PowerInfer's engine needs: run pi-train-predictor or give "
                "--predictor, or name the output .gguf for a dense file"
            )
    entries = list(_entries(magic, source, weight_type))
    _announce(magic, source, weight_type, entries)

    def arrays() -> Iterator[np.ndarray]:
        for entry in entries:
            yield _encode(entry)
            advance(entry.info.num_bytes)

    infos = [entry.info for entry in entries]
    gguf_container.write(path, magic, _keys(magic, source, weight_type), infos, arrays())
    return infos


def own_type(model: Checkpoint | GgufModel) -> TensorType:
    """The type to write when none is asked for: a file's own where it can be written, else F16."""
    if isinstance(model, GgufModel):
        stored = model.file.tensors[layer_name(model.shape, model.magic, 0, "up.weight")].type
        return stored if stored in FILE_TYPES else TensorType.F16
    return TensorType.F16


def _keys(magic: Magic, source: ExportSource, weight_type: TensorType) -> list[KeyValue]:
    shape = source.model.shape
    keys = [
        KeyValue("general.architecture", ValueType.STRING, architecture(shape, magic)),
        KeyValue("general.name", ValueType.STRING, source.name),
        *shape_keys(shape, magic),
        KeyValue("general.file_type", ValueType.U32, FILE_TYPES[weight_type]),
    ]
    if magic == "PWRI" and source.predictors:
        keys.append(KeyValue("powerinfer.sparse_threshold", ValueType.F32, source.predictors.threshold))
    keys += source.tokenizer_keys
    if weight_type in KINDS:
        keys.append(KeyValue("general.quantization_version", ValueType.U32, _QUANTISATION_VERSION))
    return [
        *keys,
        KeyValue(f"{OURS}version", ValueType.U32, VERSION),
        KeyValue(f"{OURS}fingerprint", ValueType.STRING, source.fingerprint),
        *activation_keys(shape),
        *(_copy_keys(source.predictors) if magic == "PWRI" and source.predictors else ()),
    ]


def _copy_keys(predictors: PredictorSet) -> list[KeyValue]:
    """The thresholds of layers that are predicted by copies, where there are any."""
    if not predictors.has_copies:
        return []
    thresholds = [layer.threshold if isinstance(layer, RowsCopy) else math.nan for layer in predictors.layers]
    return [KeyValue(f"{OURS}copy_thresholds", ValueType.ARRAY, thresholds, ValueType.F32)]


def _entries(magic: Magic, source: ExportSource, weight_type: TensorType) -> Iterator[_Entry]:
    model, shape = source.model, source.model.shape

    def entry(name: str, size: tuple[int, ...], load: "Callable[[], Weight]") -> _Entry:
        return _Entry(TensorInfo(name, size, _stored_type(name, size, weight_type)), load)

    shared = shape.shared_shapes()
    if magic == "PWRI" and shape.family != "opt":  # PowerInfer's engine has no tied heads but OPT's
        shared.setdefault("head.weight", shared["embedding.weight"])
    for role, size in shared.items():
        yield entry(shared_name(role), size, lambda role=role: model.shared(role))  # type: ignore[misc]
    for layer in range(shape.num_layers):
        for role, size in stored_layer_shapes(shape, magic, layer).items():
            name = layer_name(shape, magic, layer, role)
            yield entry(name, size, lambda layer=layer, role=role: _stored(model, magic, layer, role))  # type: ignore[misc]
    if magic == "PWRI" and source.predictors:
        for layer, mlp in enumerate(source.predictors.layers):
            if not isinstance(mlp, MlpWeights):
                continue
            for name, weight in zip(predictor_names(layer), (mlp.fc1, mlp.fc2), strict=True):
                yield entry(name, tuple(weight.shape), lambda weight=weight: weight)  # type: ignore[misc]


def _stored_type(name: str, size: tuple[int, ...], weight_type: TensorType) -> TensorType:
    if len(size) == 1:
        return TensorType.F32
    if weight_type not in KINDS:
        return weight_type
    if name == "position_embd.weight" or not quantisable(size[-1], weight_type):
        return TensorType.F16
    return TensorType.Q8_0 if name == "output.weight" else weight_type


def _stored(model: Checkpoint | GgufModel, magic: Magic, layer: int, role: str) -> "Weight":
    """The tensor with its rows and columns where the file has them."""
    if role == "fused_qkv.weight":
        parts = model.attention(layer)
        return _stacked([parts[f"{part}.weight"] for part in ("query", "key", "value")])
    if role == "down.weight" and magic == "PWRI":
        rows = model.neuron_rows(layer, role)
        return dense(rows) if isinstance(rows, TurnedMatrix) else rows
    order = interleaved_rows(model.shape, role)
    tensor = model.layer(layer, role)
    if order is None:
        return tensor
    return tensor.select(order) if isinstance(tensor, QuantisedMatrix) else tensor[order]


def _stacked(parts: "list[Weight]") -> "Weight":
    import torch

    blocks = [part for part in parts if isinstance(part, QuantisedMatrix)]
    if len(blocks) == len(parts):
        rows = np.concatenate([part.blocks for part in blocks])
        return QuantisedMatrix(blocks[0].kind, (len(rows), blocks[0].shape[1]), rows)
    return torch.cat([dense(part) for part in parts])


def _encode(entry: _Entry) -> np.ndarray:
    """The bytes of one tensor in its type; raises ``GgufError`` where the type cannot hold a weight."""
    import torch

    info, weight = entry.info, entry.load()
    if isinstance(weight, QuantisedMatrix) and KINDS.get(info.type) == weight.kind:
        return weight.blocks
    values = dense(weight)
    if tuple(values.shape) != info.shape:
        raise GgufError(f"tensor {info.name!r} is {list(values.shape)} in place of {list(info.shape)}: report this bug")
    if info.type in KINDS:
        return quantise(values, info.type)
    if info.type == TensorType.F32:
        return values.float().contiguous().numpy()
    if info.type == TensorType.BF16:
        return values.bfloat16().contiguous().view(torch.int16).numpy()
    half = values.half().contiguous()
    if not half.isfinite().all():
        raise GgufError(f"tensor {info.name!r} has weights that F16 cannot hold: use --quantize bf16 or f32")
    return half.numpy()


def _announce(magic: Magic, source: ExportSource, weight_type: TensorType, entries: list[_Entry]) -> None:
    """Say in one line each what other programs will make of the file."""
    shape = source.model.shape
    odd = [e.info.name for e in entries if weight_type in KINDS and e.info.type == TensorType.F16]
    odd = [name for name in odd if name != "position_embd.weight"]
    if odd:
        note(f"{len(odd)} matrices whose rows are no whole number of 32 values stay in F16 ({odd[0]} …)")
    if magic == "PWRI":
        if source.predictors and source.predictors.has_copies:
            note(
                "PowerInfer's engine has no copies of rows as predictors and will not load this file: it is for this toolkit "
                "(pi-train-predictor --kind mlp makes predictors for both)"
            )
        if weight_type not in _ENGINE_TYPES:
            note(f"PowerInfer's engine computes F16 and Q4_0 alone: a file in {weight_type.name} is for this toolkit")
        if (shape.sliding_window and shape.family != "bamboo") or shape.head_dim * shape.num_heads != shape.hidden_size:
            note(
                "PowerInfer's engine knows no sliding window and no heads of another size: this file is for this toolkit"
            )
        if shape.activation == "fatrelu":
            note(
                f"PowerInfer's engine will run this file with ReLU in place of {shape.full_activation}, because its format "
                "cannot say so: its text will differ"
            )
    elif shape.family not in _LLAMA_CPP_RUNS:
        note(f"llama.cpp knows no {shape.family} architecture: this file is for this toolkit")
    elif shape.activation.lower() != _LLAMA_CPP_RUNS[shape.family].lower():
        note(
            f"llama.cpp will run this file with {_LLAMA_CPP_RUNS[shape.family]} in place of {shape.full_activation}, because "
            "its format cannot say so: its text will differ"
        )
