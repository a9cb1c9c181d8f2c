"""The keys of a ``.gpuidx`` that say which of several GPUs holds what; a placement on one GPU has none of them.

    powerinfer_toolkit.gpu_budgets          u64 array [GPUs]     bytes on each GPU for the model
    powerinfer_toolkit.attention_device     i32 array [layers]   the number of a GPU, or −1 for the CPU
    powerinfer_toolkit.predictor_device     i32 array [layers]
    powerinfer_toolkit.head_device          i32
    powerinfer_toolkit.blk.{i}.gpu          u8 array [k]         GPUs of the neurons of ``blk.{i}.gpu_bucket``

``gpu_idx`` and ``gpu_bucket`` keep PowerInfer's meaning: a neuron on any GPU.
"""

from collections.abc import Sequence

import numpy as np

from pi_toolkit.profiler.errors import GpuIndexError
from pi_toolkit.profiler.gguf_container import GgufFile, KeyValue, ValueType

from .token_time import CPU, UnitDevices

PREFIX = "powerinfer_toolkit."
MAX_GPUS = 64
_REMEDY = "run pi-place to write it again"


def device_keys(devices: UnitDevices, gpu_budgets: Sequence[int]) -> list[KeyValue]:
    """The keys above."""
    keys = [
        KeyValue(f"{PREFIX}gpu_budgets", ValueType.ARRAY, list(gpu_budgets), ValueType.U64),
        KeyValue(f"{PREFIX}attention_device", ValueType.ARRAY, devices.attention.tolist(), ValueType.I32),
        KeyValue(f"{PREFIX}predictor_device", ValueType.ARRAY, devices.predictor.tolist(), ValueType.I32),
        KeyValue(f"{PREFIX}head_device", ValueType.I32, int(devices.head)),
    ]
    for layer, of_neurons in enumerate(devices.neurons):
        gpus = of_neurons[of_neurons != CPU].astype(np.uint8)
        keys.append(KeyValue(f"{PREFIX}blk.{layer}.gpu", ValueType.ARRAY, gpus, ValueType.U8))
    return keys


def read_devices(
    file: GgufFile, gpu_neurons: Sequence[np.ndarray], ffn_sizes: Sequence[int]
) -> tuple[UnitDevices | None, tuple[int, ...] | None]:
    """Devices and budgets, None and None in a file without; raises ``GpuIndexError`` for keys that contradict the buckets."""
    if f"{PREFIX}gpu_budgets" not in file.key_values:
        return None, None
    budgets = file.value(f"{PREFIX}gpu_budgets", ValueType.ARRAY, ValueType.U64)
    neurons = []
    for layer, (ids, size) in enumerate(zip(gpu_neurons, ffn_sizes, strict=True)):
        gpus = file.value(f"{PREFIX}blk.{layer}.gpu", ValueType.ARRAY, ValueType.U8)
        if len(gpus) != len(ids):
            raise GpuIndexError(f"layer {layer} states {len(gpus)} GPUs of its {len(ids)} neurons on GPUs: {_REMEDY}")
        if len(gpus) and gpus.max() >= len(budgets):
            raise GpuIndexError(f"layer {layer} has neurons on GPU {gpus.max()} of {len(budgets)}: {_REMEDY}")
        of_neurons = np.full(size, CPU, dtype=np.int8)
        of_neurons[ids] = gpus
        neurons.append(of_neurons)
    devices = UnitDevices(
        attention=file.value(f"{PREFIX}attention_device", ValueType.ARRAY, ValueType.I32).astype(np.int64),
        predictor=file.value(f"{PREFIX}predictor_device", ValueType.ARRAY, ValueType.I32).astype(np.int64),
        head=file.value(f"{PREFIX}head_device", ValueType.I32),
        neurons=tuple(neurons),
    )
    return devices, tuple(budgets.tolist())


def check_devices(
    devices: UnitDevices,
    gpu_budgets: Sequence[int],
    gpu_neurons: Sequence[np.ndarray],
    attention_on_gpu: Sequence[bool],
    predictor_on_gpu: Sequence[bool],
    head_on_gpu: bool,
) -> None:
    """Raise ``GpuIndexError`` if *devices* name a GPU that is none, or contradict what is on any GPU."""
    gpus = len(gpu_budgets)
    if not 1 <= gpus <= MAX_GPUS:
        raise GpuIndexError(f"it states {gpus} GPUs, of which this release knows 1 … {MAX_GPUS}: {_REMEDY}")
    for name, of_units, on_gpu in (
        ("attention_device", devices.attention, attention_on_gpu),
        ("predictor_device", devices.predictor, predictor_on_gpu),
        ("head_device", np.array([devices.head]), [head_on_gpu]),
        *(
            (f"layer {i}", at, np.isin(np.arange(len(at)), ids))
            for i, (at, ids) in enumerate(zip(devices.neurons, gpu_neurons, strict=True))
        ),
    ):
        if len(of_units) != len(on_gpu):
            raise GpuIndexError(f"{name} has {len(of_units)} items for {len(on_gpu)}: {_REMEDY}")
        if not ((of_units >= CPU) & (of_units < gpus)).all():
            raise GpuIndexError(f"{name} names a device beyond its {gpus} GPUs: {_REMEDY}")
        if not np.array_equal(of_units != CPU, np.asarray(on_gpu, dtype=bool)):
            raise GpuIndexError(f"{name} contradicts what is on GPUs: {_REMEDY}")
