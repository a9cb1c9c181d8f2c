"""The placement on disk, ``.gpuidx``: PowerInfer's format, with the facts of ours beside it.

A GGUF container with magic "PWRI". Its keys, in this order:

    general.architecture            string  "generic.gpu_index"
    generic.gpu_index.block_count   u32     layers
    split.vram_capacity             u64     bytes of the FFN neurons on the GPU (PowerInfer's exporter: the budget)

and, in files written here, ``powerinfer_toolkit.version`` (u32, 1) and ``powerinfer_toolkit.`` + every name in
``_FACTS``, ``powerinfer_toolkit.objective`` where it is not the paper's, and for several GPUs the keys of
:mod:`.gpuidx_devices`. Two tensors per layer, strictly alternating in layer order, because PowerInfer takes them by position:

    blk.{i}.gpu_idx      I32 [neurons]   1 for a neuron on the GPU, 0 for one on the CPU
    blk.{i}.gpu_bucket   I32 [k]         ascending ids of the k neurons on the GPU; k may be 0

I32 has the type number 18 of PowerInfer's time; 26, today's, is read too. The same placement gives the same bytes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pi_toolkit.profiler import gguf_container
from pi_toolkit.profiler.activation_stats import check_fingerprint
from pi_toolkit.profiler.errors import GgufError, GpuIndexError
from pi_toolkit.profiler.gguf_container import GgufFile, KeyValue, TensorInfo, TensorType, ValueType

from .gpuidx_devices import PREFIX as _PREFIX
from .gpuidx_devices import check_devices, device_keys, read_devices
from .memory import DTYPES
from .token_time import UnitDevices

ARCHITECTURE, VERSION = "generic.gpu_index", 1
_REMEDY = "run pi-place to write it again"
# Facts beyond PowerInfer's keys: fields of GpuIndex and their types.
_FACTS: dict[str, tuple[ValueType, ValueType | None]] = {
    "fingerprint": (ValueType.STRING, None),
    "hardware": (ValueType.STRING, None),
    "dtype": (ValueType.STRING, None),
    "context": (ValueType.U32, None),
    "batch_size": (ValueType.U32, None),
    "gpu_budget_bytes": (ValueType.U64, None),
    "attention_on_gpu": (ValueType.ARRAY, ValueType.BOOL),
    "predictor_on_gpu": (ValueType.ARRAY, ValueType.BOOL),
    "head_on_gpu": (ValueType.BOOL, None),
    "objective_value": (ValueType.F64, None),
    "upper_bound": (ValueType.F64, None),
    "status": (ValueType.STRING, None),
}


@dataclass(frozen=True)
class GpuIndex:
    """One placement.

    ``gpu_neurons``: per layer int32 [k], ascending ids of the neurons on the GPU. ``ffn_sizes``: neurons per layer.
    ``vram_capacity_bytes``: bytes of the neurons on the GPU (in PowerInfer's own files: its budget). The rest is None
    together, in files that PowerInfer wrote: the model's fingerprint, the machine, dtype, context and batch size the
    placement was made for, its GPU budget, per layer whether attention with KV cache and the predictor are on the GPU, the
    same of the head, and the solver's objective, bound and status. ``objective``: "firings", counted in firings served from
    the GPU with an upper bound, or "latency", in predicted seconds of a token with a lower one. ``devices`` and
    ``gpu_budgets``, bytes of each, are there for several GPUs.
    """

    gpu_neurons: tuple[np.ndarray, ...]
    ffn_sizes: tuple[int, ...]
    vram_capacity_bytes: int
    fingerprint: str | None = None
    hardware: str | None = None
    dtype: str | None = None
    context: int | None = None
    batch_size: int | None = None
    gpu_budget_bytes: int | None = None
    attention_on_gpu: tuple[bool, ...] | None = None
    predictor_on_gpu: tuple[bool, ...] | None = None
    head_on_gpu: bool | None = None
    objective_value: float | None = None
    upper_bound: float | None = None
    status: str | None = None
    objective: str = "firings"
    devices: UnitDevices | None = None
    gpu_budgets: tuple[int, ...] | None = None

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FACTS}


def write(path: Path, index: GpuIndex) -> None:
    """Write *index* to *path* atomically; raises ``GpuIndexError`` if it contradicts itself."""
    _validate(index)
    key_values = [
        KeyValue("general.architecture", ValueType.STRING, ARCHITECTURE),
        KeyValue("generic.gpu_index.block_count", ValueType.U32, len(index.ffn_sizes)),
        KeyValue("split.vram_capacity", ValueType.U64, index.vram_capacity_bytes),
    ]
    if index.fingerprint is not None:
        key_values.append(KeyValue(f"{_PREFIX}version", ValueType.U32, VERSION))
        key_values += [
            KeyValue(_PREFIX + name, *_value_and_types(name, value)) for name, value in index.facts().items()
        ]
        if index.objective != "firings":
            key_values.append(KeyValue(f"{_PREFIX}objective", ValueType.STRING, index.objective))
        if index.devices and index.gpu_budgets:
            key_values += device_keys(index.devices, index.gpu_budgets)
    gguf_container.write(path, "PWRI", key_values, _tensor_infos(index), _tensor_arrays(index))


def read(path: Path, ffn_sizes: Sequence[int], fingerprint: str) -> GpuIndex:
    """The placement in *path* for a model with *ffn_sizes* neurons per layer.

    Raises ``GpuIndexError`` for a missing, malformed or contradictory file and one of another shape, and
    ``FingerprintMismatchError`` for the placement of another model. A file without a fingerprint, such as PowerInfer's
    own, is checked by its shapes and announced on stderr.
    """
    try:
        file = gguf_container.read(path, "PWRI")
        index = _parse(file, tuple(ffn_sizes))
    except GgufError as error:
        # The container's own sentence names the path again and ends in a remedy for model files.
        what, _, _ = error.message.removeprefix(repr(str(path))).lstrip(": ").rpartition(": ")
        raise GpuIndexError(f"{str(path)!r} is no usable placement ({what}): {_REMEDY}") from error
    except GpuIndexError as error:
        raise GpuIndexError(f"{str(path)!r}: {error.message}") from None
    check_fingerprint(path, index.fingerprint, fingerprint, _REMEDY)
    return index


def _value_and_types(name: str, value: Any) -> tuple[ValueType, Any, ValueType | None]:
    value_type, item_type = _FACTS[name]
    return value_type, value, item_type


def _tensor_infos(index: GpuIndex) -> list[TensorInfo]:
    infos = []
    for layer, (ids, neurons) in enumerate(zip(index.gpu_neurons, index.ffn_sizes, strict=True)):
        infos.append(TensorInfo(f"blk.{layer}.gpu_idx", (neurons,), TensorType.I32))
        infos.append(TensorInfo(f"blk.{layer}.gpu_bucket", (len(ids),), TensorType.I32))
    return infos


def _tensor_arrays(index: GpuIndex) -> Iterator[np.ndarray]:
    for ids, neurons in zip(index.gpu_neurons, index.ffn_sizes, strict=True):
        yield _on_gpu(ids, neurons)
        yield ids.astype("<i4")


def _on_gpu(ids: np.ndarray, neurons: int) -> np.ndarray:
    on_gpu = np.zeros(neurons, dtype="<i4")
    on_gpu[ids] = 1
    return on_gpu


def _parse(file: GgufFile, ffn_sizes: tuple[int, ...]) -> GpuIndex:
    if file.value("general.architecture", ValueType.STRING) != ARCHITECTURE:
        raise GpuIndexError(f"it is not a {ARCHITECTURE!r} file: {_REMEDY}")
    layers = file.value("generic.gpu_index.block_count", ValueType.U32)
    if layers != len(ffn_sizes):
        raise GpuIndexError(f"it places {layers} layers and the model has {len(ffn_sizes)}: {_REMEDY}")
    names = [f"blk.{layer}.{part}" for layer in range(layers) for part in ("gpu_idx", "gpu_bucket")]
    if list(file.tensors) != names:
        raise GpuIndexError(f"its tensors are not gpu_idx and gpu_bucket of {layers} layers in order: {_REMEDY}")
    gpu_neurons = tuple(_read_layer(file, layer, neurons) for layer, neurons in enumerate(ffn_sizes))
    capacity = file.value("split.vram_capacity", ValueType.U64)
    index = GpuIndex(gpu_neurons, ffn_sizes, capacity, **_read_facts(file))
    if index.fingerprint is not None:
        objective = f"{_PREFIX}objective" in file.key_values and file.value(f"{_PREFIX}objective", ValueType.STRING)
        devices, budgets = read_devices(file, gpu_neurons, ffn_sizes)
        index = replace(index, objective=objective or "firings", devices=devices, gpu_budgets=budgets)
    _validate(index)
    for layer, (ids, neurons) in enumerate(zip(gpu_neurons, ffn_sizes, strict=True)):
        if not np.array_equal(file.data(f"blk.{layer}.gpu_idx"), _on_gpu(ids, neurons)):
            raise GpuIndexError(f"layer {layer}: gpu_idx and gpu_bucket contradict each other: {_REMEDY}")
    return index


def _read_layer(file: GgufFile, layer: int, neurons: int) -> np.ndarray:
    for name in (f"blk.{layer}.gpu_idx", f"blk.{layer}.gpu_bucket"):
        info = file.tensors[name]
        if info.type != TensorType.I32 or len(info.shape) != 1:
            raise GpuIndexError(f"tensor {name!r} is no vector of I32: {_REMEDY}")
    stated = file.tensors[f"blk.{layer}.gpu_idx"].shape[0]
    if stated != neurons:
        raise GpuIndexError(f"layer {layer} places {stated} neurons and the model has {neurons}: {_REMEDY}")
    return file.data(f"blk.{layer}.gpu_bucket").astype(np.int32)


def _read_facts(file: GgufFile) -> dict[str, Any]:
    if not any(name.startswith(_PREFIX) for name in file.key_values):
        return {}
    version = file.value(f"{_PREFIX}version", ValueType.U32)
    if version != VERSION:
        raise GpuIndexError(f"it has version {version} and this release reads {VERSION}: {_REMEDY}")
    facts = {name: file.value(_PREFIX + name, *types) for name, types in _FACTS.items()}
    return {name: tuple(v.tolist()) if isinstance(v, np.ndarray) else v for name, v in facts.items()}


def _validate(index: GpuIndex) -> None:
    """What must hold in a file that is written and in one that is read."""
    if len(index.gpu_neurons) != len(index.ffn_sizes):
        raise GpuIndexError(f"it places {len(index.gpu_neurons)} layers of {len(index.ffn_sizes)}: {_REMEDY}")
    for layer, (ids, neurons) in enumerate(zip(index.gpu_neurons, index.ffn_sizes, strict=True)):
        if len(ids) and (ids[0] < 0 or ids[-1] >= neurons or (np.diff(ids) <= 0).any()):
            raise GpuIndexError(f"layer {layer}: neuron ids do not ascend within 0 … {neurons - 1}: {_REMEDY}")
    facts = index.facts()
    if all(value is None for value in facts.values()):
        return
    if missing := [name for name, value in facts.items() if value is None]:
        raise GpuIndexError(f"it states no {missing[0]}: {_REMEDY}")
    if index.dtype not in DTYPES:
        raise GpuIndexError(f"it states dtype {index.dtype!r}, which is none of {', '.join(DTYPES)}: {_REMEDY}")
    if not index.context or not index.batch_size:
        raise GpuIndexError(f"it states context {index.context} and batch size {index.batch_size}: {_REMEDY}")
    for name in ("attention_on_gpu", "predictor_on_gpu"):
        if len(facts[name]) != len(index.ffn_sizes):
            raise GpuIndexError(f"{name} has {len(facts[name])} items for {len(index.ffn_sizes)} layers: {_REMEDY}")
    if index.objective not in ("firings", "latency"):
        raise GpuIndexError(f"it states the unknown objective {index.objective!r}: {_REMEDY}")
    if index.devices is not None:
        check_devices(
            index.devices,
            index.gpu_budgets or (),
            index.gpu_neurons,
            facts["attention_on_gpu"],
            facts["predictor_on_gpu"],
            facts["head_on_gpu"],
        )
    if not (math.isfinite(facts["objective_value"]) and math.isfinite(facts["upper_bound"])):
        raise GpuIndexError(f"it states an objective that is not finite: {_REMEDY}")
