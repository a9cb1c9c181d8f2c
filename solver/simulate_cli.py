"""``pi-simulate``: the predicted speed of models and machines that are not here."""

from typing import TYPE_CHECKING, Any

import click

from pi_toolkit.profiler.command_line import (
    FiniteFloatType,
    ToolkitCommand,
    emit_json,
    given_options,
    json_option,
    note,
    percent,
    print_table,
    readable_bytes,
    version_option,
)
from pi_toolkit.profiler.errors import PlacementError
from pi_toolkit.profiler.hardware import Hardware

from .machine_choice import resolve_hardware
from .memory import BLOCKS, DTYPES
from .placement_inputs import VramType, with_vram
from .simulated_model import CONTEXT

if TYPE_CHECKING:
    from .simulated_model import SimulatedModel
    from .simulated_systems import System
    from .simulation import SimulatedSpeed

FILLED = 320  # in the middle of an answer of 512 tokens to a prompt of 64
SYSTEMS: "tuple[System, ...]" = ("powerinfer", "random", "sparse layers", "llama.cpp", "gpu only")
LAWS = ("relu", "reglu", "swiglu")
_SHARE = FiniteFloatType(exclusive=True, maximum=1.0)


@click.command(cls=ToolkitCommand)
@click.option(
    "--shape", help="Preset, Hugging Face directory (its config.json), workspace or model file with a profile."
)
@click.option("--dtype", type=click.Choice(DTYPES), default="float16", show_default=True, help="Type of the weights.")
@click.option("--hardware", default="auto", show_default=True, help="Preset or TOML file; auto: this machine.")
@click.option("--vram", type=VramType(), help="GiB of the GPU, or of several: 24,24.  [default: --hardware's]")
@click.option(
    "--density", type=_SHARE, help="Share of neurons that fire on a token.  [default: the preset's or the profile's]"
)
@click.option(
    "--law",
    type=click.Choice(LAWS),
    help="How unevenly they fire: as the paper's models of that kind.  [default: the preset's]",
)
@click.option(
    "--predictor-share", type=_SHARE, help="Predictors' parameters by the model's.  [default: the preset's, or 0.0709]"
)
@click.option("--predictor-dtype", type=click.Choice(DTYPES), default="q8_0", show_default=True)
@click.option(
    "--ctx",
    type=click.IntRange(min=1),
    help=f"Tokens of KV cache that have room.  [default: {CONTEXT}, or the model's limit]",
)
@click.option(
    "--filled",
    type=click.IntRange(min=1),
    help=f"Tokens of it that a token reads on average.  [default: {FILLED}, or --ctx]",
)
@click.option("--system", "systems", type=click.Choice(SYSTEMS), multiple=True, help="Repeatable.  [default: all]")
@click.option("--paper", is_flag=True, help="Compare with every speed that the PowerInfer paper prints instead.")
@json_option
@version_option
@click.pass_context
def main(
    context: click.Context,
    shape: str | None,
    dtype: str,
    hardware: str,
    vram: tuple[float, ...] | None,
    density: float | None,
    law: str | None,
    predictor_share: float | None,
    predictor_dtype: str,
    ctx: int | None,
    filled: int | None,
    systems: "tuple[System, ...]",
    paper: bool,
    as_json: bool,
) -> None:
    """Predict the tokens per second of a model on a machine, neither of which need be here.

    \b
    Examples:
      pi-simulate --shape opt-66b --dtype q4_0 --hardware rtx4090-i9-13900k --density 0.04
      pi-simulate --shape opt-6.7b-pi --hardware rtx3090-ryzen-5950x
      pi-simulate --paper
    """
    if paper == (shape is not None):
        raise click.UsageError("one thing at a time: give --shape with a preset, directory or workspace, or --paper")
    if paper:
        _refuse_other_options(context)
        _compare_with_paper(as_json)
        return
    from .simulated_model import LAWS as LAW_FACTS
    from .simulated_model import model_facts, simulated_model

    assert shape is not None, "checked above"
    facts = model_facts(shape)
    limit = facts.shape.max_positions
    if ctx is not None and ctx > limit:
        raise click.BadParameter(
            f"{ctx} is beyond the model's {limit} positions: give at most {limit}", param_hint="--ctx"
        )
    if facts.shape.hidden_size % BLOCKS[predictor_dtype][0]:
        raise click.BadParameter(
            f"rows of {facts.shape.hidden_size} values are no whole number of its blocks: give bfloat16",
            param_hint="--predictor-dtype",
        )
    room = ctx or min(CONTEXT, limit)
    if filled is not None and filled > room:
        raise click.BadParameter(f"{filled} is more than the {room} tokens of --ctx", param_hint="--filled")
    machine = with_vram(resolve_hardware(hardware, max(vram) if vram else None), vram)
    model = simulated_model(
        facts,
        dtype,
        room,
        density,
        LAW_FACTS.get(law or ""),
        predictor_share,
        predictor_dtype,
        filled or min(FILLED, room),
    )
    speeds = _simulate_all(model, machine, systems or SYSTEMS, skip_what_does_not_fit=not systems)
    _print_speeds(shape, model, machine, speeds)
    if as_json:
        emit_json(_json(shape, model, machine, speeds))


def _refuse_other_options(context: click.Context) -> None:
    """Beside ``--paper`` every other option would be ignored without a word."""
    for param in given_options(context):
        if param.name not in ("paper", "as_json"):
            raise click.UsageError(f"--paper compares the paper's models and machines: leave out {param.opts[0]}")


def _simulate_all(
    model: "SimulatedModel", machine: Hardware, systems: "tuple[System, ...]", skip_what_does_not_fit: bool
) -> "dict[System, SimulatedSpeed]":
    from .simulation import simulate

    speeds: dict[System, SimulatedSpeed] = {}
    for system in systems:
        try:
            speeds[system] = simulate(model, system, machine)
        except PlacementError as error:
            if not skip_what_does_not_fit or system != "gpu only":
                raise
            note(f"{system}: {error.message.partition(':')[0]}")
    return speeds


def _print_speeds(
    shape: str, model: "SimulatedModel", machine: Hardware, speeds: "dict[System, SimulatedSpeed]"
) -> None:
    from .simulation import FITTED

    parts = [speed.parts() for speed in speeds.values()]
    milliseconds = lambda key: [f"{1000 * part[f'{key}_seconds']:.1f}" for part in parts]  # noqa: E731
    print_table(
        {
            "system": list(speeds),
            "tokens/s": [f"{speed.tokens_per_second:.2f}" for speed in speeds.values()],
            "ms": [f"{1000 * speed.time.total_seconds:.1f}" for speed in speeds.values()],
            "GPU": milliseconds("gpu"),
            "CPU": milliseconds("cpu"),
            "both": milliseconds("overlapped"),
            "predictors": milliseconds("predictor"),
            "sync": milliseconds("sync"),
            "overhead": milliseconds("overhead"),
            "FFN on GPU": [percent(speed.reads.gpu_share) for speed in speeds.values()],
        }
    )
    parameters = model.shape.num_parameters()
    click.echo(
        f"\n{shape}, {parameters / 1e9:.1f}B parameters in {model.dtype}, {percent(_density(model))} of the neurons firing, "
        f"predictors {percent(_predictor_parameters(model) / parameters)} of the parameters in {model.predictor_dtype}, "
        f"{model.tokens_read} of {model.context} tokens in the KV cache"
    )
    gpus = ", ".join(f"{gpu.name} ({readable_bytes(gpu.memory_bytes)})" for gpu in machine.gpus) or "no GPU"
    click.echo(f"{machine.name}: {machine.cpu_name}, {gpus}")
    click.echo(
        f"predicted from bytes and bandwidths, {1e3 * FITTED.overhead_seconds_per_layer:.2f} ms of overhead per layer and "
        f"{percent(FITTED.scattered_read_share)} of the CPU's bandwidth on scattered rows; errors: pi-simulate --paper"
    )


def _json(
    shape: str, model: "SimulatedModel", machine: Hardware, speeds: "dict[System, SimulatedSpeed]"
) -> dict[str, Any]:
    """The first system's figures on top, all systems' below."""
    from .simulation import FITTED

    systems = {
        system: {
            "predicted_tokens_per_second": speed.tokens_per_second,
            "gap": speed.reads.gap,
            **speed.parts(),
            "prompt_seconds": speed.prompt_seconds,
            "gpu_share_of_ffn_reads": speed.reads.gpu_share,
        }
        for system, speed in speeds.items()
    }
    return {
        "shape": shape,
        "dtype": model.dtype,
        "hardware": machine.name,
        "density": _density(model),
        "context": model.context,
        "tokens_read": model.tokens_read,
        "constants": vars(FITTED),
        **next(iter(systems.values())),
        "systems": systems,
    }


def _density(model: "SimulatedModel") -> float:
    neurons = sum(model.shape.ffn_sizes)
    return sum(float(share.sum()) for share in model.firing_shares) / neurons


def _predictor_parameters(model: "SimulatedModel") -> int:
    """Copies count as what takes their bytes in F16."""
    from pi_toolkit.predictor_training.predictor_size import F16_BYTES, predictor_bytes

    sizes = zip(model.predictor_sizes, model.shape.ffn_sizes, strict=True)
    return sum(predictor_bytes(model.shape.hidden_size, neurons, size) for size, neurons in sizes) // F16_BYTES


def _compare_with_paper(as_json: bool) -> None:
    from .cli import working
    from .paper_figures import compare, median_error, wrong_orders
    from .simulation import FITTED

    with working("placing the paper's models"):
        compared = compare()
    print_table(
        {
            "source": [row.published.source for row in compared],
            "machine": [row.published.hardware.partition("-")[0] for row in compared],
            "model": [row.published.model for row in compared],
            "type": [row.published.dtype for row in compared],
            "system": [row.published.system for row in compared],
            "tokens": [row.published.output_tokens for row in compared],
            "published": [_range(row.published.low, row.published.high, row.published.baseline) for row in compared],
            "predicted": [f"{row.predicted:.2f}" + ("×" if row.published.baseline else "") for row in compared],
            "error": ["fitted" if row.published.fitted else f"{100 * row.error:+.0f} %" for row in compared],
        }
    )
    wrong = wrong_orders(compared)
    click.echo(f"\nmedian error of the speeds that were not fitted {percent(median_error(compared))}")
    for first, second in wrong:
        click.echo(f"wrong order: {_name(first.published)} and {_name(second.published)}")
    if as_json:
        rows = [vars(row.published) | {"predicted": row.predicted, "error": row.error} for row in compared]
        emit_json(
            {
                "rows": rows,
                "median_error": median_error(compared),
                "wrong_orders": [[_name(a.published), _name(b.published)] for a, b in wrong],
                "constants": vars(FITTED),
            }
        )


def _range(low: float, high: float, baseline: str | None) -> str:
    text = f"{low:.4g}" if low == high else f"{low:.3g}–{high:.3g}"
    return f"{text}× {baseline}" if baseline else text


def _name(row: Any) -> str:
    return f"{row.model} {row.dtype} {row.system} {row.output_tokens}"
