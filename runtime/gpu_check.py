"""``python -m pi_toolkit.runtime.gpu_check``: measures the hybrid on a GPU, with a model of random weights made there.

For every type of weights and every budget of the GPU's memory: tokens per second of each mode, with and without a graph,
bytes per second on each side, time per layer by part, and ``transformers`` with ``accelerate`` under the same cap. Writes
JSON and a trace. ``make gpu-check`` runs the GPU's tests first. With ``--device cpu`` and a small ``--layers`` it runs
anywhere, which shows that it runs, and measures nothing of interest.
"""

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi_toolkit.profiler.atomic_write import atomic_file
from pi_toolkit.profiler.command_line import ToolkitCommand, note, print_table
from pi_toolkit.profiler.hardware import Gpu, Hardware
from pi_toolkit.profiler.this_machine import cpu_name, memory_bytes

from .kernels.packed_matrix import KINDS, Kind
from .kernels.sparse_ffn_reference import Mode
from .synthetic_model import SyntheticModel, SyntheticSize, all_candidates_fire, counts_of
from .tier_plan import TierPlan

if TYPE_CHECKING:
    import torch

    from .weights import ModelWeights

MODES: tuple[Mode, ...] = ("predicted", "exact", "dense")
COPY_BYTES = 2**31


@dataclass(frozen=True)
class CheckOptions:
    """``density``: share of the neurons that fire. ``seconds``: after so many nothing new is begun."""

    size: SyntheticSize
    kinds: tuple[Kind, ...]
    budgets: tuple[int, ...]  # per cent of the weights
    device: "torch.device"
    threads: int
    density: float
    seconds: float
    run_seconds: float
    most_tokens: int


@click.command(cls=ToolkitCommand)
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path("gpu-check.json"), show_default=True)
@click.option("--trace", type=click.Path(path_type=Path), help="File for torch.profiler's trace of three tokens.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--kinds", default="float16,q4_0", show_default=True, help="Types of the weights.")
@click.option("--budgets", default="50,25,100", show_default=True, help="Per cent of the weights on the GPU.")
@click.option("--density", type=float, default=0.1, show_default=True)
@click.option("--seconds", type=float, default=300.0, show_default=True, help="Begin nothing new after so many.")
@click.option("--run-seconds", type=float, default=1.5, show_default=True, help="Of decoding per figure.")
@click.option("--tokens", type=click.IntRange(min=2), default=64, show_default=True, help="At most, per figure.")
@click.option("--hidden", type=int, default=4096, show_default=True)
@click.option("--neurons", type=int, default=11008, show_default=True)
@click.option("--layers", type=int, default=32, show_default=True)
@click.option("--heads", type=int, default=32, show_default=True)
@click.option("--vocabulary", type=int, default=32000, show_default=True)
def main(
    out: Path,
    trace: Path | None,
    device: str,
    threads: int,
    kinds: str,
    budgets: str,
    density: float,
    seconds: float,
    run_seconds: float,
    tokens: int,
    **size: int,
) -> None:
    """Measure the hybrid of GPU and CPU with a synthetic ReLU LLaMA, of 7B parameters unless sizes are given.

    \b
    Example:
      python -m pi_toolkit.runtime.gpu_check -o gpu-check.json
    """
    import torch

    from pi_toolkit.profiler.device import resolve_device

    chosen: Any = tuple(kinds.split(","))
    if not set(chosen) <= set(KINDS):
        raise click.BadParameter(f"{kinds!r} is no list of {', '.join(KINDS)}: give some of them", param_hint="--kinds")
    torch.set_num_threads(threads)
    where = resolve_device(device)
    if where.type == "cuda":
        where = torch.device("cuda", where.index or 0)
        torch.cuda.set_device(where)
    shares = tuple(int(part) for part in budgets.split(","))
    options = CheckOptions(SyntheticSize(**size), chosen, shares, where, threads, density, seconds, run_seconds, tokens)
    result = check(options, trace, lambda partial: _write(out, partial))
    _print(result)
    click.echo(f"figures {out}")


def check(options: CheckOptions, trace: Path | None, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All figures; *save* is called after each model, so that what was measured outlives whatever comes after."""
    from .gpu_check_measure import copy_bytes_per_second

    began = time.perf_counter()
    result: dict[str, Any] = machine_facts(options)
    result["copy_bytes_per_second"], result["models"], result["offload"] = None, [], []

    def left() -> float:
        return options.seconds - (time.perf_counter() - began)

    def keep() -> None:
        save(result | {"seconds": time.perf_counter() - began})

    copy_bytes = COPY_BYTES if options.device.type == "cuda" else 2**24
    result |= guarded(lambda: {"copy_bytes_per_second": copy_bytes_per_second(options.device, copy_bytes)}, "copy")
    for kind in options.kinds:
        for percent in options.budgets:
            case: dict[str, Any] = {"kind": kind, "budget_percent": percent}
            result["models"].append(case)
            if left() <= 0:
                case["not_measured"] = "out of time"
                continue
            note(f"{kind}, {percent} % of the weights on the GPU ({left():.0f} s left)")
            trace_file = trace if case is result["models"][0] else None
            case |= guarded(lambda c=case, t=trace_file: measure_model(options, c, t, left, keep))  # type: ignore[misc]
            keep()
            free()
        if kind == "float16":
            for percent in sorted(options.budgets):
                result["offload"].append({"budget_percent": percent} | measure_offload(options, percent, left))
                keep()
                free()
    result["seconds"] = time.perf_counter() - began
    save(result)
    return result


def measure_model(
    options: CheckOptions,
    case: dict[str, Any],
    trace_file: Path | None,
    left: Callable[[], float],
    keep: Callable[[], None],
) -> dict[str, Any]:
    """One type of weights under one budget: adds to *case* what is found, and calls *keep* after each mode."""
    from . import gpu_check_measure as measuring
    from .decoder import Decoder

    plan, placed = plan_for(options, case["kind"], case["budget_percent"])
    before, began = allocated_bytes(options), time.perf_counter()
    weights = SyntheticModel(options.size, case["kind"], plan, options.density).weights()
    case |= placed | {"loading_seconds": time.perf_counter() - began, "modes": {}}
    if options.device.type == "cuda":
        case["gpu_allocated_bytes"] = allocated_bytes(options) - before
    shape = options.size.shape

    def decoding(decoder: Decoder) -> dict[str, Any]:
        return measuring.tokens_per_second(decoder, options.most_tokens, options.run_seconds)

    def anew(decoder: Decoder) -> dict[str, Any]:
        with measuring.launched_anew(decoder):
            return decoding(decoder)

    for mode in MODES:
        figures: dict[str, Any] = {}
        case["modes"][mode] = figures
        if left() <= 0:
            figures["not_measured"] = "out of time"
            continue
        runs: ModelWeights = all_candidates_fire(weights) if mode == "predicted" else weights
        decoder = Decoder(shape, runs, 1, options.size.context, mode, options.threads)
        figures |= guarded(lambda d=decoder: decoding(d))  # type: ignore[misc]
        figures["path"] = measuring.path_of(decoder)
        keep()
        if figures["path"] == "graph":
            figures["eager"] = guarded(lambda d=decoder: anew(d))  # type: ignore[misc]
            texts = [found.get("token_ids", ()) for found in (figures, figures["eager"])]
            if all(texts):
                figures["graph_and_eager_agree"] = all(a == b for a, b in zip(*texts, strict=False))
        if trace_file is not None and mode == MODES[0]:
            figures |= guarded(lambda d=decoder, t=trace_file: measuring.trace(d, t), "trace")  # type: ignore[misc]
        del decoder
        figures |= guarded(lambda r=runs, m=mode: _parts(r, options, m), "parts")  # type: ignore[misc]
        keep()
        free()
    return {}


def allocated_bytes(options: CheckOptions) -> int:
    import torch

    return torch.cuda.memory_allocated(options.device) if options.device.type == "cuda" else 0


def _parts(weights: "ModelWeights", options: CheckOptions, mode: Mode) -> dict[str, Any]:
    """Time and bytes of a token's parts."""
    from . import gpu_check_measure as measuring

    inputs = measuring.layer_inputs(weights, options.size.shape, mode, [11, 12, 13])
    seconds = measuring.part_seconds(inputs, weights, mode)
    sides = {}
    for side, reads in measuring.side_reads([_last(layer) for layer in inputs], mode).items():
        spent = seconds.get(f"{side} neurons")
        speed = reads.bytes_per_layer / spent if spent else None
        sides[side] = {**vars(reads), "bytes_per_second": speed}
    return {"seconds_per_layer": seconds, "sides": sides}


def _last(layer: Any) -> Any:
    return replace(layer, normed=layer.normed[-1:], residual=layer.residual[-1:])


def measure_offload(options: CheckOptions, percent: int, left: Callable[[], float]) -> dict[str, Any]:
    from . import gpu_check_offload as offload

    if lacking := offload.missing():
        return {"not_measured": f"{', '.join(lacking)} not installed"}
    if left() <= 0:
        return {"not_measured": "out of time"}
    note(f"transformers with accelerate, {percent} % ({left():.0f} s left)")
    budget = percent * weight_bytes(options.size, "float16") // 100
    return guarded(lambda: offload.offloaded_tokens_per_second(options.size, budget, options.device))


def guarded(measure: Callable[[], dict[str, Any] | None], part: str = "") -> dict[str, Any]:
    """A figure that cannot be had does not take the others with it, whatever the reason: it stays in the file. Of a *part*
    of what is measured, under its name."""
    try:
        return measure() or {}
    except Exception as error:
        note(f"not measured: {error}")
        lacking = {"not_measured": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        return {f"{part}_failed": lacking} if part else lacking


def plan_for(options: CheckOptions, kind: Kind, percent: int) -> tuple[TierPlan, dict[str, Any]]:
    """The placement in a share of what the model takes, by the solver; dense parts first, then the hottest neurons."""
    import torch

    from pi_toolkit.solver.placement import PlacementRequest, place

    size, whole = options.size, weight_bytes(options.size, kind)
    budget = whole if percent >= 100 else percent * whole // 100
    # Assumed speeds: they only decide how many neurons of a layer are worth a transfer.
    gpu = Gpu("checked", 2 * whole, 1e12, 2e10, sync_seconds=0.0, context_bytes=0)
    machine = Hardware("checked", cpu_name(), 2**50, 1e11, (gpu,))
    request = PlacementRequest(budget, 0, kind, size.context, 1, sync_seconds=0.0, solver="greedy")
    counts = counts_of(size, options.density)
    placement = place(size.shape, counts, machine, request, [size.predictor_width] * size.layers)
    plan = TierPlan(
        hot=options.device,
        cold=torch.device("cpu"),
        hot_neurons=placement.gpu_neurons,
        attention_hot=placement.attention_on_gpu,
        predictor_hot=placement.predictor_on_gpu,
        head_hot=placement.head_on_gpu,
    )
    facts = {
        "weight_bytes": whole,
        "gpu_planned_bytes": placement.gpu_bytes,
        "hot_neuron_share": plan.hot_share(size.shape),
        "attention_layers_on_gpu": sum(placement.attention_on_gpu),
        "placement": placement.status,
    }
    return plan, facts


def weight_bytes(size: SyntheticSize, kind: Kind) -> int:
    """Everything but the embedding, which stays on the CPU, with the KV cache."""
    from pi_toolkit.solver.memory import unit_bytes

    units = unit_bytes(size.shape, kind, size.context, 1, [size.predictor_width] * size.layers)
    return sum(units.attention) + sum(units.predictor) + units.head + units.neuron * sum(size.shape.ffn_sizes)


def machine_facts(options: CheckOptions) -> dict[str, Any]:
    import torch

    from .conditions import describe
    from .kernels.native import extension

    facts: dict[str, Any] = {
        **describe(options.threads),
        "memory_bytes": memory_bytes(),
        "size": vars(options.size),
        "density": options.density,
        "native_kernels": extension() is not None,
    }
    if options.device.type == "cuda":
        properties = torch.cuda.get_device_properties(options.device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(options.device)
        facts["gpu"] = {"name": properties.name, "memory_bytes": total_bytes, "free_bytes": free_bytes}
        facts["gpu"] |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    return facts


def free() -> None:
    """Give back what the last model held; reference cycles keep weights otherwise."""
    from .gpu_memory import free_cached_memory

    gc.collect()
    guarded(free_cached_memory)  # which repeats an error that a kernel has left


def _write(path: Path, result: dict[str, Any]) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def _print(result: dict[str, Any]) -> None:
    """One row per type, budget and mode."""
    copy = result["copy_bytes_per_second"]
    columns: dict[str, list[object]] = {name: [] for name in ("weights", "budget", "mode", "path", "tokens/s", "eager")}
    columns |= {"hot GB/s": [], "of copy": [], "cold GB/s": [], "accelerate tokens/s": []}
    offload = {case["budget_percent"]: case.get("tokens_per_second") for case in result["offload"]}
    for case in result["models"]:
        for mode, figures in case.get("modes", {}).items():
            sides = figures.get("sides", {})
            hot, cold = (sides.get(side, {}).get("bytes_per_second") for side in ("hot", "cold"))
            beside = offload.get(case["budget_percent"]) if case["kind"] == "float16" else None
            row = [case["kind"], f"{case['budget_percent']} %", mode, figures.get("path", "–")]
            row += [
                _figure(figures.get("tokens_per_second")),
                _figure(figures.get("eager", {}).get("tokens_per_second")),
            ]
            share = 100 * hot / copy if copy and hot is not None else None
            row += [_figure(hot, 1e9), _figure(share, 1.0, " %"), _figure(cold, 1e9), _figure(beside)]
            for name, value in zip(columns, row, strict=True):
                columns[name].append(value)
    print_table({name: tuple(values) for name, values in columns.items()})
    click.echo(f"copy within the memory {_figure(copy, 1e9)} GB/s; {result['seconds']:.0f} s in all")


def _figure(value: float | None, unit: float = 1.0, sign: str = "") -> str:
    return "not measured" if value is None else f"{value / unit:.1f}{sign}"


if __name__ == "__main__":
    main()
