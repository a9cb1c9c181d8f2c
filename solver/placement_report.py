"""What ``pi-place`` says about a placement: the table, the sentences below it, and the JSON object."""

from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from pi_toolkit.profiler.command_line import percent, print_table, readable_bytes
from pi_toolkit.profiler.hardware import Hardware, preset_names
from pi_toolkit.profiler.workspace import ModelRecord

from .costs import transfer_seconds
from .placement import Placement, PlacementRequest
from .token_time import CPU


def device_name(device: int, gpus: int) -> str:
    """``CPU``, ``GPU``, or ``GPU 1`` where there are several."""
    if device == CPU:
        return "CPU"
    return "GPU" if gpus == 1 else f"GPU {device}"


def print_placement(placement: Placement, record: ModelRecord, request: PlacementRequest, machine: Hardware) -> None:
    """One row per layer, then memory, prices, the solver's result, and the comparison."""
    gpus, devices = len(placement.gpu_budgets), placement.devices
    has_predictor = [num_bytes > 0 for num_bytes in placement.units.predictor]
    print_table(
        {
            "layer": range(record.shape.num_layers),
            "neurons": record.shape.ffn_sizes,
            "on GPU": [_counts(layer, gpus) for layer in devices.neurons],
            "at least (C_l)": ["never" if fewest is None else fewest for fewest in placement.min_gpu_neurons],
            "attention": [device_name(int(device), gpus) for device in devices.attention],
            "predictor": [
                device_name(int(device), gpus) if present else "–"
                for device, present in zip(devices.predictor, has_predictor, strict=True)
            ],
        }
    )
    click.echo(
        f"\n{record.name} in {request.dtype} on {machine.name}, {request.context:,} tokens × {request.batch_size}, "
        f"output head on {device_name(devices.head, gpus)}"
    )
    for gpu, (budget, used) in enumerate(zip(placement.gpu_budgets, placement.gpu_used, strict=True)):
        neurons = sum(int((layer == gpu).sum()) for layer in devices.neurons) * placement.units.neuron
        click.echo(
            f"{device_name(gpu, gpus)} budget {readable_bytes(budget)} (reserve {readable_bytes(_reserve(request, gpu))}), "
            f"used {readable_bytes(used)}, of that neurons {readable_bytes(neurons)}"
        )
    click.echo(f"CPU {readable_bytes(placement.cpu_bytes)} of {readable_bytes(machine.cpu_memory_bytes)}")
    if machine.gpu:
        click.echo(_sync_sentence(record, request, machine))
    click.echo(f"{percent(gpu_share_of_firings(placement))} of the profile's firings are served from the GPU")
    click.echo(comparison(placement))
    unproven = "" if placement.status == "optimal" else f": another may be up to {100 * placement.gap:.2g} % better"
    click.echo(
        f"objective {placement.objective}: {placement.status}, gap {placement.gap:.1e}, {placement.seconds:.1f} s{unproven}"
    )


def comparison(placement: Placement) -> str:
    """``random … / layer-wise … / paper … / this … tokens/s``, as predicted."""
    speeds = placement.rivals | {"this": placement.time.tokens_per_second}
    return f"predicted: {' / '.join(f'{name} {_speed(speed)}' for name, speed in speeds.items())} tokens/s"


def gpu_share_of_firings(placement: Placement) -> float:
    """Of all firings of the profile."""
    return float(placement.gpu_firings) / placement.all_firings if placement.all_firings else 0.0


def json_result(placement: Placement, request: PlacementRequest, machine: Hardware) -> dict[str, Any]:
    """What ``--json`` prints, without the path."""
    several = len(placement.gpu_budgets) > 1
    result = {
        "gpu_budget_bytes": placement.gpu_budget_bytes,
        "gpu_bytes": placement.gpu_bytes,
        "gpu_neuron_bytes": placement.gpu_neuron_bytes,
        "cpu_bytes": placement.cpu_bytes,
        "reserve_bytes": sum(_reserve(request, gpu) for gpu in range(len(placement.gpu_budgets))),
        "gpu_neurons": [len(ids) for ids in placement.gpu_neurons],
        "min_gpu_neurons": list(placement.min_gpu_neurons),
        "attention_on_gpu": list(placement.attention_on_gpu),
        "predictor_on_gpu": list(placement.predictor_on_gpu),
        "head_on_gpu": placement.head_on_gpu,
        "objective": placement.objective,
        "objective_value": placement.objective_value,
        "bound": placement.bound,
        "gpu_share_of_firings": gpu_share_of_firings(placement),
        "predicted_seconds_per_token": placement.time.total_seconds,
        "predicted_tokens_per_second": placement.time.tokens_per_second,
        "rivals_tokens_per_second": placement.rivals,
        "gap": placement.gap,
        "status": placement.status,
        "seconds": placement.seconds,
        "hardware": machine.name,
        "dtype": request.dtype,
        "context": request.context,
        "batch_size": request.batch_size,
        "mode": request.mode,
        "group_size": request.group_size,
    }
    if several:
        result["gpus"] = [
            {
                "budget_bytes": budget,
                "bytes": used,
                "neurons": [int((layer == gpu).sum()) for layer in placement.devices.neurons],
                "attention_layers": np.flatnonzero(placement.devices.attention == gpu).tolist(),
            }
            for gpu, (budget, used) in enumerate(zip(placement.gpu_budgets, placement.gpu_used, strict=True))
        ]
    return result


def _speed(tokens_per_second: float | None) -> str:
    if tokens_per_second is None:
        return "–"
    return f"{tokens_per_second:,.2f}" if tokens_per_second < 100 else f"{tokens_per_second:,.0f}"


def _counts(layer: np.ndarray, gpus: int) -> str:
    """Neurons on the GPU, or on each: ``512+448``."""
    return "+".join(str(int((layer == gpu).sum())) for gpu in range(gpus)) or "0"


def _reserve(request: PlacementRequest, gpu: int) -> int:
    reserve: int | Sequence[int] = request.reserve_bytes
    return reserve if isinstance(reserve, int) else reserve[gpu]


def _sync_sentence(record: ModelRecord, request: PlacementRequest, machine: Hardware) -> str:
    assert machine.gpu is not None
    if request.sync_seconds is not None:
        return f"synchronisation T_sync {request.sync_seconds * 1e6:.1f} µs, as given"
    transfer = transfer_seconds(machine.gpu, record.shape.hidden_size, request.batch_size)
    origin = "assumed, not measured" if machine.name in preset_names() else "stated by the hardware file"
    return (
        f"synchronisation T_sync {(machine.gpu.sync_seconds + transfer) * 1e6:.1f} µs: "
        f"{machine.gpu.sync_seconds * 1e6:.1f} µs ({origin}) and {transfer * 1e6:.1f} µs of transfer"
    )
