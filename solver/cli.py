"""``pi-place``: from a workspace's firing counts to a ``.gpuidx``."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi_toolkit.profiler.command_line import (
    FiniteFloatType,
    ToolkitCommand,
    emit_json,
    json_option,
    note,
    percent,
    print_table,
    readable_bytes,
    version_option,
)
from pi_toolkit.profiler.hardware import GIB, Hardware, preset_names

from .machine_choice import resolve_hardware
from .memory import DEFAULT_CONTEXT, DTYPES

if TYPE_CHECKING:
    from pi_toolkit.profiler.workspace import ModelRecord, Workspace

    from .placement import Placement, PlacementRequest

_MAX_GIB = 2.0**20  # a pebibyte; keeps every byte count far inside 64 bits


@click.command(cls=ToolkitCommand)
@click.argument("workspace", type=click.Path(path_type=Path))
@click.option(
    "--vram",
    type=FiniteFloatType(exclusive=True, maximum=_MAX_GIB),
    help="GiB of the GPU's memory.  [default: that of --hardware]",
)
@click.option(
    "--hardware",
    default="auto",
    show_default=True,
    help="Preset or TOML file; auto: this machine, as pi-bench measured it.",
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="File to write.  [default: WORKSPACE/<model>.gpuidx]"
)
@click.option("--ctx", type=click.IntRange(min=1), help="Tokens of KV cache.  [default: 4096, or the model's limit]")
@click.option("--batch-size", type=click.IntRange(1, 2**16), default=1, show_default=True, help="Sequences at once.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", *DTYPES]),
    default="auto",
    show_default=True,
    help="Type the weights will have in memory; auto: the checkpoint's, bfloat16 where the weights are not here.",
)
@click.option(
    "--reserve",
    type=FiniteFloatType(maximum=_MAX_GIB),
    help="GiB of --vram left to context and scratch.  [default: that of --hardware]",
)
@click.option("--sync-seconds", type=FiniteFloatType(), help="Cost of one CPU–GPU synchronisation; 0: none.")
@click.option(
    "--time-limit", type=FiniteFloatType(exclusive=True, maximum=1e6), default=60.0, show_default=True, help="Seconds."
)
@click.option("--model", help="Directory of the weights, for --dtype auto.  [default: where model.json says]")
@json_option
@version_option
def main(
    workspace: Path,
    vram: float | None,
    hardware: str,
    out: Path | None,
    ctx: int | None,
    batch_size: int,
    dtype: str,
    reserve: float | None,
    sync_seconds: float | None,
    time_limit: float,
    model: str | None,
    as_json: bool,
) -> None:
    """Decide which neurons of WORKSPACE live on the GPU, by the integer program of the PowerInfer paper.

    \b
    Example:
      pi-place opt-6.7b-pi --vram 24
    """
    from pi_toolkit.predictor_training.predictor_file import read_hidden_sizes
    from pi_toolkit.profiler import activation_stats
    from pi_toolkit.profiler.atomic_write import check_writable
    from pi_toolkit.profiler.model_gguf import GgufModel
    from pi_toolkit.profiler.workspace import Workspace, read_model

    from . import gpuidx
    from .placement import PlacementRequest, place

    machine = resolve_hardware(hardware, vram)
    place_in = Workspace(workspace)
    record = read_model(place_in)
    path = out or place_in.gpuidx(record)
    check_writable(path, kind="file")
    shape = record.shape
    if ctx is not None and ctx > shape.max_positions:
        raise click.BadParameter(
            f"{ctx} is beyond the model's {shape.max_positions} positions: give at most {shape.max_positions}",
            param_hint="--ctx",
        )

    stats = activation_stats.read(place_in.activation, shape.ffn_sizes, record.fingerprint)
    predictor_hidden = None
    if place_in.is_file:
        predictor_hidden = GgufModel(place_in.path).predictor_widths()
    elif place_in.predictor.exists():
        predictor_hidden = read_hidden_sizes(place_in.predictor, shape.hidden_size, shape.ffn_sizes, record.fingerprint)
    request = PlacementRequest(
        vram_bytes=_gpu_memory_bytes(machine, vram),
        reserve_bytes=_reserve_bytes(machine, reserve),
        dtype=stored_dtype(place_in, record, model) if dtype == "auto" else dtype,
        context=ctx or min(shape.max_positions, DEFAULT_CONTEXT),
        batch_size=batch_size,
        sync_seconds=sync_seconds,
        time_limit_seconds=time_limit,
    )
    if machine.gpu and not request.gpu_budget_bytes:
        note("the reserve takes all of --vram, so nothing goes on the GPU")
    with working("placing neurons"):
        placement = place(shape, stats.counts, machine, request, predictor_hidden)
    if placement.fallback_reason:
        note(f"the greedy placement is used instead of the integer program's: {placement.fallback_reason}")
    gpuidx.write(path, gpu_index(placement, record, machine, request))

    firings = sum(float(counts.sum()) for counts in stats.counts)
    share = float(placement.objective_value) / firings if firings else 0.0
    print_placement(placement, record, request, machine, share, predictor_hidden is not None)
    click.echo(f"placement {path}")
    if as_json:
        emit_json(json_result(placement, request, machine, share) | {"gpuidx": str(path)})


def stored_dtype(workspace: "Workspace", record: "ModelRecord", model: str | None) -> str:
    """The type the checkpoint's FFN weights are stored in; bfloat16, announced, where there is no checkpoint here."""
    from pi_toolkit.profiler.workspace import open_checkpoint

    if model is None and not Path(record.model).exists() and not (model := downloaded(record)):
        note("the weights are not on this disk, so sizes are those of bfloat16: choose with --dtype")
        return "bfloat16"
    name = str(open_checkpoint(workspace, record, model).dtype()).removeprefix("torch.")
    return name if name in DTYPES else "float32"


def downloaded(record: "ModelRecord") -> str | None:
    """The directory of a hub model that an earlier command downloaded; a placement alone is not worth a download."""
    from pi_toolkit.profiler.checkpoint import Checkpoint, locate
    from pi_toolkit.profiler.errors import CheckpointError

    try:
        return str(Checkpoint(locate(record.model, record.revision, local_only=True)).directory)
    except CheckpointError:  # not there, or only its config, from an interrupted download
        return None


def gpu_index(placement: "Placement", record: "ModelRecord", machine: Hardware, request: "PlacementRequest") -> Any:
    """The placement as the file that ``pi-run`` reads; holds nothing of this run's time or place."""
    from .gpuidx import GpuIndex

    return GpuIndex(
        gpu_neurons=placement.gpu_neurons,
        ffn_sizes=record.shape.ffn_sizes,
        vram_capacity_bytes=placement.gpu_neuron_bytes,
        fingerprint=record.fingerprint,
        hardware=machine.name,
        dtype=request.dtype,
        context=request.context,
        batch_size=request.batch_size,
        gpu_budget_bytes=placement.gpu_budget_bytes,
        attention_on_gpu=placement.attention_on_gpu,
        predictor_on_gpu=placement.predictor_on_gpu,
        head_on_gpu=placement.head_on_gpu,
        objective_value=float(placement.objective_value),
        upper_bound=float(placement.upper_bound),
        status=placement.status,
    )


def print_placement(
    placement: "Placement",
    record: "ModelRecord",
    request: "PlacementRequest",
    machine: Hardware,
    share: float,
    has_predictors: bool,
) -> None:
    """One row per layer, then memory, prices and the solver's result."""
    device = {True: "GPU", False: "CPU"}
    print_table(
        {
            "layer": range(record.shape.num_layers),
            "neurons": record.shape.ffn_sizes,
            "on GPU": [len(ids) for ids in placement.gpu_neurons],
            "at least (C_l)": ["never" if fewest is None else fewest for fewest in placement.min_gpu_neurons],
            "attention": [device[on_gpu] for on_gpu in placement.attention_on_gpu],
            "predictor": [device[on_gpu] if has_predictors else "–" for on_gpu in placement.predictor_on_gpu],
        }
    )
    click.echo(
        f"\n{record.name} in {request.dtype} on {machine.name}, {request.context:,} tokens × {request.batch_size}, "
        f"output head on {device[placement.head_on_gpu]}"
    )
    click.echo(
        f"GPU budget {readable_bytes(placement.gpu_budget_bytes)} (reserve {readable_bytes(request.reserve_bytes)}), "
        f"used {readable_bytes(placement.gpu_bytes)}, of that neurons {readable_bytes(placement.gpu_neuron_bytes)}; "
        f"CPU {readable_bytes(placement.cpu_bytes)} of {readable_bytes(machine.cpu_memory_bytes)}"
    )
    if machine.gpu:
        click.echo(_sync_sentence(record, request, machine))
    click.echo(
        f"{percent(share)} of the profile's firings are served from the GPU "
        f"({placement.status}, gap {placement.gap:.1e}, {placement.seconds:.1f} s)"
    )


def json_result(placement: "Placement", request: "PlacementRequest", machine: Hardware, share: float) -> dict[str, Any]:
    """What ``--json`` prints, without the path."""
    return {
        "gpu_budget_bytes": placement.gpu_budget_bytes,
        "gpu_bytes": placement.gpu_bytes,
        "gpu_neuron_bytes": placement.gpu_neuron_bytes,
        "cpu_bytes": placement.cpu_bytes,
        "reserve_bytes": request.reserve_bytes,
        "gpu_neurons": [len(ids) for ids in placement.gpu_neurons],
        "min_gpu_neurons": list(placement.min_gpu_neurons),
        "attention_on_gpu": list(placement.attention_on_gpu),
        "predictor_on_gpu": list(placement.predictor_on_gpu),
        "head_on_gpu": placement.head_on_gpu,
        "objective_value": placement.objective_value,
        "upper_bound": placement.upper_bound,
        "gpu_share_of_firings": share,
        "gap": placement.gap,
        "status": placement.status,
        "seconds": placement.seconds,
        "hardware": machine.name,
        "dtype": request.dtype,
        "context": request.context,
        "batch_size": request.batch_size,
    }


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr, where that is a terminal."""
    from rich.console import Console

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def _sync_sentence(record: "ModelRecord", request: "PlacementRequest", machine: Hardware) -> str:
    from .costs import transfer_seconds

    assert machine.gpu is not None
    if request.sync_seconds is not None:
        return f"synchronisation T_sync {request.sync_seconds * 1e6:.1f} µs, as given"
    transfer = transfer_seconds(machine.gpu, record.shape.hidden_size, request.batch_size)
    origin = "assumed, not measured" if machine.name in preset_names() else "stated by the hardware file"
    return (
        f"synchronisation T_sync {(machine.gpu.sync_seconds + transfer) * 1e6:.1f} µs: "
        f"{machine.gpu.sync_seconds * 1e6:.1f} µs ({origin}) and {transfer * 1e6:.1f} µs of transfer"
    )


def _gpu_memory_bytes(machine: Hardware, vram: float | None) -> int:
    if machine.gpu is None:
        return 0
    return machine.gpu.memory_bytes if vram is None else int(vram * GIB)


def _reserve_bytes(machine: Hardware, reserve: float | None) -> int:
    if machine.gpu is None:
        return 0
    return machine.gpu.reserve_bytes if reserve is None else int(reserve * GIB)
