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
    version_option,
)
from pi_toolkit.profiler.hardware import GIB, Hardware

from .machine_choice import resolve_hardware
from .memory import DEFAULT_CONTEXT, DTYPES
from .neuron_groups import GROUP_NEURONS, MAX_GROUPS, group_size_within
from .placement_inputs import LARGEST_GIB, PinType, VramType, read_predictors, stored_dtype, with_vram

if TYPE_CHECKING:
    from pi_toolkit.profiler.workspace import ModelRecord

    from .placement import Placement, PlacementRequest

# PowerInfer's CUDA kernel for Q4_0 drops the rows of a layer beyond a multiple of this.
POWERINFER_BLOCK = 256


@click.command(cls=ToolkitCommand)
@click.argument("workspace", type=click.Path(path_type=Path))
@click.option("--vram", type=VramType(), help="GiB of the GPU's memory, or of several: 24,24.  [default: --hardware's]")
@click.option(
    "--hardware",
    default="auto",
    show_default=True,
    help="Preset or TOML file; auto: this machine, as pi-bench measured it.",
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), help="File to write.  [default: WORKSPACE/<model>.gpuidx]"
)
@click.option(
    "--objective",
    type=click.Choice(["latency", "firings"]),
    default="latency",
    show_default=True,
    help="Shortest predicted time of a token, or most firings on the GPU (the paper's).",
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
    "--mode",
    type=click.Choice(["auto", "predicted", "exact", "dense"]),
    default="auto",
    show_default=True,
    help="Mode of pi-run whose time is predicted; auto: predicted with predictors, else exact.",
)
@click.option(
    "--reserve",
    type=FiniteFloatType(maximum=LARGEST_GIB),
    help="GiB of every GPU left to context, scratch and margin.  [default: those of --hardware]",
)
@click.option(
    "--max-cpu-gib", type=FiniteFloatType(exclusive=True, maximum=LARGEST_GIB), help="GiB of the CPU's memory."
)
@click.option("--sync-seconds", type=FiniteFloatType(maximum=1e9), help="Cost of one CPU–GPU synchronisation; 0: none.")
@click.option("--pin", type=PinType(), multiple=True, help="LAYER=COUNT neurons on the GPU, the hottest; repeatable.")
@click.option("--min-gpu-neurons", type=click.IntRange(min=0), help="Fewest neurons of a layer, in place of C_l.")
@click.option("--group-size", type=click.IntRange(1, 2**20), help="Neurons placed together.  [default: 64; .gguf: 256]")
@click.option("--solver", type=click.Choice(["cbc", "highs", "greedy"]), default="cbc", show_default=True)
@click.option(
    "--time-limit", type=FiniteFloatType(exclusive=True, maximum=1e6), default=60.0, show_default=True, help="Seconds."
)
@click.option(
    "--gap", type=FiniteFloatType(maximum=1.0), default=1e-4, show_default=True, help="Stop this close to the best."
)
@click.option("--explain", is_flag=True, help="Print the budget, and what every layer costs.")
@click.option("--model", help="Directory of the weights, for --dtype auto.  [default: where model.json says]")
@json_option
@version_option
def main(
    workspace: Path,
    vram: tuple[float, ...] | None,
    hardware: str,
    out: Path | None,
    ctx: int | None,
    dtype: str,
    mode: str,
    reserve: float | None,
    max_cpu_gib: float | None,
    pin: tuple[tuple[int, int], ...],
    group_size: int | None,
    explain: bool,
    model: str | None,
    as_json: bool,
    **choices: Any,
) -> None:
    """Decide which parts of the model in WORKSPACE, a directory or a .powerinfer.gguf, live on the GPU.

    \b
    Example:
      pi-place opt-6.7b-pi --vram 24
    """
    from pi_toolkit.profiler import activation_stats
    from pi_toolkit.profiler.atomic_write import check_writable
    from pi_toolkit.profiler.workspace import Workspace, read_model

    from . import gpuidx
    from .explain import print_explanation
    from .placement import PlacementRequest, place
    from .placement_report import json_result, print_placement

    machine = with_vram(resolve_hardware(hardware, max(vram) if vram else None), vram)
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
    kept_dtype = stored_dtype(place_in, record, model) if dtype == "auto" else dtype
    predictors = read_predictors(place_in, record, kept_dtype)
    for_powerinfer = place_in.is_file and group_size is None
    request = PlacementRequest(
        vram_bytes=tuple(gpu.memory_bytes for gpu in machine.gpus),
        reserve_bytes=tuple(gpu.reserve_bytes if reserve is None else int(reserve * GIB) for gpu in machine.gpus),
        dtype=kept_dtype,
        context=ctx or min(shape.max_positions, DEFAULT_CONTEXT),
        predictor_dtype=predictors.dtype,
        tokens=stats.tokens,
        mode=mode if mode != "auto" else "predicted" if predictors.sizes else "exact",  # type: ignore[arg-type]
        overshoot=predictors.overshoot,
        group_size=_group_size(shape.ffn_sizes, group_size or (POWERINFER_BLOCK if for_powerinfer else GROUP_NEURONS)),
        whole_groups=for_powerinfer,
        pins=dict(pin),
        max_cpu_bytes=None if max_cpu_gib is None else int(max_cpu_gib * GIB),
        time_limit_seconds=choices.pop("time_limit"),
        **choices,
    )
    if machine.gpu and not request.gpu_budget_bytes:
        note("the reserve takes all of --vram, so nothing goes on the GPU")
    with working("placing neurons"):
        placement = place(shape, stats.counts, machine, request, predictors.sizes)
    if placement.fallback_reason:
        note(placement.fallback_reason)
    gpuidx.write(path, gpu_index(placement, record, machine, request))

    if explain:
        print_explanation(placement, request, machine, stats.counts)
    print_placement(placement, record, request, machine)
    click.echo(f"placement {path}")
    if as_json:
        emit_json(json_result(placement, request, machine) | {"gpuidx": str(path)})


def gpu_index(placement: "Placement", record: "ModelRecord", machine: Hardware, request: "PlacementRequest") -> Any:
    """The placement as the file that ``pi-run`` reads; holds nothing of this run's time or place."""
    from .gpuidx import GpuIndex

    several = len(placement.gpu_budgets) > 1
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
        upper_bound=float(placement.bound),
        status=placement.status,
        objective=placement.objective,
        devices=placement.devices if several else None,
        gpu_budgets=placement.gpu_budgets if several else None,
    )


def _group_size(ffn_sizes: tuple[int, ...], wanted: int) -> int:
    size = group_size_within(ffn_sizes, wanted)
    if size != wanted:
        note(f"groups of {wanted} neurons would be more than {MAX_GROUPS:,}, so {size} are placed together")
    return size


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
