"""``pi-bench``: speed beside the baselines, in one run and under stated conditions."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi_toolkit.profiler.command_line import (
    MOST_THREADS,
    FiniteFloatType,
    ToolkitCommand,
    device_option,
    emit_json,
    json_option,
    progress_bar,
    version_option,
)

if TYPE_CHECKING:
    from .bench_setup import Baseline, Setup
    from .kernels.sparse_ffn_reference import Mode

MODES = ("dense", "exact", "predicted")
DTYPES = ("auto", "float32", "bfloat16", "float16", "q8_0", "q4_0")
PROMPT = """A mill stood by the river where the road from the hills comes down to the plain. In spring the water rose, and
the miller opened the gates one after the other, as his father had taught him. The wheel turned faster then, and the whole
house trembled a little. Farmers brought wheat, rye and barley in carts, waited in the yard, and spoke about the weather,
the price of salt and the new bridge. When the summer was dry, the wheel stood still for weeks. The miller mended sacks and
cleaned the stones, and in the evening he wrote down how high the water had been. His notes cover more than forty years,
and those who study the climate of the valley still read them, because nobody else had measured so patiently."""


@dataclass(frozen=True)
class ListType(click.ParamType):
    """Values separated by commas, each once and in this order."""

    element: click.ParamType
    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        texts = [part.strip() for part in value.split(",")]
        if not all(texts):
            self.fail(f"{value!r} has an empty part: write values separated by single commas", param, context)
        parts = [self.element.convert(text, param, context) for text in texts]
        return tuple(dict.fromkeys(parts))


class BaselineType(click.ParamType):
    """``llama.cpp:FILE`` or ``transformers:DIRECTORY``."""

    name = "baseline"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> "Baseline":
        from .bench_setup import Baseline

        kind, _, model = value.partition(":")
        if kind not in ("llama.cpp", "transformers") or not model:
            self.fail(f"{value!r} is not a baseline: write llama.cpp:DENSE.gguf or transformers:HFDIR", param, context)
        return Baseline(kind, model)


@click.command(cls=ToolkitCommand)
@click.argument("workspace", type=click.Path(path_type=Path), required=False)
@click.option("--mode", "modes", type=ListType(click.Choice(MODES)), help="[default: all that are possible]")
@click.option("--dtype", "dtypes", type=ListType(click.Choice(DTYPES)), default="auto", help="auto: as stored.")
@click.option(
    "--against", "baselines", type=BaselineType(), multiple=True, help="llama.cpp:DENSE.gguf or transformers:HFDIR."
)
@click.option(
    "--density",
    "densities",
    type=ListType(FiniteFloatType(exclusive=True, maximum=1.0)),
    help="Make these shares of the neurons fire, drawn at random: for speed alone, the text is nonsense.",
)
@click.option("--threads", type=click.IntRange(1, MOST_THREADS), help="CPU threads of everybody.  [default: all cores]")
@click.option(
    "-p", "--prompt-tokens", "lengths", type=ListType(click.IntRange(min=1)), default="8,512", show_default=True
)
@click.option("-n", "--new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Decoding steps.")
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True, help="Of each contender, in turn.")
@click.option("--ctx", type=click.IntRange(min=2), help="Context of everybody.  [default: what prompt and answer need]")
@click.option("--text", type=click.Path(path_type=Path, dir_okay=False), help="UTF-8 text to take the prompts from.")
@click.option("--model", help="Where the weights are now, if not where pi-profile found them.")
@click.option("--machine", is_flag=True, help="Measure this machine instead, and write its hardware file.")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="Hardware file of --machine.  [default: where --hardware auto finds it]",
)
@device_option
@json_option
@version_option
def main(
    workspace: Path | None,
    modes: "tuple[Mode, ...] | None",
    dtypes: tuple[str, ...],
    baselines: "tuple[Baseline, ...]",
    densities: tuple[float, ...] | None,
    threads: int | None,
    lengths: tuple[int, ...],
    new_tokens: int,
    runs: int,
    ctx: int | None,
    text: Path | None,
    model: str | None,
    machine: bool,
    out: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Time the model of WORKSPACE, or of a .gguf file, in each mode, in turn with llama.cpp and transformers.

    Prompt and decoding are timed apart. Beside the medians stand the bytes that a token reads, and what share that makes
    of the read bandwidth, which is measured in the same run. Everybody works in a process of its own, one at a time.

    \b
    Examples:
      pi-bench opt-6.7b-pi --threads 8
      pi-bench model.powerinfer.gguf --against llama.cpp:model.gguf -p 8,512 -n 64 --runs 5
      pi-bench --machine
    """
    from .conditions import usable_cores

    if (out is not None and not machine) or machine != (workspace is None):
        raise click.UsageError("give a workspace or model file, or --machine with or without -o FILE.toml")
    threads = threads or usable_cores()
    if machine:
        from pi_toolkit.profiler.this_machine import measured_hardware_file

        from .bench_machine import measure_machine

        measure_machine(out or measured_hardware_file(), threads, as_json)
        return

    from pi_toolkit.profiler.workspace import Workspace

    from .bench_setup import Setup

    assert workspace is not None, "checked above"
    setup = Setup(
        workspace=Workspace(workspace),
        modes=modes,
        dtypes=dtypes,
        baselines=baselines,
        densities=densities,
        threads=threads,
        lengths=tuple(sorted(lengths)),
        steps=new_tokens,
        context=ctx,
        device=device,
        model=model,
    )
    _bench(setup, text.read_text("utf-8") if text else PROMPT, runs, as_json)


def _bench(setup: "Setup", text: str, runs: int, as_json: bool) -> None:
    from .bench_report import print_report, to_json
    from .bench_setup import add_worker_facts, describe_conditions, make_entrants, make_recipes
    from .bench_worker import open_workers
    from .benchmark import Plan, run_benchmark
    from .conditions import OthersLoad, warn_if_busy

    recipes = make_recipes(setup)
    warn_if_busy()
    conditions = describe_conditions(setup)
    with open_workers(recipes.all) as (reader, *workers):
        add_worker_facts(conditions, recipes, workers)
        entrants = make_entrants(recipes, workers, setup.densities)
        prompts = {length: workers[0].ask("prompt", text, length) for length in setup.lengths}
        plan = Plan(prompts, setup.steps, runs)
        others = OthersLoad([os.getpid(), *(worker.process for worker in (reader, *workers))])
        with progress_bar("timing", len(entrants) * (runs + 1), "runs") as bar:
            benchmark = run_benchmark(entrants, reader, plan, bar.advance)
        conditions["other_processes_cores"] = others.cores()
    print_report(benchmark, plan, conditions)
    if as_json:
        emit_json(to_json(benchmark, plan, conditions))


if __name__ == "__main__":  # pi-place starts it so
    main()
