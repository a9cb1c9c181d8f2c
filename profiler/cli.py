"""``pi-profile``: from a model to a workspace with its firing counts."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .command_line import (
    CountType,
    ToolkitCommand,
    device_option,
    dtype_option,
    emit_json,
    json_option,
    note,
    percent,
    print_table,
    progress_bar,
    version_option,
)

if TYPE_CHECKING:
    from .locality import Locality


@click.command(cls=ToolkitCommand)
@click.argument("model")
@click.option("--corpus", default="wikipedia", show_default=True, help="wikipedia, wikipedia-intros, or a file.")
@click.option("--tokens", type=CountType(), default="1M", show_default=True, help="Tokens to count on.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Windows per pass.")
@click.option("--window", type=click.IntRange(min=1), help="Tokens per window.  [default: 512, or the model's limit]")
@click.option("--revision", help="Revision of a hub model.")
@click.option(
    "--activation", help="Activation of a .gguf file that states none, as one from llama.cpp: relu, fatrelu:0.01 …"
)
@device_option
@dtype_option
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Workspace to write.  [default: ./<model name>-pi]")
@json_option
@version_option
def main(
    model: str,
    corpus: str,
    tokens: int,
    batch_size: int,
    window: int | None,
    revision: str | None,
    activation: str | None,
    device: str,
    dtype: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Count how often each FFN neuron of MODEL fires, and start a workspace with the counts.

    MODEL is a Hugging Face directory or hub id, or a .gguf file.

    \b
    Example:
      pi-profile facebook/opt-6.7b --tokens 1M
    """
    from . import activation_stats
    from .atomic_write import check_writable
    from .corpus import corpus_name, documents, split_of
    from .device import resolve_device, resolve_dtype
    from .hf_model import load_hf_model
    from .locality import locality_figure, measure_locality
    from .record import record_firings
    from .token_windows import check_window, load_tokenizer, token_windows, window_batches
    from .workspace import Workspace, describe, model_name, open_weights, refuse_other_model, write_model

    workspace = Workspace(out or Path(f"{model_name(model)}-pi"))
    check_writable(workspace.path / "model.json", kind="file")
    check_writable(workspace.activation, kind="directory")
    checkpoint = open_weights(model, revision, activation)
    shape, record = checkpoint.shape, describe(model, revision, checkpoint)
    refuse_other_model(workspace, record)
    window = window or min(512, shape.max_positions)
    check_window(window, shape.max_positions)
    texts = (text for i, text in enumerate(documents(corpus)) if split_of(i) != "held-out")

    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device, checkpoint.dtype(), shape.num_parameters())
    note(f"profiling {record.name} on {torch_device} in {str(torch_dtype).removeprefix('torch.')}")
    hf_model = load_hf_model(checkpoint, torch_device, torch_dtype)
    windows = token_windows(texts, load_tokenizer(checkpoint.directory, shape.vocabulary_size), window, tokens)
    batches = window_batches(windows, batch_size, shape.vocabulary_size)
    with progress_bar("profiling", tokens) as progress:
        recording = record_firings(hf_model, shape, batches, progress.advance)
    if recording.tokens < tokens:
        note(f"the corpus ended after {recording.tokens:,} of {tokens:,} tokens")

    stats = activation_stats.ActivationStats(
        recording.counts,
        record.fingerprint,
        recording.tokens,
        corpus_name(corpus),
        window,
        str(torch_dtype).removeprefix("torch."),
    )
    title = f"{record.name}: {recording.tokens:,} tokens of {stats.corpus}"
    figure = locality_figure(stats.counts, recording.tokens, title)
    activation_stats.write(workspace.activation, stats, {"locality.png": figure})
    write_model(workspace, record)

    locality = measure_locality(stats.counts, recording.tokens)
    print_locality(locality, shape.ffn_sizes)
    speed = recording.tokens / recording.seconds
    click.echo(f"{recording.tokens:,} tokens at {speed:,.0f} tokens/s\nworkspace {workspace.path}")
    if as_json:
        result = {"tokens": recording.tokens, "layers": shape.num_layers, **vars(locality)}
        emit_json(result | {"tokens_per_second": speed, "workspace": str(workspace.path)})


def print_locality(locality: "Locality", ffn_sizes: tuple[int, ...]) -> None:
    """One row per layer, then the whole model."""
    print_table(
        {
            "layer": range(len(ffn_sizes)),
            "neurons": ffn_sizes,
            "fire per token": [percent(share) for share in locality.firing_share],
            "carry 80 % of firings": [percent(share) for share in locality.share_for_80_percent],
        }
    )
    click.echo(f"\n{percent(locality.share_for_80_percent_model)} of the model's FFN neurons carry 80 % of its firings")
