"""Which placement a run uses: the workspace's file, another one, or one that is solved for this run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pi_toolkit.predictor_training.predictor_size import PredictorSize
from pi_toolkit.profiler import activation_stats
from pi_toolkit.profiler.command_line import note, readable_bytes
from pi_toolkit.profiler.hardware import GIB
from pi_toolkit.profiler.workspace import ModelRecord, Workspace
from pi_toolkit.solver import gpuidx
from pi_toolkit.solver.cli import gpu_index
from pi_toolkit.solver.gpuidx import GpuIndex
from pi_toolkit.solver.machine_choice import resolve_hardware
from pi_toolkit.solver.placement import PlacementRequest, place

from .kernels.sparse_ffn_reference import Mode

TIME_LIMIT_SECONDS = 20.0  # of solving, before the text begins


@dataclass(frozen=True)
class PlacementOptions:
    """``gpuidx``: a file in place of the workspace's. ``budget_gib``: of the GPU's memory for the model; what a file places
    beyond it is placed anew, for this run. ``reset``: solve again and write the file. ``disabled``: heed no file and place no
    neuron on the GPU."""

    gpuidx: Path | None = None
    budget_gib: float | None = None
    reset: bool = False
    disabled: bool = False

    @property
    def solves_without_file(self) -> bool:
        return self.budget_gib is not None or self.reset


@dataclass(frozen=True)
class RunConditions:
    """What a placement for this run is solved for."""

    dtype: str
    context: int
    slots: int
    mode: Mode
    predictor_sizes: Sequence[PredictorSize] | None
    budget_bytes: int


def find_placement(workspace: Workspace, record: ModelRecord, options: PlacementOptions) -> GpuIndex | None:
    """The placement in a file, unless the options say otherwise; announces that there is none."""
    if options.disabled or options.reset:
        return None
    path = options.gpuidx or workspace.gpuidx(record)
    if options.gpuidx is None and not path.exists():
        if options.budget_gib is None:
            where = "beside the file" if workspace.is_file else "in the workspace"
            note(f"no placement {where}: every neuron is on the CPU (pi-place makes one)")
        return None
    return gpuidx.read(path, record.shape.ffn_sizes, record.fingerprint)


def placement_of_run(
    workspace: Workspace,
    record: ModelRecord,
    options: PlacementOptions,
    found: GpuIndex | None,
    found_bytes: int,
    conditions: Callable[[], RunConditions],
) -> GpuIndex | None:
    """*found*, which takes up to *found_bytes* on a GPU under the run's conditions, or a placement that is solved now.

    Raises what reading the firing counts and solving raise.
    """
    if found is not None:
        if options.budget_gib is None:
            return found
        wanted = conditions()
        if found_bytes <= wanted.budget_bytes:
            return found
        note(
            f"the placement takes {readable_bytes(found_bytes)} of GPU memory and {readable_bytes(wanted.budget_bytes)} may "
            "be used, so neurons are placed anew, for this run only (--reset-gpu-index keeps it)"
        )
        return solved(workspace, record, wanted)
    if options.disabled:
        return without_neurons(solved(workspace, record, conditions())) if options.budget_gib is not None else None
    if not options.solves_without_file:
        return None
    index = solved(workspace, record, conditions())
    if options.reset:
        path = options.gpuidx or workspace.gpuidx(record)
        gpuidx.write(path, index)
        note(f"placement {path}")
    return index


def solved(workspace: Workspace, record: ModelRecord, wanted: RunConditions) -> GpuIndex:
    """A placement on one GPU, in ``budget_bytes``, by the firing counts of *workspace*; in memory."""
    shape = record.shape
    stats = activation_stats.read(workspace.activation, shape.ffn_sizes, record.fingerprint)
    machine = resolve_hardware("auto", max(wanted.budget_bytes, 1) / GIB)
    machine = replace(machine, gpus=machine.gpus[:1])
    request = PlacementRequest(
        vram_bytes=wanted.budget_bytes,
        reserve_bytes=0,  # the budget is the model's alone
        dtype=wanted.dtype,
        context=wanted.context,
        batch_size=wanted.slots,
        objective="latency",
        tokens=stats.tokens,
        mode=wanted.mode,
        time_limit_seconds=TIME_LIMIT_SECONDS,
    )
    placement = place(shape, stats.counts, machine, request, wanted.predictor_sizes)
    if placement.fallback_reason:
        note(placement.fallback_reason)
    note(f"placed on the GPU: {readable_bytes(placement.gpu_bytes)} of at most {readable_bytes(wanted.budget_bytes)}")
    return gpu_index(placement, record, machine, request)


def without_neurons(index: GpuIndex) -> GpuIndex:
    """Attention, predictors and head as in *index*, all neurons on the CPU."""
    nothing = tuple(np.empty(0, np.int32) for _ in index.gpu_neurons)
    return replace(index, gpu_neurons=nothing, vram_capacity_bytes=0)
