"""``pi-place --explain``: where every byte of the budget goes, and what each layer costs."""

from collections.abc import Sequence

import click
import numpy as np

from pi_toolkit.profiler.command_line import percent, print_table, readable_bytes
from pi_toolkit.profiler.hardware import Hardware

from .placement import Placement, PlacementRequest
from .placement_report import device_name
from .token_time import CPU, is_split


def print_explanation(
    placement: Placement, request: PlacementRequest, machine: Hardware, counts: Sequence[np.ndarray]
) -> None:
    """The budget as a table, the hottest of what stays on the CPU, and one row per layer."""
    _print_budget(placement, request, machine)
    click.echo()
    _print_layers(placement, counts)
    time = placement.time
    click.echo(
        f"\na token: attention {_ms(time.attention_seconds.sum())}, predictors {_ms(time.predictor_seconds.sum())}, neurons "
        f"{_ms(np.maximum(time.gpu_seconds, time.cpu_seconds).sum())}, synchronisation {_ms(time.sync_seconds.sum())}, head "
        f"{_ms(time.head_seconds)}: {_ms(time.total_seconds)} with a full KV cache, {time.tokens_per_second:.2f} tokens/s "
        f"in mode {request.mode}\n"
    )


def _print_budget(placement: Placement, request: PlacementRequest, machine: Hardware) -> None:
    """Bytes by what they are for (rows) and where they are (columns)."""
    devices, units, gpus = placement.devices, placement.units, len(placement.gpu_budgets)
    layers = len(units.attention)
    weights = np.array(units.attention, dtype=np.int64) - units.kv_cache
    predictor = np.array(units.predictor, dtype=np.int64)
    rows: dict[str, list[int]] = {"attention": [], "KV cache": [], "predictors": [], "output head": [], "neurons": []}
    rows |= {"embedding": [], "CUDA context": [], "prompt scratch": [], "margin": []}
    for device in [*range(gpus), CPU]:
        at = devices.attention == device
        rows["attention"].append(int(weights[at].sum()))
        rows["KV cache"].append(units.kv_cache * int(at.sum()))
        rows["predictors"].append(int(predictor[devices.predictor == device].sum()))
        head = devices.head == device and not (device == CPU and units.head_is_embedding)
        rows["output head"].append(units.head if head else 0)
        rows["neurons"].append(sum(int((layer == device).sum()) for layer in devices.neurons) * units.neuron)
        rows["embedding"].append(units.embedding if device == CPU else 0)
        kept = _kept(request, machine, device)
        for name, num_bytes in zip(("CUDA context", "prompt scratch", "margin"), kept, strict=True):
            rows[name].append(num_bytes)
    names = [device_name(device, gpus) for device in [*range(gpus), CPU]]
    table: dict[str, Sequence[object]] = {"bytes of": [*rows, "free", "sum"]}
    limits = [*_memory(request), machine.cpu_memory_bytes]
    for column, (name, limit) in enumerate(zip(names, limits, strict=True)):
        taken = [row[column] for row in rows.values()]
        table[name] = [readable_bytes(b) if b else "–" for b in [*taken, max(0, limit - sum(taken)), limit]]
    click.echo(f"{layers} layers, one neuron {readable_bytes(units.neuron)}, groups of {request.group_size} neurons")
    print_table(table)


def _print_layers(placement: Placement, counts: Sequence[np.ndarray]) -> None:
    devices, units, time = placement.devices, placement.units, placement.time
    shares, neuron_bytes, rows = [], [], []
    for layer_counts, layer in zip(counts, devices.neurons, strict=True):
        on_gpu = layer != CPU
        total = float(layer_counts.sum())
        shares.append(percent(float(layer_counts[on_gpu].sum()) / total) if total else "–")
        rows.append(int(on_gpu.sum()))
        neuron_bytes.append(readable_bytes(int(on_gpu.sum()) * units.neuron))
    fastest = max(placement.speeds.gpu_bytes_per_second, default=0.0)
    print_table(
        {
            "layer": range(len(rows)),
            "neurons": rows,
            "bytes": neuron_bytes,
            "T_gpu µs": [_us(seconds) for seconds in time.gpu_seconds],
            "T_cpu µs": [_us(seconds) for seconds in time.cpu_seconds],
            "C_l": ["never" if fewest is None else fewest for fewest in placement.min_gpu_neurons],
            "y_l": is_split(units, devices).astype(int).tolist(),
            "firings on GPU": shares,
            "layer µs": [_us(seconds) for seconds in time.layer_seconds],
        }
    )
    one = [units.neuron / speed * 1e9 for speed in (fastest, placement.speeds.cpu_bytes_per_second) if speed]
    click.echo(
        "T_gpu, T_cpu: the neurons of a layer, by what a token is expected to read; one whole neuron takes "
        + " ns on the GPU, ".join(f"{nanoseconds:.1f}" for nanoseconds in one)
        + " ns on the CPU; y_l: whether the layer is divided"
    )


def _kept(request: PlacementRequest, machine: Hardware, device: int) -> tuple[int, int, int]:
    """CUDA context, prompt scratch and margin of a GPU; a --reserve that was given is all margin."""
    if device == CPU:
        return 0, 0, 0
    gpu = machine.gpus[device]
    reserve = request.reserve_bytes if isinstance(request.reserve_bytes, int) else request.reserve_bytes[device]
    if reserve == gpu.reserve_bytes:
        return gpu.context_bytes, gpu.scratch_bytes, gpu.margin_bytes
    return 0, 0, reserve


def _memory(request: PlacementRequest) -> tuple[int, ...]:
    return request.vram_bytes if isinstance(request.vram_bytes, tuple) else (request.vram_bytes,)


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


def _ms(seconds: float) -> str:
    return f"{float(seconds) * 1e3:.2f} ms"
