"""``pi-bench --machine``: measures this machine and writes its hardware file, the numbers placements are computed from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pi_toolkit.profiler.atomic_write import check_writable
from pi_toolkit.profiler.command_line import emit_json, percent, print_table, progress_bar
from pi_toolkit.profiler.hardware import Gpu, Hardware, write_hardware
from pi_toolkit.profiler.this_machine import cpu_name, memory_bytes

from . import machine
from .conditions import load_average, usable_cores, warn_if_busy
from .machine import GpuSpeed, SparseLayers

DENSITIES = (0.1, 1.0)
SCRATCH_BYTES = 2 * 512 * 32768 * 4  # of a prompt: 512 tokens × 32768 neurons, twice, in float32
MARGIN_BYTES = 2**27


def measure_machine(out: Path, threads: int, as_json: bool) -> None:
    """Measure for 1 … *threads* threads, print the table and write *out*."""
    check_writable(out)
    warn_if_busy()
    layers = machine.LAYERS
    rows: list[dict[str, Any]] = []
    with progress_bar("measuring", 4 * threads, "figures") as bar:
        buffer = machine.ReadBuffer(machine.READ_BYTES)
        for count in range(1, threads + 1):
            rows.append({"threads": count, "kernel": buffer.by_kernel(count), "sum": buffer.by_sum(count)})
            bar.advance(2)
        del buffer
        kernel = machine.SparseKernel(layers)
        for row in rows:
            for density in DENSITIES:
                row[f"sparse_{density:g}"] = kernel.bytes_per_second(row["threads"], density)
            bar.advance(2)
        del kernel
    for row in rows:
        row["read"] = max(row["kernel"] or 0.0, row["sum"])
    gpus = machine.measure_gpus()
    print_table(_table(rows))
    for gpu in gpus:
        click.echo(
            f"{gpu.name}: memory {_gigabytes(gpu.bytes_per_second)} GB/s, PCIe {_gigabytes(gpu.pcie_bytes_per_second)} GB/s, "
            f"one synchronisation {1e6 * gpu.sync_seconds:.1f} µs"
        )
    best = max(rows, key=lambda row: row["read"])
    hardware = _hardware(out, best["read"], gpus)
    write_hardware(out, hardware, _sources(best, layers))
    click.echo(f"{cpu_name()}, {threads} threads, {layers.layers} layers of {layers.hidden} × {layers.neurons} in BF16")
    click.echo(f"hardware file {out}")
    if as_json:
        emit_json(_json(out, rows, gpus, layers))


def _table(rows: list[dict[str, Any]]) -> dict[str, Sequence[object]]:
    table: dict[str, Sequence[object]] = {
        "threads": [row["threads"] for row in rows],
        "read GB/s": [_gigabytes(row["read"]) for row in rows],
        "by kernel": [_gigabytes(row["kernel"]) for row in rows],
        "by sum": [_gigabytes(row["sum"]) for row in rows],
    }
    for density in DENSITIES:
        speeds = [row[f"sparse_{density:g}"] for row in rows]
        table[f"sparse {percent(density)}"] = [_gigabytes(speed) for speed in speeds]
        table[f"share {density:g}"] = [
            "–" if speed is None else percent(speed / row["read"]) for speed, row in zip(speeds, rows, strict=True)
        ]
    return table


def _gigabytes(speed: float | None) -> str:
    return "–" if speed is None else f"{speed / 1e9:.1f}"


def _hardware(out: Path, bytes_per_second: float, gpus: Sequence[GpuSpeed]) -> Hardware:
    return Hardware(out.stem, cpu_name(), memory_bytes(), bytes_per_second, tuple(_gpu(speed) for speed in gpus))


def _gpu(speed: GpuSpeed) -> Gpu:
    return Gpu(**vars(speed), scratch_bytes=SCRATCH_BYTES, margin_bytes=MARGIN_BYTES)


def _sources(best: dict[str, Any], layers: SparseLayers) -> dict[str, str]:
    """The comment beside each number."""
    measured = f"measured, {best['threads']} threads reading from beginning to end"
    sparse = best[f"sparse_{DENSITIES[0]:g}"]
    if sparse is not None:
        what = f"{percent(DENSITIES[0])} of {layers.neurons} neurons"
        measured += f"; the sparse kernel reads {what} at {_gigabytes(sparse)} GB/s"
    return {
        "cpu.memory_gib": "of the operating system",
        "cpu.bandwidth_gb_per_second": measured,
        "gpu.memory_gib": "of the driver",
        "gpu.bandwidth_gb_per_second": "measured, a sum over its memory",
        "gpu.pcie_gb_per_second": "measured, copies from pinned memory",
        "gpu.sync_seconds": "measured, a tiny kernel and the wait for it",
        "gpu.context_gib": "in use before anything was allocated: the context, and what other programs hold",
        "gpu.scratch_gib": "buffers of a prompt: 512 tokens × 32768 neurons × 4 bytes, twice",
        "gpu.margin_gib": "assumed",
    }


def _json(out: Path, rows: list[dict[str, Any]], gpus: Sequence[GpuSpeed], layers: SparseLayers) -> dict[str, Any]:
    return {
        "hardware": str(out),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "load_average": load_average(),
        "sparse_layers": vars(layers),
        "bandwidth": [
            {
                "threads": row["threads"],
                "read_bytes_per_second": row["read"],
                "kernel_bytes_per_second": row["kernel"],
                "sum_bytes_per_second": row["sum"],
                "sparse": [
                    {
                        "density": density,
                        "bytes_per_second": (speed := row[f"sparse_{density:g}"]),
                        "share": None if speed is None else speed / row["read"],
                    }
                    for density in DENSITIES
                ],
            }
            for row in rows
        ],
        "gpus": [vars(gpu) for gpu in gpus],
    }
