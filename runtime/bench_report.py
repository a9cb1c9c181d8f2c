"""What ``pi-bench`` prints: one row per contender, ratios against the baselines, the conditions; and the same as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from pi_toolkit.profiler.command_line import percent, print_table

from .benchmark import Benchmark, Entrant, Plan, Result


def bytes_per_token(result: Result, plan: Plan) -> float:
    """Counted for ourselves; all weights and the cache for the others, who read everything."""
    if result.touched:
        return result.touched.bytes_per_token
    facts = result.entrant.worker.facts
    return facts["bytes_per_token"] + facts["cache_bytes_per_position"] * plan.mean_positions


def bandwidth_share(result: Result, plan: Plan, benchmark: Benchmark) -> float | None:
    """Of the sequential read bandwidth of this run; None for ourselves with a part of the model on a GPU."""
    if result.touched and not result.entrant.worker.facts["on_cpu"]:
        return None
    return bytes_per_token(result, plan) * result.decode.median / benchmark.read_bytes_per_second


def ratios(benchmark: Benchmark, plan: Plan) -> list[dict[str, Any]]:
    """Medians of ourselves over those of every baseline: others, and our own dense of the same weights.

    ``decode_min`` and ``decode_max`` are the least and largest ratio within one round.
    """
    rows = []
    for mine in (result for result in benchmark.results if result.entrant.is_own):
        for base in _baselines(mine.entrant, benchmark.results):
            by_round = [a / b for a, b in zip(mine.decode_runs, base.decode_runs, strict=True)]
            rows.append(
                {
                    "name": mine.entrant.name,
                    "against": base.entrant.name,
                    "decode": mine.decode.median / base.decode.median,
                    "decode_min": min(by_round),
                    "decode_max": max(by_round),
                    "prompt": {str(p): mine.prompt(p).median / base.prompt(p).median for p in plan.prompts},
                }
            )
    return rows


def _baselines(mine: Entrant, results: Sequence[Result]) -> list[Result]:
    """Our dense of the same weights, and others; of one library with several types those of our own, if it is there."""
    same_type = {_library(other.entrant) for other in results if other.entrant.dtype == mine.dtype}
    chosen = []
    for base in results:
        other = base.entrant
        if other.is_own:
            fits = other.mode == "dense" and other.worker is mine.worker and mine.mode != "dense"
        else:
            fits = other.dtype == mine.dtype or _library(other) not in same_type
        chosen += [base] if fits else []
    return chosen


def _library(entrant: Entrant) -> str:
    return entrant.name.partition(":")[0]


def print_report(benchmark: Benchmark, plan: Plan, conditions: dict[str, Any]) -> None:
    """The tables on stdout."""
    results = benchmark.results
    table: dict[str, Sequence[object]] = {
        "contender": [result.entrant.name for result in results],
        "decode tok/s": [f"{result.decode.median:.1f}" for result in results],
        "min–max": [f"{result.decode.minimum:.1f}–{result.decode.maximum:.1f}" for result in results],
    }
    for length in plan.prompts:
        table[f"prompt {length}"] = [f"{result.prompt(length).median:.1f}" for result in results]
    table["MB/token"] = [f"{bytes_per_token(result, plan) / 1e6:,.1f}" for result in results]
    table["GB/s"] = [f"{bytes_per_token(result, plan) * result.decode.median / 1e9:.1f}" for result in results]
    shares = [bandwidth_share(result, plan, benchmark) for result in results]
    table["of limit"] = ["–" if share is None else f"{100 * share:.0f} %" for share in shares]
    table["fire"] = [percent(result.touched.firing_share) if result.touched else "–" for result in results]
    candidates = [result.touched.candidate_share if result.touched else None for result in results]
    table["candidates"] = ["–" if share is None else percent(share) for share in candidates]
    print_table(table)
    click.echo()
    _print_ratios(benchmark, plan)
    for agreement in benchmark.agreements:
        click.echo(
            f"greedy tokens of {agreement.name}: the first {agreement.equal} of {agreement.tokens} are those of "
            f"{agreement.against}"
        )
    if any(result.entrant.density is not None for result in results):
        click.echo(
            "densities are made up, with rows drawn at random: they are honest for speed, and the text is nonsense"
        )
    _print_conditions(benchmark, plan, conditions)


def _print_ratios(benchmark: Benchmark, plan: Plan) -> None:
    rows = ratios(benchmark, plan)
    if not rows:
        return
    table: dict[str, Sequence[object]] = {
        "contender": [row["name"] for row in rows],
        "against": [row["against"] for row in rows],
        "decode": [f"{row['decode']:.2f} ×" for row in rows],
        "min–max": [f"{row['decode_min']:.2f}–{row['decode_max']:.2f}" for row in rows],
    }
    for length in plan.prompts:
        table[f"prompt {length}"] = [f"{row['prompt'][str(length)]:.2f} ×" for row in rows]
    print_table(table)
    click.echo()


def _print_conditions(benchmark: Benchmark, plan: Plan, conditions: dict[str, Any]) -> None:
    read_kernel, read_sum = (max(runs) for runs in zip(*benchmark.read_runs, strict=True))
    click.echo(
        f"medians of {plan.runs} alternating runs; decoding {plan.steps} tokens behind {len(plan.shortest)}; limit: "
        f"{benchmark.read_bytes_per_second / 1e9:.1f} GB/s read in this run (kernels {read_kernel / 1e9:.1f}, torch's sum "
        f"{read_sum / 1e9:.1f})"
    )
    load, others = conditions["load_average"], conditions["other_processes_cores"]
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    click.echo(
        f"{conditions['cpu']}, {conditions['cores']} cores, {conditions['threads']} threads, load average at start "
        f"{'unknown' if load is None else f'{load:.2f}'}; {versions}"
    )
    if others is not None:
        click.echo(
            f"other processes used {others:.2f} cores meanwhile{', which makes these figures too low' * (others > 0.1)}"
        )
    for name, instruction_set in conditions["instruction_sets"].items():
        click.echo(f"instruction set of {name}: {instruction_set}")
    for name, num_bytes in conditions["file_bytes"].items():
        click.echo(f"{name}: {num_bytes / 1e6:,.0f} MB")


def to_json(benchmark: Benchmark, plan: Plan, conditions: dict[str, Any]) -> dict[str, Any]:
    """Everything that is printed, and the runs it was made of."""
    return {
        "contenders": [_contender(result, plan, benchmark) for result in benchmark.results],
        "ratios": ratios(benchmark, plan),
        "agreement": [asdict(agreement) for agreement in benchmark.agreements],
        "read_bytes_per_second": benchmark.read_bytes_per_second,
        "read_runs": [{"kernel": by_kernel, "sum": by_sum} for by_kernel, by_sum in benchmark.read_runs],
        "prompts": list(plan.prompts),
        "new_tokens": plan.steps,
        "runs": plan.runs,
        "conditions": conditions,
    }


def _contender(result: Result, plan: Plan, benchmark: Benchmark) -> dict[str, Any]:
    """``prompt_tokens_per_second`` is that of the longest prompt; ``min`` and ``max`` are decode's."""
    entrant, decode = result.entrant, result.decode
    return {
        "name": entrant.name,
        "mode": entrant.mode or "dense",
        "dtype": entrant.dtype,
        "own": entrant.is_own,
        "density": entrant.density,
        "decode_tokens_per_second": decode.median,
        "prompt_tokens_per_second": result.prompt(max(plan.prompts)).median,
        "min": decode.minimum,
        "max": decode.maximum,
        "decode_runs": result.decode_runs,
        "prompts": {str(length): asdict(result.prompt(length)) for length in plan.prompts},
        "bytes_per_token": bytes_per_token(result, plan),
        "bandwidth_share": bandwidth_share(result, plan, benchmark),
        "touched": asdict(result.touched) if result.touched else None,
        "firing_share": result.touched.firing_share if result.touched else None,
        "candidate_share": result.touched.candidate_share if result.touched else None,
    }
