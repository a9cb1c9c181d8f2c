"""``pi-eval``: what skipping neurons costs in quality, on text and on multiple-choice questions."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pi_toolkit.profiler.command_line import (
    MOST_SEQUENCES,
    CountType,
    ToolkitCommand,
    device_option,
    emit_json,
    given_options,
    json_option,
    note,
    version_option,
)

from .bench_cli import MODES, ListType
from .eval_setup import TaskOptions, TextOptions
from .run_options import kind_option, threads_option

if TYPE_CHECKING:
    from .eval_windows import Bos
    from .kernels.sparse_ffn_reference import Mode

CORPUS = "wikipedia"
TASK_CONTEXT = 2048
THE_WORKSPACES_OWN = "the workspace's own"
# What only the evaluation on text, or only that on questions, reads.
FOR_TEXT = (
    "split",
    "tokens",
    "window",
    "stride",
    "score_from",
    "bos",
    "prompts",
    "prompt_tokens",
    "new_tokens",
    "reference",
)
FOR_TASKS = ("limit", "fewshot", "ctx")


@click.command(cls=ToolkitCommand)
@click.argument("workspace", type=click.Path(path_type=Path))
@click.option("--corpus", help=f"wikipedia, wikipedia-intros, or a file.  [default: {CORPUS}; with --tasks, none]")
@click.option(
    "--split", type=click.Choice(["held-out", "all"]), default="held-out", show_default=True, help="Documents to read."
)
@click.option("--tokens", type=CountType(), default="30k", show_default=True, help="Tokens to read.")
@click.option("--window", type=click.IntRange(min=2), help="Tokens per window.  [default: 512, or the model's limit]")
@click.option("--stride", type=click.IntRange(min=1), help="From one window to the next.  [default: the window]")
@click.option(
    "--score-from",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Position whose prediction counts first.",
)
@click.option(
    "--bos",
    type=click.Choice(["window", "document"]),
    help="What begins with BOS, if the tokenizer adds it.  [default: window with --score-from, else document]",
)
@click.option("--mode", "modes", type=ListType(click.Choice(MODES)), help="[default: all that are possible]")
@click.option("--prompts", type=click.IntRange(min=0), default=8, show_default=True, help="Texts to generate.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("-n", "--new-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Of each text.")
@click.option(
    "--reference",
    is_flag=False,
    flag_value=THE_WORKSPACES_OWN,
    metavar="[HFDIR]",
    help="Run the same windows through transformers: of the workspace's model, or of HFDIR.",
)
@click.option(
    "--tasks",
    type=ListType(click.STRING),
    help="Multiple-choice .jsonl files, and lm-eval's task names or .yaml files.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Questions of each task.  [default: all]")
@click.option("--fewshot", type=click.IntRange(min=0), help="Examples before each question of lm-eval's tasks.")
@click.option("--ctx", type=click.IntRange(min=2), help=f"Context for --tasks.  [default: up to {TASK_CONTEXT}]")
@click.option("--gpuidx", type=click.Path(path_type=Path), help="Placement to use.  [default: the workspace's]")
@click.option(
    "--slots", type=click.IntRange(1, MOST_SEQUENCES), default=4, show_default=True, help="Windows or choices at once."
)
@threads_option
@click.option("--model", help="Where the weights are now, if not where pi-profile found them.")
@device_option
@kind_option
@json_option
@version_option
@click.pass_context
def main(
    context: click.Context,
    workspace: Path,
    corpus: str | None,
    split: str,
    tokens: int,
    window: int | None,
    stride: int | None,
    score_from: int,
    bos: "Bos | None",
    modes: "tuple[Mode, ...] | None",
    prompts: int,
    prompt_tokens: int,
    new_tokens: int,
    reference: str | None,
    tasks: tuple[str, ...] | None,
    limit: int | None,
    fewshot: int | None,
    ctx: int | None,
    gpuidx: Path | None,
    slots: int,
    threads: int | None,
    model: str | None,
    device: str,
    dtype: str,
    as_json: bool,
) -> None:
    """Compare the modes of the model of WORKSPACE, or of a .gguf file, on text that nothing was fitted to.

    Perplexity, divergence from dense, and by layer which neurons fire and which the predictors name, on the windows and
    while generating. With --tasks, accuracy on multiple-choice questions: a .jsonl file has "context", "choices" and
    "label" on each line, or PIQA's "goal", "sol1", "sol2" and "label".

    \b
    Examples:
      pi-eval opt-6.7b-pi --corpus wikipedia-intros
      pi-eval model.powerinfer.gguf --corpus text.txt --window 128 --score-from 64
      pi-eval opt-6.7b-pi --tasks questions.jsonl,piqa
    """
    import torch

    from pi_toolkit.profiler.workspace import Workspace, open_checkpoint, read_model

    from .engine import EngineOptions, check_context, open_engine
    from .eval_reference import load_reference, open_other
    from .eval_setup import describe_engine, measure_tasks, measure_text
    from .eval_text import possible_modes

    _refuse_idle_options(context, text=corpus is not None or not tasks, questions=bool(tasks))
    place = Workspace(workspace)
    record = read_model(place)
    limit_of_positions, chosen = record.shape.max_positions, possible_modes(place, record, modes)
    if modes is None and record.shape.falls_silent and "predicted" not in chosen:
        note("no predictors, so mode predicted is left out (pi-train-predictor makes them)")
    check_context(record.shape, ctx)
    text = questions = None
    if corpus is not None or not tasks:
        window = window or min(512, limit_of_positions)
        text = TextOptions(
            corpus or CORPUS, split, tokens, window, stride or window, score_from,
            bos or ("window" if score_from else "document"), prompts, prompt_tokens, new_tokens,
        )  # fmt: skip
        text.check(limit_of_positions)
    if tasks:
        questions = TaskOptions(tasks, limit, fewshot)
        questions.check()
    if threads:
        torch.set_num_threads(threads)
    context_tokens = max(text.context if text else 0, (ctx or TASK_CONTEXT) if questions else 0)
    options = EngineOptions(
        chosen[-1], gpuidx, min(context_tokens, limit_of_positions), device, dtype, model, slots, threads
    )
    twin = None
    if text and reference:
        own = reference == THE_WORKSPACES_OWN
        twin = load_reference(
            open_checkpoint(place, record, model) if own else open_other(reference, record.shape), device
        )
    engine = open_engine(place, options)
    note(f"evaluating {record.name} in {engine.decoder.weights.kind}, modes {', '.join(chosen)}")
    conditions, result = describe_engine(engine), dict[str, Any]()
    if text:
        result |= measure_text(engine, chosen, text, twin, conditions)
    if questions:
        result |= measure_tasks(engine, chosen, questions)
    if as_json:
        emit_json(result | {"conditions": conditions})


def _refuse_idle_options(context: click.Context, text: bool, questions: bool) -> None:
    """A usage error for options that would be ignored without a word."""
    for param in given_options(context):
        if not text and param.name in FOR_TEXT:
            raise click.UsageError(f"{param.opts[0]} is for evaluation on text: give --corpus too, or leave it out")
        if not questions and param.name in FOR_TASKS:
            raise click.UsageError(f"{param.opts[0]} is for --tasks: give --tasks too, or leave it out")
