"""``pi-run``: text from a workspace."""

from pathlib import Path

import click

from pi_toolkit.profiler.command_line import (
    FiniteFloatType,
    ToolkitCommand,
    device_option,
    emit_json,
    json_option,
    note,
    percent,
    version_option,
)

from .run_options import kind_option, threads_option


@click.command(cls=ToolkitCommand)
@click.argument("workspace", type=click.Path(path_type=Path))
@click.option("-p", "--prompt", required=True, help="Text to continue.")
@click.option(
    "-n", "--new-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Tokens to generate."
)
@click.option(
    "--mode",
    type=click.Choice(["dense", "exact", "predicted"]),
    help="All neurons; those that fire; those the predictors name.  [default: predicted, or exact without predictors]",
)
@click.option("--temperature", type=FiniteFloatType(), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="Draw among this many; 0: all.")
@click.option("--top-p", type=FiniteFloatType(exclusive=True, maximum=1.0), default=1.0, show_default=True)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)
@click.option("--ctx", type=click.IntRange(min=2), help="Tokens of prompt and answer.  [default: the placement's]")
@click.option("--gpuidx", type=click.Path(path_type=Path), help="Placement to use.  [default: the workspace's]")
@click.option(
    "--vram-budget",
    type=FiniteFloatType(minimum=-1.0, maximum=2.0**20),
    help="GiB of the GPU for the model; neurons are placed anew where no file fits. Below 0: all that is free.",
)
@click.option("--reset-gpu-index", is_flag=True, help="Solve the placement again, and write its file.")
@click.option("--disable-gpu-index", is_flag=True, help="Heed no placement file, and keep all neurons on the CPU.")
@click.option("--cpu-only", is_flag=True, help="Heed neither a GPU nor a placement.")
@threads_option
@click.option("--model", help="Where the weights are now, if not where pi-profile found them.")
@device_option
@kind_option
@json_option
@version_option
def main(
    workspace: Path,
    prompt: str,
    new_tokens: int,
    mode: str | None,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    ctx: int | None,
    gpuidx: Path | None,
    vram_budget: float | None,
    reset_gpu_index: bool,
    disable_gpu_index: bool,
    cpu_only: bool,
    threads: int | None,
    model: str | None,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Continue a text with the model of WORKSPACE, hot neurons on the GPU, cold ones on the CPU, silent ones skipped.

    A model file, X.powerinfer.gguf or a dense X.gguf, stands for a workspace.

    \b
    Example:
      pi-run opt-6.7b-pi -p "Once upon a time" -n 128
      pi-run opt-6.7b.powerinfer.gguf -p "Once upon a time"
    """
    import torch

    from pi_toolkit.profiler.workspace import Workspace

    from .engine import EngineOptions, open_engine
    from .generate import check_prompt, generate
    from .sampling import Sampler, SamplingOptions
    from .text_stream import TextStream

    refuse_broken_text(prompt)
    if threads:
        torch.set_num_threads(threads)
    if [reset_gpu_index, disable_gpu_index, cpu_only].count(True) > 1:
        raise click.UsageError("--reset-gpu-index, --disable-gpu-index and --cpu-only exclude one another: give one")
    placement = (vram_budget, reset_gpu_index, disable_gpu_index, cpu_only)
    options = EngineOptions(mode, gpuidx, ctx, device, dtype, model, 1, threads, *placement)  # type: ignore[arg-type]
    engine = open_engine(Workspace(workspace), options)
    context = engine.decoder.cache.context
    prompt_ids = engine.tokenizer(prompt)["input_ids"]
    check_prompt(len(prompt_ids), context)
    if len(prompt_ids) + new_tokens > context:
        advice = ": raise --ctx for more" if context < engine.record.shape.max_positions else ""
        note(f"the context of {context} tokens ends the answer after {context - len(prompt_ids)} tokens{advice}")

    stream = TextStream(engine.tokenizer, prompt_ids)
    click.echo(prompt, nl=False)

    def show(token: int) -> None:
        click.echo(stream.push(token), nl=False)

    sampler = Sampler(SamplingOptions(temperature, top_k, top_p, seed))
    result = generate(engine.decoder, prompt_ids, new_tokens, sampler, engine.end_ids, show)
    click.echo(stream.finish())
    note(
        f"prompt {result.prompt_tokens} tokens at {result.prompt_tokens_per_second:,.1f} tokens/s, "
        f"{len(result.token_ids)} tokens generated at {result.decode_tokens_per_second:,.1f} tokens/s after the first; mode "
        f"{engine.decoder.mode}, {percent(engine.hot_share)} of the neurons on the hot tier ({engine.plan.hot})"
    )
    if as_json:
        emit_json(
            {
                "text": stream.text,
                "token_ids": result.token_ids,
                "prompt_tokens": result.prompt_tokens,
                "generated_tokens": len(result.token_ids),
                "prompt_tokens_per_second": result.prompt_tokens_per_second,
                "decode_tokens_per_second": result.decode_tokens_per_second,
                "mode": engine.decoder.mode,
                "gpu_neuron_share": engine.hot_share,
            }
        )


def refuse_broken_text(prompt: str) -> None:
    """A usage error for bytes on the command line that are no text in the terminal's encoding."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise click.BadParameter(
            "holds bytes that are no text in this terminal's encoding: use a UTF-8 locale", param_hint="--prompt"
        ) from None
